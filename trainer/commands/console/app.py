"""The routes of the console."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from trainer.commands.console import actions, form, logs, pages
from trainer.commands.console.actions import RefusedError
from trainer.commands.console.folder import Folder, UnknownRunError
from trainer.commands.console.guard import Guard
from trainer.config import shell
from trainer.config.typed import ConsoleConfig
from trainer.faults.problems import Problem
from trainer.storage.requests import Request as RunRequest

MAX_FORM_BYTES = 64 * 1024
LIVE_SECS = 2.0  # between two looks whether a run has changed
ASK_AGAIN_MS = 5000  # after which a browser asks for the changes of a run that was not running


@dataclass(frozen=True)
class Console:
    """The request handlers of one console."""

    folder: Folder
    config: ConsoleConfig

    @property
    def can_post(self) -> bool:
        return not self.config.read_only

    def routes(self) -> list[BaseRoute]:
        """Returns the routes; with read_only, none of them changes anything."""
        name = "/runs/{name:path}"
        reading: list[BaseRoute] = [
            Route("/", self.index),
            Route("/favicon.ico", lambda request: Response(status_code=204)),  # every browser asks
            Mount("/static", StaticFiles(directory=Path(__file__).parent / "static")),
            Route(f"{name}/live", self.live),
            Route(f"{name}/log/{{task}}", self.log),
            Route(f"{name}/files/{{file:path}}", self.file),
        ]
        steering = [
            _post(f"{name}/stop", self._button(actions.stop, "stopping: finishing the step and saving a checkpoint")),
            _post(f"{name}/save", self._button(actions.save, "saving before the next step")),
            _post(f"{name}/continue", self._button(actions.continue_run, "starting again")),
            _post(f"{name}/stacks/{{task}}", self._task_button(RunRequest.stacks)),
        ]
        starting = [Route("/new", self.new), _post("/new/plan", self.show_plan), _post("/new/start", self.start)]
        killing = [_post(f"{name}/kill/{{task}}", self._task_button(RunRequest.kill))]
        return [
            *reading,
            *([*starting, *steering] if self.can_post else []),
            *(killing if self.can_post and self.config.kill else []),
            Route(name, self.run),
        ]

    def index(self, request: Request) -> Response:
        return HTMLResponse(pages.index(self.folder, request.query_params, can_post=self.can_post))

    def run(self, request: Request) -> Response:
        notice = request.query_params.get("notice", "")[:200]
        name = request.path_params["name"]
        return HTMLResponse(
            pages.run(self.folder, name, can_post=self.can_post, can_kill=self.config.kill, notice=notice)
        )

    def new(self, request: Request) -> Response:
        """Returns an empty form, or one filled with the config of another run."""
        values = form.from_run(request.query_params["from"], self.folder) if "from" in request.query_params else {}
        return self._form(form.read(values, self.folder, self.config))

    async def show_plan(self, request: Request) -> Response:
        draft = await self._draft(request)
        await run_in_threadpool(form.examine, draft, self.config.user_folder, with_plan=True)
        return self._form(draft)

    async def start(self, request: Request) -> Response:
        """Starts a launcher if the form has no problems."""
        draft = await self._draft(request)
        await run_in_threadpool(form.examine, draft, self.config.user_folder, with_plan=False)
        if draft.problems:
            return self._form(draft)
        path = form.choose_directory(draft, self.folder)
        try:
            await run_in_threadpool(actions.start_launcher, [*draft.overrides, shell.override("run", str(path))], path)
        except OSError as error:
            message = str(error.strerror)
            draft.add("", Problem(str(path), "unreadable", message, "choose another runs.folder", about="runs.folder"))
            return self._form(draft)
        return RedirectResponse(pages.run_url(self.folder.name(path)), 303)

    async def _draft(self, request: Request) -> form.Draft:
        body = (await request.body())[:MAX_FORM_BYTES].decode(errors="replace")
        return form.read(dict(parse_qsl(body, keep_blank_values=True)), self.folder, self.config)

    def _form(self, draft: form.Draft) -> Response:
        return HTMLResponse(pages.new(draft, form.fields()))

    def log(self, request: Request) -> Response:
        name, task = request.path_params["name"], request.path_params["task"]
        return HTMLResponse(logs.page(self.folder, name, task, request.query_params))

    def live(self, request: Request) -> Response:
        """Returns an event for every change of a run, at most one every other second.

        Ends if the run is not running, and the browser asks again later: it opens few connections to one server.
        """
        name, known = request.path_params["name"], request.headers.get("last-event-id")
        known = known or request.query_params.get("known")
        self.folder.run(name)
        return StreamingResponse(self._changes(name, known), media_type="text/event-stream")

    async def _changes(self, name: str, known: str | None) -> AsyncIterator[str]:
        """Yields events numbered by the version of the run's page; the browser has version `known`."""
        yield f"retry: {ASK_AGAIN_MS}\n\n"
        while True:  # until the browser hangs up
            is_running = await run_in_threadpool(self.folder.is_running, name)
            try:
                now = await run_in_threadpool(pages.version, self.folder, name)
            except UnknownRunError:  # it was removed
                return
            yield ": still there\n\n" if now == known else f"id: {now}\ndata: changed\n\n"
            if not is_running:
                return
            known = now
            await asyncio.sleep(LIVE_SECS)

    def file(self, request: Request) -> Response:
        """Returns a file as a download, or an HTML page, of which no script runs: a task may have written it."""
        path = self.folder.file(request.path_params["name"], request.path_params["file"])
        if path.suffix == ".html":
            return FileResponse(path, headers={"Content-Security-Policy": "sandbox allow-same-origin"})
        return FileResponse(path, filename=path.name)

    def _button(self, act: Callable[[Path], None], done: str) -> Callable[[Request], Any]:
        def press(request: Request) -> Response:
            name = request.path_params["name"]
            return _answer(name, lambda: act(self.folder.run(name)), done)

        return press

    def _task_button(self, what: RunRequest) -> Callable[[Request], Any]:
        def press(request: Request) -> Response:
            name, task = request.path_params["name"], request.path_params["task"]
            done = f"{task} is killed" if what is RunRequest.kill else f"{task} is writing its stacks to its log"
            return _answer(name, lambda: actions.ask_of_task(self.folder.run(name), task, what), done)

        return press


def _post(path: str, handler: Callable[[Request], Any]) -> Route:
    return Route(path, handler, methods=["POST"])


def _answer(name: str, act: Callable[[], None], done: str) -> Response:
    """Performs the action of a button, and redirects to the run's page, which shows the result."""
    try:
        act()
        notice = done
    except (RefusedError, OSError) as error:
        notice = f"not done: {error}"
    return RedirectResponse(f"{pages.run_url(name)}?{urlencode({'notice': notice})}", 303)


async def _no_such_run(request: Request, error: Exception) -> Response:
    return PlainTextResponse("there is no such run, task or file\n", 404)


async def _unreadable(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"the files of this run cannot be read: {type(error).__name__}: {error}\n", 500)


def make_app(config: ConsoleConfig, folder: Path, *, token: str, port: int) -> Starlette:
    """Returns the app that shows a folder's runs to the bearer of a token."""
    return Starlette(
        routes=Console(Folder(folder.resolve()), config).routes(),
        middleware=[Middleware(Guard, token=token, port=port, host=config.host)],
        exception_handlers={UnknownRunError: _no_such_run, Exception: _unreadable},
    )
