"""Submits a run, prints what its job prints, and returns its exit code; Ctrl-C leaves the job alone."""

import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.config import shell
from trainer.config.schema import ClusterConfig, SlurmConfig
from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError
from trainer.launch.ending import shown
from trainer.launch.slurm import job_script
from trainer.storage.atomic import write_atomically
from trainer.storage.run_directory import RunDirectory

POLL_SECS = 2.0
COMMAND_SECS = 30.0  # for a command of Slurm
LOST_SECS = 60.0  # without an answer of the controller, before the job is left alone
WAITING, ENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"), ("COMPLETING",)


class SlurmError(TrainerError):
    """A command of Slurm failed, or does not exist."""

    exit_code = exit_codes.UNAVAILABLE


def run(section: SlurmConfig, cluster: ClusterConfig, overrides: Sequence[str], directory: RunDirectory) -> int:
    """Submits the run, unless its job is queued or running already, and follows it; returns its exit code.

    Args:
        overrides: as typed, with which the job's launcher is started.

    Raises:
        SlurmError: if the job cannot be submitted, or Slurm no longer knows it.
    """
    folder = directory.path / "slurm"
    job = _living_job(folder)
    if job is None:
        job, printed = _submit(section, cluster, overrides, directory.path), 0
        print(f"submitted as job {job}; its output goes to {shown(folder / f'{job}.out')}", flush=True)
    else:
        printed = (folder / f"{job}.out").stat().st_size if (folder / f"{job}.out").exists() else 0
        print(f"following job {job}, which was submitted before", flush=True)
    try:
        return _follow(job, folder / f"{job}.out", printed)
    except KeyboardInterrupt:
        again = shell.typed("run", shown(directory.path))
        print(f"\njob {job} is still running; to follow it again, type the same command with {again}")
        print(f"to stop it, which saves: scancel {job}")
        return exit_codes.INTERRUPTED


def _submit(section: SlurmConfig, cluster: ClusterConfig, overrides: Sequence[str], run: Path) -> int:
    folder = run / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    own = [text for text in overrides if not text.startswith("run=")]
    command = [sys.executable, "-m", "trainer", *own, shell.override("run", str(run))]
    write_atomically(folder / "job.sh", job_script.render(section, cluster, command, run))
    answer = _slurm("sbatch", "--parsable", str(folder / "job.sh"))
    job = int(answer.partition(";")[0])
    write_atomically(folder / "job", f"{job}\n")
    return job


def _living_job(folder: Path) -> int | None:
    """Returns the job of this run that was submitted earlier, if it has not ended."""
    try:
        job = int((folder / "job").read_text())
    except (OSError, ValueError):
        return None
    return job if _state(job) else None


def _follow(job: int, output: Path, printed: int) -> int:
    said, heard_at = "", time.monotonic()
    while True:
        try:
            state, _, reason = _state(job).partition(" ")
            heard_at = time.monotonic()
        except SlurmError:
            if time.monotonic() - heard_at > LOST_SECS:
                raise
            state, reason = "UNKNOWN", ""
        printed = _print_from(output, printed)
        text = f"job {job}: {state.lower()}{f' ({reason})' if reason not in ('', 'None') else ''}"
        if state in WAITING and text != said:
            print(f"{text}{_expected_start(job)}", flush=True)
            said = text
        elif state == "RUNNING":
            said = ""
        if not state and (code := _exit_code(job)) is not None:
            _print_from(output, printed)
            return code
        time.sleep(POLL_SECS)


def _print_from(output: Path, printed: int) -> int:
    """Prints the content of a file from an offset on; returns the new offset."""
    with contextlib.suppress(OSError), output.open("rb") as file:
        file.seek(printed)
        text = file.read()
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()
        return printed + len(text)
    return printed


def _state(job: int) -> str:
    """Returns state and reason of a job, e.g. "PENDING (Resources)"; empty when it has ended."""
    try:
        text = _slurm("squeue", "--noheader", f"--jobs={job}", "--states=all", "--format=%T %r").strip()
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return ""
        raise
    return text if text.split(" ")[0] in (*WAITING, *ENDING, "RUNNING", "STOPPED", "SIGNALING") else ""


def _expected_start(job: int) -> str:
    with contextlib.suppress(SlurmError):
        start = _slurm("squeue", "--noheader", "--start", f"--jobs={job}", "--format=%S").strip()
        if start and start != "N/A":
            return f", starts about {start.replace('T', ' ')}"
    return ""


def _exit_code(job: int) -> int | None:
    """Returns the exit code of the job's launcher; None if the job is queued again."""
    text = _slurm("scontrol", "show", "job", str(job))
    state, code = re.search(r"JobState=(\w+)", text), re.search(r"ExitCode=(\d+):(\d+)", text)
    if state is None or code is None:
        raise SlurmError(f"job {job} has ended, and Slurm does not say how")
    if state[1] in (*WAITING, *ENDING, "RUNNING"):
        return None
    if state[1] == "COMPLETED":
        return exit_codes.OK
    print(f"job {job}: {state[1].lower().replace('_', ' ')}")
    if state[1] in ("CANCELLED", "TIMEOUT", "PREEMPTED"):
        return exit_codes.TERMINATED
    if (by_signal := int(code[2])) and not int(code[1]):
        return 128 + by_signal
    return int(code[1]) or exit_codes.UNAVAILABLE  # its node was lost


def _slurm(*words: str) -> str:
    """Returns the output of a command of Slurm."""
    if shutil.which(words[0]) is None:
        raise SlurmError(f"{words[0]} not found; run this on a host that can submit Slurm jobs")
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECS, check=False)
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{words[0]} has not answered for {COMMAND_SECS:g} s") from error
    if ended.returncode != 0:
        raise SlurmError(f"{words[0]} refused: {' '.join(ended.stderr.split())}")
    return ended.stdout
