"""Reads the status pages of other tasks; the roll call waits for peers before a task's first session."""

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError
from trainer.observe.page_server import short_name
from trainer.observe.task_page import TaskPage
from trainer.plan.fingerprint import USUAL, OtherDataError
from trainer.plan.plan import Task

REPORT_EVERY_SECS = 10.0
POLL_SECS = 0.05
POLLED_AT_ONCE = 32
COMPARED = {  # fields of the status page that must be equal in all tasks, in words
    "config_hash": "config",
    "tensorflow": "TensorFlow",
    "launch": "run",
    "frozen": "set of frozen weights",
    "data": "data set",
}
UNIX = "unix:"  # prefix of an address that is the path of a socket


class _UnixConnection(http.client.HTTPConnection):
    """A connection to "unix:PATH"."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        with short_name(self._path) as name:
            try:
                self.sock.connect(name)
            except BlockingIOError as error:  # its queue is full; TCP would wait
                raise TimeoutError("it has too many readers") from error

    def __init__(self, control: str, *, timeout: float) -> None:
        super().__init__("launcher", timeout=timeout)
        self._path = control.removeprefix(UNIX)


class PeerError(TrainerError):
    """Peers did not start in time, or belong to another run."""

    exit_code = exit_codes.UNAVAILABLE


def read_status(control: str, *, timeout_secs: float, reader: str = "") -> TaskPage:
    """Reads the status page at "host:port", or at "unix:PATH".

    Args:
        reader: `LAUNCHER`, or empty for any other reader.

    Raises:
        OSError, ValueError: if nothing answers there, or something else does.
    """
    kind = _UnixConnection if control.startswith(UNIX) else http.client.HTTPConnection
    connection = kind(control, timeout=timeout_secs)
    try:
        connection.request("GET", f"/status?{reader}" if reader else "/status")
        return TaskPage.from_json(json.loads(connection.getresponse().read()))
    except http.client.HTTPException as error:
        raise ValueError(f"no status page answers: {error!r}") from error
    except (LookupError, TypeError, ValueError) as error:  # no JSON, or of something else
        raise ValueError("another program answers") from error
    finally:
        connection.close()


def try_status(control: str, timeout_secs: float, reader: str = "") -> TaskPage | None:
    """Reads a status page; None if it does not answer: the task is not up yet, busy, exiting, or frozen."""
    try:
        return read_status(control, timeout_secs=timeout_secs, reader=reader)
    except (OSError, ValueError):
        return None


def roll_call(
    me: TaskPage,
    peers: Iterable[Task],
    *,
    until: str,
    deadline_secs: float,
    report: Callable[[str], None],
    may_be_silent: bool = False,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Waits until every peer is up; reports every ten seconds which are missing, and why.

    Args:
        until: the field of a status page that says whether a peer is up: `is_listening` or `is_ready`.
        may_be_silent: a peer that listens but does not answer counts as up; it has answered before, and is busy.

    Another task at a peer's address has left it, or will soon: names and addresses are reused, and
    resolvers remember them for a while.

    Raises:
        PeerError: at the deadline, or as soon as a peer of another run, config or TensorFlow answers.
        OtherDataError: as soon as a peer answers whose plan was made for different data.
    """
    missing = {peer.name: (peer, "not polled yet") for peer in peers}
    began = reported = now()
    threads = ThreadPoolExecutor(max_workers=POLLED_AT_ONCE, thread_name_prefix="roll call")  # silence takes seconds
    while missing:
        peers = [peer for peer, _ in missing.values()]
        reasons = threads.map(lambda peer: _why_missing(me, peer, until, may_be_silent), peers)
        missing = {peer.name: (peer, reason) for peer, reason in zip(peers, reasons, strict=True) if reason}
        waited = now() - began
        reasons_text = "; ".join(f"{name} at {peer.control}: {reason}" for name, (peer, reason) in missing.items())
        if missing and waited > deadline_secs:
            raise PeerError(f"missing after {waited:.0f} s: {reasons_text}")
        if missing and now() - reported >= REPORT_EVERY_SECS:
            report(f"has waited {waited:.0f} s for {reasons_text}")
            reported = now()
        if missing:
            time.sleep(POLL_SECS)


def _why_missing(me: TaskPage, peer: Task, until: str, may_be_silent: bool) -> str | None:
    """Returns why a peer is not up; None if it is."""
    try:
        page = read_status(peer.control, timeout_secs=0.5 if may_be_silent else 2.0)
    except socket.gaierror:
        return "its host name does not resolve"
    except ConnectionRefusedError:
        return "connection refused; it has not started or has died"
    except FileNotFoundError:  # its socket
        return "it has not started"
    except TimeoutError:
        return None if may_be_silent else "silent; it may be frozen or behind a firewall"
    except (OSError, ValueError) as error:
        return str(error)
    if (page.job, page.index) != (peer.job, peer.index):
        return f"{page.job}:{page.index} answers there"
    for key, what in COMPARED.items():
        mine, theirs = getattr(me, key), getattr(page, key)
        if theirs and mine and theirs != mine:
            text = f"{peer.name} at {peer.control} has a different {what} ({theirs}, here {mine})"
            raise OtherDataError(f"{text}; {USUAL}") if key == "data" else PeerError(text)
    return None if getattr(page, until) else f"starting ({page.state.value})"
