"""Runs command lines of Python in forks of one interpreter, which has imported once what each of them would import."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path


class Forks:
    """An interpreter that is forked for every command; it has one thread, or forks would lack the others."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def run(
        self, *arguments: str, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Does what `python ARGUMENTS` does, where they begin with -m MODULE, -c CODE or a script's path."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            streams = [Path(folder, name) for name in ("stdout", "stderr")]
            request = [arguments, str(cwd), {**os.environ, **(environment or {})}, list(map(str, streams))]
            print(json.dumps(request), file=self._server.stdin, flush=True)
            code = int(self._server.stdout.readline())
            return subprocess.CompletedProcess(arguments, code, *(stream.read_text() for stream in streams))


@contextlib.contextmanager
def forks(*imports: str) -> Iterator[Forks]:
    """Starts an interpreter that imports these modules; it ends with the block."""
    with subprocess.Popen(
        [sys.executable, __file__, *imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    ) as server:
        yield Forks(server)


def _serve() -> None:
    """Forks for every line of stdin and writes the exit code; a fork leaves this function to run its command."""
    sys.path[0] = os.getcwd()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return _run(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(arguments: list[str], cwd: str, environment: dict[str, str], streams: list[str]) -> None:
    for stream, path in zip((sys.stdout, sys.stderr), streams, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv = [sys.executable, *arguments]
    kind, *rest = arguments
    if kind == "-m":
        sys.path[0] = cwd
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path[0] = cwd
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = str(Path(kind).parent)
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _serve()
