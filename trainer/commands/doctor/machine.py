"""Judges the facts of a machine for a run: ok, a warning or a problem, and what to type. Pure: it probes nothing.

`doctor.py` asks the machine and hands the answers over, as text where a command gave text; GPUs and Docker have modules
of their own.
"""

from collections.abc import Mapping

from trainer.commands.doctor.finding import Finding, ok, problem, warning
from trainer.config.words import size

GIB = 2**30
LITTLE_MEMORY = 1 * GIB  # a task that trains a small model takes about half of it
LITTLE_SHARED_MEMORY = 512 * 2**20  # NCCL's, between the GPUs of one machine
LITTLE_DISK, NO_DISK = 1 * GIB, 100 * 2**20  # a checkpoint holds the parameters and the optimizer's slots


def cores(usable: int, of_machine: int, limit: float | None) -> Finding:
    """Judges the cores that a plan counts on, by those of the machine and the limit of its cgroup."""
    text = f"{usable} of {of_machine}" if usable != of_machine else f"{usable}"
    if limit is not None and limit < usable:
        message = f"{text}, but the cgroup allows only {limit:g}: every step will be slow"
        return warning("cores", message, "device.intra_op_threads={ps:1,worker:1}")
    return ok("cores", text if limit is None else f"{text}; the cgroup allows {limit:g}")


def memory(meminfo: Mapping[str, int], limit: int | None, used: int) -> Finding:
    """Judges main memory, in bytes: /proc/meminfo, the cgroup's limit, and its use without cached files."""
    if "MemTotal" not in meminfo:
        return warning(
            "memory", "unknown: there is no /proc/meminfo", "check it by hand: each task needs about 0.5 GiB"
        )
    total, free = meminfo["MemTotal"], meminfo.get("MemAvailable", meminfo.get("MemFree", 0))
    text = f"{size(free)} of {size(total)} available"
    if limit is not None and limit < total:
        free = min(free, limit - used)
        text += f"; the cgroup allows {size(limit)}, {size(used)} in use"
    if free < LITTLE_MEMORY:
        return warning("memory", text, "end other programs, or use a smaller cluster=; a task needs about 0.5 GiB")
    return ok("memory", text)


def shared_memory(nbytes: int | None, gpu_count: int) -> Finding:
    if nbytes is None:
        return ok("/dev/shm", "missing; only NCCL between several GPUs needs it")
    if gpu_count > 1 and nbytes < LITTLE_SHARED_MEMORY:
        message = f"{size(nbytes)}; NCCL needs more between {gpu_count} GPUs"
        return warning("/dev/shm", message, "docker run --shm-size=1g, or sudo mount -o remount,size=1g /dev/shm")
    return ok("/dev/shm", f"{size(nbytes)}; only NCCL between several GPUs uses it")


def run_directory(path: str, exists_at: str, free: int, refused: str | None) -> Finding:
    """Judges where runs write: path, the part of it that exists, free bytes, and why no file can be written, if so."""
    what = "run directory"
    if refused is not None:
        remedy = f"run=/a/folder/of/yours, or sudo mkdir -p {path} && sudo chown $USER {path}"
        return problem(what, f"{path} cannot be written: {refused}", remedy)
    text = f"{path}, {size(free)} free"
    if free < LITTLE_DISK:
        remedy = f"df -h {exists_at}; remove old runs, or run=/another/disk/first"
        return (problem if free < NO_DISK else warning)(what, text, remedy)
    return ok(what, text)


def warm_process(pid: int, memory: int) -> Finding:
    return ok("warm process", f"pid {pid}, {size(memory)}: TensorFlow is imported for the next command")
