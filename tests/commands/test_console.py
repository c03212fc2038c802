"""The console: what its pages show, and that only the bearer of its token, from its own pages, can do anything."""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from quick_config import load
from runs import wait_until

from trainer.commands.console import actions, form
from trainer.commands.console.app import make_app
from trainer.commands.console.folder import Folder
from trainer.config.schema import OptimizerName
from trainer.config.typed import ConsoleConfig
from trainer.observe import runs
from trainer.plan.description import Description
from trainer.plan.devices import Machine
from trainer.plan.layout import Parameter
from trainer.plan.make import make_plan
from trainer.storage import checkpoint_writer, requests
from trainer.storage.lease import Lease
from trainer.storage.requests import Request
from trainer.storage.run_directory import RunDirectory

pytestmark = pytest.mark.slow

TOKEN = "the-token-of-this-console"
HOSTILE = "<script>alert(1)</script>"
MODEL = Description((Parameter("dense/kernel", (784, 128), True),), 10, 8000, 2000)
POSTS = [
    *(f"/runs/mine/{button}" for button in ("stop", "save", "continue", "stacks/worker:1", "kill/worker:1")),
    *("/new/plan", "/new/start"),
]


@dataclass(frozen=True)
class Answer:
    code: int
    headers: dict[str, str]
    text: str
    all_headers: list[tuple[str, str]]  # in order, those that are there twice, too


@dataclass(frozen=True)
class Browser:
    """Sends requests as a browser that has the console's cookie would."""

    port: int
    token: str = TOKEN

    def ask(self, method: str, path: str, form: str = "", **headers: str) -> Answer:
        """A header that is empty is not sent."""
        usual = {"Host": f"127.0.0.1:{self.port}", "Cookie": f"trainer-console-{self.port}={self.token}"}
        if method == "POST":
            usual |= {"Origin": f"http://127.0.0.1:{self.port}", "Sec-Fetch-Site": "same-origin"}
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.putrequest(method, path, skip_host=True)
        for name, value in (usual | given).items():
            if value:
                connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(form)))
        connection.endheaders(form.encode())
        answer = connection.getresponse()
        if answer.getheader("Content-Type", "").startswith("text/event-stream"):
            body = answer.readline()
        else:
            body = answer.read()
        connection.close()
        headers = [(name.lower(), value) for name, value in answer.getheaders()]
        return Answer(answer.status, dict(headers), body.decode(errors="replace"), headers)

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, **headers: str) -> Answer:
        return self.ask("POST", path, **headers)

    def submit(self, path: str, **fields: str) -> Answer:
        """Sends the form that starts a run."""
        return self.ask("POST", path, urllib.parse.urlencode(fields))


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Callable[..., Browser]]:
    """console(kill=True, ...) -> a browser of a console of the runs in tmp_path / "runs"."""
    with contextlib.ExitStack() as stack:

        def start(**settings: Any) -> Browser:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = listener.getsockname()[1]
            app = make_app(ConsoleConfig(**settings), tmp_path / "runs", token=TOKEN, port=port)
            server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
            thread.start()
            stack.callback(thread.join, 30)
            stack.callback(setattr, server, "should_exit", True)
            return Browser(port)

        yield start


def make_run(path: Path, *overrides: str) -> RunDirectory:
    """A run directory with a worker that has failed."""
    config = load(["cluster=1ps2w", "train.batch_size=48", "train.steps=40", *overrides])
    directory = RunDirectory(path)
    plan = make_plan(config, MODEL, Machine(cores=4, gpus=()))
    directory.write_inputs(config, plan)
    directory.history.write_text('{"step": 10, "loss": 0.5, "examples_per_second": 100.0}\n')
    (path / "logs/worker-1.log").write_text(f"x INFO begun\nx ERROR failed: {HOSTILE}\nx INFO done\n")
    return directory


@pytest.fixture
def held(tmp_path: Path) -> Iterator[RunDirectory]:
    """A run that this process seems to be the launcher of."""
    directory = make_run(tmp_path / "runs" / "mine")

    attempts = {name: {"restarts": 0, "host": "here", "code": None} for name in ("ps:0", "worker:0", "worker:1")}
    status = {"launcher": {"pid": os.getpid(), "host": "here", "command": ["trainer"]}, "attempts": attempts}
    states = dict.fromkeys(attempts, "training")
    directory.status.write_text(json.dumps(status | {"tasks": {}, "states": states, "started_at": 1.0, "time": 2.0}))
    with Lease(directory):
        yield directory


# Who may use it


def test_without_the_cookie_nothing_is_shown(console, held):
    browser = console()
    cookies = ("", "trainer-console-1=the-token-of-this-console", f"trainer-console-{browser.port}=guess", "=;=,")
    for path in ("/", "/runs/mine", "/runs/mine/log/worker:1", "/static/console.js", "/runs/mine/live", "/new"):
        for cookie in cookies:
            answer = browser.get(path, Cookie=cookie)
            assert (answer.code, "mine" in answer.text) == (401, False), path
        assert browser.get(path).code == 200, path


def test_the_address_that_is_printed_gives_the_cookie_and_takes_the_token_out_of_sight(console):
    browser = console()
    answer = browser.get(f"/?state=done&token={TOKEN}", Cookie="")
    assert (answer.code, answer.headers["location"]) == (303, "/?state=done")
    cookie = answer.headers["set-cookie"].lower()
    assert f"trainer-console-{browser.port}={TOKEN}" in cookie
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip() for part in cookie.split(";")}
    assert browser.get("/?token=guess", Cookie="").code == 401
    assert browser.get(f"//evil.example/x?token={TOKEN}", Cookie="").headers["location"].startswith("/evil.example")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "", "localhost.evil.example"])
def test_a_name_that_somebody_points_at_this_machine_is_refused(console, held, host):
    browser = console()
    assert browser.get("/runs/mine", Host=host).code in (400, 421)
    assert browser.post("/runs/mine/stop", Host=host, Origin=f"http://{host}").code in (400, 421)
    assert list(held.requests.iterdir()) == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},  # another port has the same site, and gets the cookie
        {"Origin": "null"},
        {"Origin": ""},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_a_page_of_another_origin_can_press_no_button(console, held, headers):
    browser = console(kill=True)
    assert {post: browser.post(post, **headers).code for post in POSTS} == dict.fromkeys(POSTS, 403)
    assert list(held.requests.iterdir()) == []


def test_no_other_origin_may_read_an_answer(console, held):
    browser = console()
    for answer in (
        browser.get("/runs/mine", Origin="http://evil.example"),
        browser.ask("OPTIONS", "/runs/mine/stop", Origin="http://evil.example", Access_Control_Request_Method="POST"),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_every_answer_forbids_scripts_of_others_frames_and_caches(console, held):
    browser = console()
    for path in ("/", "/runs/mine", "/nothing", "/runs/mine/log/worker:1", "/static/console.js", "/new"):
        headers = browser.get(path).headers
        assert "default-src 'none'; script-src 'self';" in headers["content-security-policy"]
        assert "unsafe-eval" not in headers["content-security-policy"]
        assert (headers["x-frame-options"], headers["x-content-type-options"]) == ("DENY", "nosniff")
        assert headers["cache-control"] == "no-store"


def test_a_page_has_no_script_but_the_console_s_own(console, held):
    browser = console(kill=True)
    for path in ("/", "/runs/mine", "/runs/mine/log/worker:1"):
        text = browser.get(path).text
        assert text.count("<script") == text.count('<script src="/static/console.js" defer></script>')
        assert "onclick" not in text
        assert "javascript:" not in text


def test_one_that_only_reads_has_no_address_that_changes_anything(console, held):
    browser = console(read_only=True, kill=True)
    assert {browser.post(post).code for post in POSTS} <= {404, 405}
    assert browser.get("/new").code == 404
    assert "<button" not in browser.get("/runs/mine").text.partition("</main>")[0]
    assert list(held.requests.iterdir()) == []


def test_tasks_are_killed_only_where_that_is_switched_on(console, held):
    assert console().post("/runs/mine/kill/worker:1").code in (404, 405)
    assert list(held.requests.iterdir()) == []
    assert console(kill=True).post("/runs/mine/kill/worker:1").code == 303
    assert [path.name for path in held.requests.iterdir()] == ["kill-worker-1"]


# Which files it reads


ELSEWHERE = [
    *("/runs/..", "/runs/../secret", "/runs/%2e%2e/secret", "/runs/..%2fsecret", "/runs//etc", "/runs/link"),
    *("/runs/loop", "/runs/%00", "/runs/" + "x" * 5000, "/runs/mine/log/worker:9", "/runs/mine/log/..%2f..%2fx"),
    *("/runs/mine/files/lock", "/runs/mine/files/..%2f..%2fsecret%2fconfig.yaml", "/runs/mine/files/export/out"),
    *("/runs/mine/files/export/..%2f..%2flock", "/runs/mine/files/checkpoints/000000010", "/static/..%2fapp.py"),
    *("/runs/mine/files/checkpoints/link/config.yaml", "/runs/mine/files/" + "x" * 5000, "/runs/mine/files/"),
]


def test_nothing_outside_of_the_folder_is_read(console, held, tmp_path):
    make_run(tmp_path / "secret")
    (tmp_path / "runs/link").symlink_to(tmp_path / "secret")
    (tmp_path / "runs/loop").symlink_to(tmp_path / "runs/loop")
    (held.path / "export").mkdir()
    (held.path / "export/out").symlink_to(tmp_path / "secret/config.yaml")
    (held.path / "checkpoints/000000010").mkdir(parents=True)
    (held.path / "checkpoints/link").symlink_to(tmp_path / "secret")
    browser = console(kill=True)
    assert {path: browser.get(path).code for path in ELSEWHERE} == dict.fromkeys(ELSEWHERE, 404)
    assert {browser.post(f"{path}/stop").code for path in ELSEWHERE} <= {404, 405}
    assert "runs/link" not in browser.get("/").text
    assert list((tmp_path / "secret/requests").iterdir()) == []


@pytest.mark.parametrize("link", ["logs/worker-0.log", "launcher.log", "history.jsonl"])
def test_a_link_that_a_task_has_made_is_not_followed(console, held, tmp_path, link):
    (tmp_path / "secret").write_text("secret")
    (held.path / link).unlink(missing_ok=True)
    (held.path / link).symlink_to(tmp_path / "secret")
    browser = console()
    for path in ("", "/log/worker:0", f"/files/{link}"):
        answer = browser.get(f"/runs/mine{path}")
        assert (answer.code, "secret" in answer.text) == (404, False)


def test_files_of_a_run_are_downloads_those_of_checkpoints_too(console, held):
    saved = checkpoint_writer.write(held.checkpoints, 10, 0, {}, {"parameters/w": np.ones(3)}, keep=2)
    (held.path / "profile").mkdir()
    (held.path / "profile/trace.json").write_text("{}")
    browser = console()
    page = browser.get("/runs/mine").text
    of_checkpoint = [f"checkpoints/{saved.name}/{file.name}" for file in saved.iterdir()]
    for file in ("plan.json", "profile/trace.json", *of_checkpoint):
        assert f'href="/runs/mine/files/{file}"' in page, file
        answer = browser.get(f"/runs/mine/files/{file}")
        assert answer.code == 200, file
        assert answer.headers["content-disposition"].startswith("attachment"), file
    log = re.search(r'href="(\S*)">download', browser.get("/runs/mine/log/worker:1").text)[1]
    assert browser.get(log).text == (held.path / "logs/worker-1.log").read_text()


def test_a_page_of_a_run_directory_is_opened_without_its_scripts(console, held):
    """A sandbox without allow-scripts, besides the policy that every answer has."""
    (held.path / "report.html").write_text(f"<p>placed</p>{HOSTILE}")
    answer = console().get("/runs/mine/files/report.html")
    assert answer.text == f"<p>placed</p>{HOSTILE}"
    assert "content-disposition" not in answer.headers
    policies = [value for name, value in answer.all_headers if name == "content-security-policy"]
    assert "sandbox allow-same-origin" in policies
    assert any("script-src 'self';" in policy for policy in policies)


def test_names_and_logs_are_text(console, tmp_path):
    name = f"a {HOSTILE.replace('/', '')} & b"
    make_run(tmp_path / "runs" / name)
    browser = console()
    url = f"/runs/{urllib.parse.quote(name)}"
    for text in (browser.get("/").text, browser.get(url).text, browser.get(f"{url}/log/worker:1").text):
        assert "<script>" not in text
        assert "&lt;script&gt;" in text
    assert "<script>" not in browser.get(f"{url}?notice={urllib.parse.quote(HOSTILE)}").text


# What it shows and does


def test_runs_are_filtered_sorted_and_shown_a_page_at_a_time(console, tmp_path):
    first = make_run(tmp_path / "runs" / "run-000").path
    make_run(tmp_path / "runs" / "run-007", "model=mlp")
    for number in {*range(1, 105)} - {7}:
        shutil.copytree(first, tmp_path / "runs" / f"run-{number:03}")
    browser = console()
    page = browser.get("/?sort=name").text
    assert "run-000" in page
    assert "run-104" not in page
    assert "105 runs, page 1 of 2" in page
    assert "run-104" in browser.get("/?sort=name&page=2").text
    assert "run-104" in browser.get("/?sort=name&page=999").text
    filtered = browser.get("/?name=MLP&state=died").text
    assert ("run-007" in filtered, "run-006" in filtered) == (True, False)
    assert "No run matches." in browser.get("/?state=running").text
    assert browser.get("/?sort=%3Cscript%3E&page=x&state=%27").code == 200


def test_a_log_shows_its_end_what_is_searched_and_its_first_failure(console, held):
    lines = [f"2026 worker:1 INFO  line {number}" for number in range(100_000)]
    lines[70_000] = "2026 worker:1 ERROR failed: no such file"
    (held.path / "logs/worker-1.log").write_text("\n".join(lines) + "\n")
    browser = console()
    url = "/runs/mine/log/worker:1"
    end = browser.get(url).text
    assert ("line 99999\n" in end.replace("</span>", ""), "line 99499" in end) == (True, False)
    assert "are not shown" in end
    found = browser.get(f"{url}?search=LINE+5000").text
    assert "<b>5001</b>" in found
    assert "line 50009" in found
    failure = browser.get(f"{url}?failure=1").text
    assert '<span class="failure"><b>70001</b>' in failure
    assert "No failure was" in browser.get("/runs/mine/log/worker:0?failure=1").text


def test_buttons_ask_the_run_for_what_they_say(console, held):
    browser = console()
    for post, file in (("stop", "stop"), ("save", "save"), ("stacks/worker:1", "stacks-worker-1")):
        answer = browser.post(f"/runs/mine/{post}")
        assert (answer.code, answer.headers["location"].partition("?")[0]) == (303, "/runs/mine")
        assert (held.requests / file).exists()
    for post, why in (("continue", "the run is running"), ("stacks/worker:9", "the run has no such task")):
        notice = urllib.parse.unquote_plus(browser.post(f"/runs/mine/{post}").headers["location"])
        assert notice == f"/runs/mine?notice=not done: {why}"
    assert "not done: the run" in browser.get("/runs/mine?notice=not+done:+the+run+is+running").text


def test_a_launcher_that_ends_before_there_is_a_plan_is_seen_to_end(console, tmp_path):
    browser, path = console(), tmp_path / "runs" / "early"
    actions.start_launcher(["model=cnm", f"run={path}"], path)
    page = wait_until(
        lambda: "has ended" in (text := browser.get("/runs/early").text) and text,
        progress=lambda: (path / "launcher.log").stat().st_size,
    )
    assert "with exit code 2" in words(page)
    assert "unknown model" in page
    assert 'http-equiv="refresh"' not in page


# The form


def problems(text: str) -> dict[str, list[str]]:
    """What the form says is wrong, by field."""
    labels = re.findall(r"<label.*?</label>", text, re.DOTALL)
    found = {
        re.search(r'name="(\w+)"', label)[1]: re.findall(r'role="alert">(.*?)</span>', label, re.DOTALL)
        for label in labels
    }
    return {name: html.unescape(" ".join(texts)) for name, texts in found.items() if texts}


def test_a_wrong_value_is_shown_at_its_field_with_all_others(console, tmp_path, snapshot):
    browser = console()
    found = problems(browser.submit("/new/plan", ps="two", workers="", model="a b", name="../x").text)
    assert found == snapshot
    fields = {"ps": "1", "workers": "3", "batch_size": "-1", "steps": "0", "model": "cnm", "more": "train.jti=1"}
    found = problems(browser.submit("/new/start", **fields).text)
    assert found.keys() == {"batch_size", "steps", "model", "more"}
    assert found == snapshot
    assert problems(browser.submit("/new/start", ps="1", workers="3", batch_size="64").text) == snapshot
    assert not list((tmp_path / "runs").glob("*"))


REFUSED = [
    ("launch.ssh=rm -rf /", "launch.ssh: cannot be set from the console"),
    ('slurm.args="--wrap=x"', "slurm.args: cannot be set from the console"),
    ("run=/tmp/x", "run: cannot be set from the console"),
    ("plan.write_to=/tmp/x", "plan.write_to: cannot be set from the console"),
    ("report.file=/tmp/x", "report.file: cannot be set from the console"),
    ("mode=clean", "mode: cannot be set from the console"),
    ("hydra.run.dir=/tmp", "hydra.run.dir: cannot be set from the console"),
    ("--multirun", "--multirun: is not an"),
    ("+experiment@_global_=/tmp/evil.yaml", "experiment: cannot be set from the console"),
    ("model={init:/etc/passwd}", "model: cannot be set from the console"),
    ("model.options.x=${oc.env:HOME}", "model.options.x: cannot be set from the console"),
    ("user= /tmp/evil.py", "user: is not allowed here"),
    ("~model", "cannot be set from the console"),
    ("user=/etc/passwd", "user: is not allowed here"),
    ("resume=/etc", "/etc: is not below"),
    ("model.init=../../etc", "../../etc: is not below"),
    ("experiment=/tmp/x.yaml", "experiment: cannot be a file here"),
    ("model._target_=os.system", "model._target_=os.system: names code to import"),
]


def test_the_form_leaves_the_optimizer_to_the_model_and_takes_epochs(console, tmp_path):
    folder, config = Folder(tmp_path / "runs"), ConsoleConfig()
    draft = form.read({"epochs": "5"}, folder, config)
    assert not [text for text in draft.overrides if text.startswith(("optimizer", "train.steps"))]
    assert "train.epochs=5" in draft.overrides
    directory = make_run(tmp_path / "runs" / "mine")
    stored = directory.read_config()
    optimizer = replace(stored.optimizer, name=OptimizerName.sgd, learning_rate=0.5)  # as compile() had them
    stored = replace(stored, train=replace(stored.train, epochs=3), optimizer=optimizer)
    directory.write_inputs(stored, directory.read_plan())
    again = form.read(form.from_run("mine", folder), folder, config)
    assert not [text for text in again.overrides if text.startswith("optimizer")]
    assert load(again.overrides).train.epochs == 3


def test_the_table_has_the_loss_of_each_run_as_a_line(console, tmp_path):
    few, many = (make_run(tmp_path / "runs" / name) for name in ("few", "many"))
    few.history.write_text('{"step": 10, "loss": 0.5}\n')
    many.history.write_text("".join(f'{{"step": {step}, "loss": {1 / step}}}\n' for step in range(1, 9999)) + '{"step"')
    page = console().get("/").text
    (path,) = re.findall(r'<path d="M(.*?)"/>', page)
    points = [tuple(map(float, text.split())) for text in path.split("L")]
    assert 40 <= len(points) <= 70
    assert points == sorted(points)
    assert (points[0][1], points[-1][0]) == (2.0, 89.0)


def test_what_names_a_command_or_a_place_elsewhere_is_refused(console):
    browser = console()
    for line, says in REFUSED:
        page = browser.submit("/new/start", ps="1", workers="2", more=f"optimizer.clip_norm=1\n{line}")
        assert says in " ".join(problems(page.text).values())


def test_the_user_s_files_are_those_of_the_folder_that_was_named(console, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "link.py").symlink_to("/etc/passwd")
    browser = console(user_folder=str(tmp_path / "mine"))
    for path in (f"{tmp_path}/mine/../other.py", f"{tmp_path}/mine/link.py", "/etc/passwd", " /x.py", "'/x.py'"):
        assert "is not below" in problems(browser.submit("/new/plan", more=f"user={path}").text)["more"]
    inside = browser.submit("/new/plan", more=f"user={tmp_path}/mine/none.py").text
    assert "is not below" not in inside
    assert "none.py" in problems(inside)["more"]


def test_a_form_filled_from_a_run_has_its_config(console, tmp_path):
    more = ["model=mlp", "model.options.width=64", "optimizer=sgd", "seed=7", "restart.max_of={ps:0,worker\\:1:5}"]
    directory = make_run(tmp_path / "runs" / "mine", *more)
    draft = form.read(form.from_run("mine", Folder(tmp_path / "runs")), Folder(tmp_path / "runs"), ConsoleConfig())
    assert draft.problems == {}
    again, config = load(draft.overrides), directory.read_config()
    for name in ("cluster", "model", "data", "optimizer", "train", "restart", "seed", "strategy"):
        assert getattr(again, name) == getattr(config, name), name
    page = console().get("/new?from=mine").text
    assert "model.options.width=64" in page
    assert console().get("/new?from=../x").code == 200


@pytest.mark.cluster
def test_a_run_is_submitted_by_the_form_watched_and_outlives_the_console(tmp_path):
    """Whose command gives way to training, and ends with Ctrl-C."""
    command = [sys.executable, "-m", "trainer", "console", "console.port=0"]
    server = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        port, token = re.fullmatch(
            r"runs in runs: open http://127.0.0.1:(\d+)/\?token=(\S+)\n", server.stdout.readline()
        ).groups()
        browser = Browser(int(port), token)
        assert "no runs yet" in browser.get("/").text
        fields = {"ps": "1", "workers": "2", "model": "mlp", "batch_size": "48", "name": "formed", "more": "seed=3"}
        plan = browser.submit("/new/plan", **fields, steps="1000000").text
        assert "1ps2w: sync, 2 replicas, global batch 48" in plan
        assert "python -m trainer cluster=1ps2w name=formed" in plan
        answer = browser.submit("/new/start", **fields, steps="1000000")
        url = answer.headers["location"]
        assert (answer.code, url.startswith("/runs/formed-1ps2w-")) == (303, True)
        wait_until(lambda: "state running training" in words(browser.get(url).text), poll_secs=0.2)
        (path,) = (tmp_path / "runs").iterdir()
        launcher = json.loads((path / "status.json").read_text())["launcher"]["pid"]
        priorities = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (server.pid, launcher)]
        assert priorities == ([19, 0] if sys.platform == "linux" else [0, 0])
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    step = runs.read(path).step
    wait_until(lambda: runs.read(path).step > step)
    requests.make(RunDirectory(path), Request.stop)
    wait_until(lambda: not runs.read(path).is_running)
    assert runs.read(path).state == "stopped"
    assert "checkpoint saved" in (path / "launcher.log").read_text()


def words(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]*>", " ", text, flags=re.DOTALL))


def test_a_page_is_told_when_its_run_changes_and_asks_again_when_it_has_ended(console, held):
    port = console().port
    with events(port) as running:
        assert next(running) == ["retry: 5000"]
        begun = next(running)
        held.history.write_text('{"step": 20, "loss": 0.25, "examples_per_second": 100.0}\n')
        changed = next(one for one in running if one != [": still there"])
    assert begun[1] == changed[1] == "data: changed"
    assert begun[0].startswith("id: ")
    assert begun[0] != changed[0]
    held.lock.unlink()  # as if its launcher had ended
    with events(port) as ended:
        _, (name, _) = list(ended)
    version = name.removeprefix("id: ")
    with events(port, version) as ended:
        assert list(ended) == [["retry: 5000"], [": still there"]]
    held.history.write_text('{"step": 30, "loss": 0.1, "examples_per_second": 100.0}\n')
    with events(port, version) as ended:
        assert list(ended)[1][1:] == ["data: changed"]


@contextlib.contextmanager
def events(port: int, version: str = "") -> Iterator[Iterator[list[str]]]:
    """The events of a run, each as its lines, for a browser that has seen a version of its page."""
    headers = {"Cookie": f"trainer-console-{port}={TOKEN}", "Last-Event-ID": version}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("GET", "/runs/mine/live", headers=headers)
        stream = connection.getresponse()
        yield iter(lambda: _event(stream), [])


def _event(stream: http.client.HTTPResponse) -> list[str]:
    """Its lines; none at the end."""
    lines = []
    while line := stream.readline().decode().strip():
        lines.append(line)
    return lines
