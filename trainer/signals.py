"""SIGTERM in a task: the first asks to stop at a step boundary, the second leaves at once."""

from __future__ import annotations

import os
import signal
import threading

from trainer.exit_codes import TERMINATED


class StopRequest:
    """Whether this task was asked to stop.

    Python runs signal handlers on the main thread between bytecodes, and that thread sits inside TensorFlow for as long
    as a peer takes. The C handler, however, writes to a file descriptor at once, and a thread reads it here.
    """

    def __init__(self) -> None:
        self.requested = False
        self._may_finish_step = False
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, which decides
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()

    def let_step_finish(self) -> None:
        """From now on the first SIGTERM waits for the training loop; before, there is nothing to save."""
        self._may_finish_step = True

    def _watch(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 16):
                if number == signal.SIGTERM:
                    if self.requested or not self._may_finish_step:
                        os._exit(TERMINATED)
                    self.requested = True
