"""Receives signals: the first SIGTERM asks to stop at a step boundary, the second to exit; SIGUSR1 asks for the state.

A program that ends a whole group of processes (systemd, Slurm) signals each of them, and then the launcher does too:
the two count as one.
"""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable

from trainer.faults.exit_codes import TERMINATED

SAME_SIGNAL_SECS = 1.0


class StopRequest:
    """Records whether this task was asked to stop; it also answers requests for the task's state.

    Python runs signal handlers on the main thread between bytecodes, and that thread sits inside TensorFlow for as long
    as a peer takes. The C handler, however, writes to a file descriptor at once, and a thread reads it here.
    """

    def __init__(
        self, on_stop: Callable[[], bool] = lambda: True, on_state_request: Callable[[], None] = lambda: None
    ) -> None:
        """Listens from now on.

        Args:
            on_stop: called at the first SIGTERM; returns whether that is to stop the whole run.
            on_state_request: called at each SIGUSR1, after the stacks of all threads were written to stderr. No other
                thread runs Python meanwhile, because to walk through stacks that change can crash. Where a thread never
                releases the interpreter it is never called; SIGUSR2 writes the stacks at once, at that risk.
        """
        self.requested = False
        self.stops_all = False  # requested, and of the whole run
        self._may_finish_step = self._is_needed = False
        self._on_stop, self._on_state_request, self._requested_at = on_stop, on_state_request, 0.0
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, which decides
        signal.signal(signal.SIGUSR1, lambda *_: None)
        faulthandler.register(signal.SIGUSR2)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()

    def let_step_finish(self) -> None:
        """Makes the first SIGTERM wait for the training loop from now on; before, there is nothing to save."""
        self._may_finish_step = True

    def stay(self) -> None:
        """Lets only its peers' goodbyes end this task from now on: they could not save without it."""
        self._may_finish_step = self._is_needed = True

    def request(self) -> None:
        """Asks to stop, as SIGTERM does."""
        os.kill(os.getpid(), signal.SIGTERM)

    def _watch(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 16):
                if number == signal.SIGTERM:
                    self._handle_stop(time.monotonic())
                elif number == signal.SIGUSR1:
                    faulthandler.dump_traceback()
                    self._on_state_request()

    def _handle_stop(self, now: float) -> None:
        is_second = self.requested and now - self._requested_at > SAME_SIGNAL_SECS
        if (is_second and not self._is_needed) or not self._may_finish_step:
            os._exit(TERMINATED)
        if not self.requested:
            self.requested, self._requested_at = True, now
            self.stops_all = self._on_stop()
