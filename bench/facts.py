"""Describes the machine, which readers must know to interpret rates."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from bench.contestants import ROOT
from trainer.observe.machine import this_machine

RESULTS = Path(__file__).parent / "results"


def of_machine() -> dict[str, Any]:
    """Cores, processor, versions, date and load."""
    machine = this_machine()
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": machine.cores,
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **machine.libraries,
        "commit": _commit(),
        "load_before": load(),
    }


def cpu_model(cpuinfo: str) -> str:
    """Returns the name of the processor; its architecture where Linux tells no name."""
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def load() -> float:
    """Processes that ran or waited for a core, over the last minute."""
    return round(os.getloadavg()[0], 2)


def _commit() -> str | None:
    """Returns the commit, with "-dirty" where files other than results differ from it."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)bench/results")
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return None
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
