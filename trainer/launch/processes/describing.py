"""The process that describes a model: it reports the running line of the user's code, and finally its answer."""

import faulthandler
import os
import socket
import threading
import time
from collections.abc import Callable

from trainer.config.command_line import typed
from trainer.config.running import running_line
from trainer.launch.messages import Described, DescribeModel, Describing, Event, decode, encode
from trainer.workload import describe

EVERY_SECS = 1.0

Report = Callable[[Event], None]


def answer(request: DescribeModel, report: Report) -> None:
    """Reports `Describing` each second, and finally `Described`."""
    faulthandler.enable()
    question, process, main = request.question, os.getpid(), threading.get_ident()
    began, is_over = time.monotonic(), threading.Event()

    def follow() -> None:
        while not is_over.wait(EVERY_SECS):
            secs, line = time.monotonic() - began, running_line(question.user, main)
            report(Describing(request.name, secs, line))

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    result = describe.answer(question)
    if os.getpid() == process:  # otherwise this is a fork made by the user's code
        is_over.set()
        follower.join()
        report(Described(request.name, result))


def main() -> None:
    """Answers the request in the first argument into the socket in the second."""
    control = socket.socket(fileno=int(typed()[1]))
    answer(decode(typed()[0].encode()), lambda event: control.sendall(encode(event)))
    os._exit(0)  # does not wait for threads started by the user's file


if __name__ == "__main__":
    main()
