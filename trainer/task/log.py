"""Sets up the log of a task process: one line for each message, `time task LEVEL message`."""

import logging
import sys

STARTED = "started: "  # begins the first message of each attempt: "started: worker:1 of RUN, pid 4711: ..."


def set_up(task: str) -> None:
    """Writes this process's log records to stdout: the trainer's from INFO on, those of libraries from WARNING on."""
    logging.addLevelName(logging.WARNING, "WARN")
    logging.basicConfig(
        stream=sys.stdout,
        format=f"%(asctime)s.%(msecs)03d {task} %(levelname)-5s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,  # a process that started as a launcher has another format
    )
    logging.getLogger("trainer").setLevel(logging.INFO)
    logging.getLogger("tensorflow").handlers.clear()  # or each of its messages would appear twice
