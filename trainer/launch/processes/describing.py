"""The process that describes a model: it reports the running line of the user's code, and finally its answer."""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from trainer.config.running import running_line
from trainer.plan.description import Question
from trainer.plan.serialize import from_json
from trainer.workload import describe

EVERY_SECS = 1.0

Report = Callable[[dict[str, Any]], None]


def answer(question: dict[str, Any], name: str, report: Report) -> None:
    """Reports {"event": "describing", ...} each second, and finally {"event": "described", ...}.

    Args:
        name: of this process; part of every report, because other processes may report to the same reader.
    """
    faulthandler.enable()
    asked, process, main = from_json(Question, question), os.getpid(), threading.get_ident()
    began, is_over = time.monotonic(), threading.Event()

    def follow() -> None:
        while not is_over.wait(EVERY_SECS):
            secs, line = time.monotonic() - began, running_line(asked.user, main)
            report({"event": "describing", "name": name, "secs": secs, "line": line})

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    result = describe.answer(asked)
    if os.getpid() == process:  # otherwise this is a fork made by the user's code
        is_over.set()
        follower.join()
        report({"event": "described", "name": name, "answer": result})


def main() -> None:
    """Answers the question in the first argument, under the name in the second, into the socket in the third."""
    control = socket.socket(fileno=int(sys.argv[3]))
    answer(json.loads(sys.argv[1]), sys.argv[2], lambda event: control.sendall(json.dumps(event).encode() + b"\n"))
    os._exit(0)  # does not wait for threads started by the user's file


if __name__ == "__main__":
    main()
