"""Judges the answers of nvidia-smi and TensorFlow for runs on GPUs. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.commands.doctor.finding import Answer, Finding, Level, ok, warning
from trainer.commands.doctor.software import GPU_WHEELS
from trainer.plan.checks.versions import is_in_range, release

OLDEST_DRIVER = "525.60"  # of CUDA 12, which TensorFlow's wheels bring along
NEARLY_FULL = 0.1  # of a GPU's memory; less than this share free is worth a warning
GPU_FIELDS = "index,uuid,name,driver_version,memory.total,memory.free"  # of --query-gpu
PROCESS_FIELDS = "gpu_uuid,pid,process_name,used_memory"  # of --query-compute-apps


@dataclass(frozen=True)
class Gpu:
    """One line of `nvidia-smi --query-gpu`."""

    index: int
    uuid: str
    name: str
    driver: str
    total_mib: int | None  # none: unknown, as for GPUs that share the machine's memory
    free_mib: int | None

    def describe(self) -> str:
        if self.total_mib is None or self.free_mib is None:
            return f"{self.name}, memory unknown"
        return f"{self.name}, {self.free_mib:,} of {self.total_mib:,} MiB free"

    def is_nearly_full(self) -> bool:
        return self.total_mib is not None and (self.free_mib or 0) < NEARLY_FULL * self.total_mib


@dataclass(frozen=True)
class GpuProcess:
    """One line of `nvidia-smi --query-compute-apps`."""

    uuid: str  # of its GPU
    pid: int
    name: str
    used_mib: int | None  # none: unknown, as in most containers

    def describe(self) -> str:
        used = "memory unknown" if self.used_mib is None else f"{self.used_mib:,} MiB"
        return f"pid {self.pid} {self.name} ({used})"


def read_gpus(csv: str) -> list[Gpu]:
    """Reads the output of --query-gpu with `GPU_FIELDS`, as csv,noheader,nounits."""
    rows = [[cell.strip() for cell in line.split(",")] for line in csv.splitlines()]
    return [Gpu(int(r[0]), r[1], r[2], r[3], _mib(r[4]), _mib(r[5])) for r in rows if len(r) == 6 and r[0].isdigit()]


def read_processes(csv: str) -> list[GpuProcess]:
    """Reads the output of --query-compute-apps with `PROCESS_FIELDS`; a name may contain commas."""
    rows = (re.fullmatch(r"\s*([^,]+),\s*(\d+),\s*(.*),\s*([^,]+)", line) for line in csv.splitlines())
    return [GpuProcess(row[1], int(row[2]), row[3], _mib(row[4])) for row in rows if row]


def _mib(text: str) -> int | None:
    """Returns a number of MiB; None for [N/A] and [Insufficient Permissions]."""
    return int(text) if text.strip().isdigit() else None


def gpus(
    asked: Answer | None, processes: Answer | None, banner: Answer | None, *, device_files: int, wanted: bool
) -> list[Finding]:
    """Judges the driver, and each GPU with its processes, by the answers to --query-gpu and --query-compute-apps.

    `banner` is the answer of nvidia-smi without arguments: no query returns the CUDA version. `device_files` counts
    /dev/nvidia0, /dev/nvidia1, ...
    """
    missing = Level.problem if wanted else Level.warning
    if asked is None and not device_files:
        return [ok("GPUs", "none; runs use the CPU")]
    if asked is None:
        message = f"{device_files} device files /dev/nvidia*, but no nvidia-smi to query them"
        remedy = "install the driver's tools; in a container: docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=all"
        return [Finding(missing, "GPUs", message, remedy)]
    listed = read_gpus(asked.out)
    if listed:
        there = read_processes(processes.out) if processes is not None else []
        return [_driver(listed[0].driver, banner, missing), *(_gpu(gpu, listed, there) for gpu in listed)]
    if asked.code == 0 or "no devices" in asked.last_words().lower():
        return [ok("GPUs", "nvidia-smi lists none; runs use the CPU")]
    remedy = "sudo modprobe nvidia; if that fails, reinstall the driver (dmesg | grep -i nvrm shows why)"
    return [Finding(missing, "GPUs", f"nvidia-smi failed: {asked.last_words()}", remedy)]


def _driver(driver: str, banner: Answer | None, missing: Level) -> Finding:
    version = re.search(r"CUDA[\w ]* Version\s*:\s*([\d.]+)", banner.out) if banner is not None else None
    text = f"NVIDIA {driver}" + (f", CUDA up to {version[1]}" if version else "")
    if release(driver) is not None and not is_in_range(driver, f">={OLDEST_DRIVER}"):
        message = f"{text}; TensorFlow comes with CUDA 12, which needs driver {OLDEST_DRIVER} or newer"
        return Finding(missing, "driver", message, "install a newer NVIDIA driver, or leave device.gpus out")
    return ok("driver", text)


def _gpu(gpu: Gpu, all_gpus: Sequence[Gpu], processes: Sequence[GpuProcess]) -> Finding:
    what, mine = f"GPU {gpu.index}", [process for process in processes if process.uuid == gpu.uuid]
    text = "; ".join([gpu.describe(), *(process.describe() for process in mine)])
    if not gpu.is_nearly_full():
        return ok(what, text)
    emptiest = max(all_gpus, key=lambda other: other.free_mib or 0)
    other = f", or type device.gpus={{worker:[{emptiest.index}]}}" if not emptiest.is_nearly_full() else ""
    if not mine:
        return warning(what, f"{text}; nearly full; its processes are not visible", f"nvidia-smi, on the host{other}")
    largest = max(mine, key=lambda process: process.used_mib or 0)
    return warning(
        what, f"nearly full: {text}", f"kill {largest.pid}, if it is yours{other or ', or wait until it ends'}"
    )


def gpus_of_tensorflow(
    seen: int, facts: Mapping[str, Any], complaints: str, visible: str | None, *, wanted: bool
) -> list[Finding]:
    """Judges whether TensorFlow sees the GPUs that nvidia-smi lists.

    `facts` and `complaints` (stderr) are of the child that imported TensorFlow; `visible` is CUDA_VISIBLE_DEVICES.
    """
    what, missing = "GPUs in TF", Level.problem if wanted else Level.warning
    if not seen and not facts["gpus"]:
        return []
    if not facts["cuda"]:
        return [Finding(missing, what, f"none of {seen}: this TensorFlow is built without CUDA", GPU_WHEELS)]
    if facts["gpus"] >= seen:
        return [ok(what, f"all {facts['gpus']}; a task sees those that device.gpus gives it")]
    if visible is not None:  # tasks with device.gpus get their own, so nothing is missing
        message = f"{facts['gpus']} of {seen}, as CUDA_VISIBLE_DEVICES={visible or repr('')} says"
        return [warning(what, message, "unset CUDA_VISIBLE_DEVICES; device.gpus says what each task sees")]
    message = ": ".join(filter(None, [f"{facts['gpus']} of {seen}", _reason(complaints)]))
    return [Finding(missing, what, message, GPU_WHEELS)]


def _reason(complaints: str) -> str:
    """Returns the first line of TensorFlow's log that says why it sees no GPU, without date, process and file."""
    lines = (re.sub(r"^.*?\w+\.cc:\d+\]\s*", "", line) for line in complaints.splitlines())
    return next((line for line in lines if re.search("dlopen|cuda drivers|cuInit|CUDA_ERROR|libcuda", line)), "")
