"""What a machine's answers mean for a run: ok, a warning or a problem, and what to type. Pure: nothing is asked here.

`doctor.py` asks the machine and hands the answers over, as text where a command gave text; GPUs and Docker have modules
of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath
from typing import Any

from trainer.config.schema import Problem
from trainer.faults.exit_codes import meaning
from trainer.plan.addresses import CONTROL_PORT_OFFSET
from trainer.plan.checks.versions import CPU_WHEELS, SUPPORTED, is_in_range

GIB = 2**30
LITTLE_MEMORY = 1 * GIB  # a task that trains a small model takes about half of it
LITTLE_SHARED_MEMORY = 512 * 2**20  # NCCL's, between the GPUs of one machine
LITTLE_DISK, NO_DISK = 1 * GIB, 100 * 2**20  # a checkpoint holds the parameters and the optimizer's slots
FEW_FILES = 1024  # open files of a process; a task holds one connection to each other task, and its data's files
FEW_PORTS = 1000

TOLD_APART = ("TF_CONFIG", "tensorflow", "keras")  # problems of a config that other checks tell

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
GPU_WHEELS = (
    "python -m pip uninstall -y tensorflow-cpu && python -m pip install --require-hashes -r requirements/gpu.txt"
)


class Level(Enum):
    ok = "ok"
    warning = "warning"  # a run may do without it
    problem = "problem"  # a run will not


@dataclass(frozen=True)
class Finding:
    """One line of the page."""

    level: Level
    what: str  # what was looked at
    message: str
    remedy: str = ""  # what to type


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int | None  # exit code; negative: the signal that ended it; none: it had not ended at its deadline
    out: str = ""
    err: str = ""

    def last_words(self) -> str:
        """The last line it printed, most often the reason."""
        if self.code is None:
            return "no answer"
        return next((line.strip() for line in reversed((self.out + "\n" + self.err).splitlines()) if line.strip()), "")


@dataclass(frozen=True)
class Port:
    """A port that a task of this machine will listen on."""

    number: int
    whose: str  # the key of its address, e.g. cluster.addresses.ps[0]
    taken_because: str | None  # the operating system's reason; none: it is free


def ok(what: str, message: str) -> Finding:
    return Finding(Level.ok, what, message)


def warning(what: str, message: str, remedy: str) -> Finding:
    return Finding(Level.warning, what, message, remedy)


def problem(what: str, message: str, remedy: str) -> Finding:
    return Finding(Level.problem, what, message, remedy)


# Versions


def python(version: str, executable: str) -> Finding:
    if is_in_range(version, SUPPORTED["Python"]):
        return ok("Python", f"{version}, {executable}")
    message = f"{version} ({executable}); supported is {SUPPORTED['Python']}"
    return problem("Python", message, "rm -rf .venv && make PYTHON=python3.12 .venv/run")


def package(name: str, version: str | None) -> Finding:
    """A library other than TensorFlow, by the version that is installed."""
    wanted = SUPPORTED[name]
    if version is None:
        return problem(name, f"is not installed; supported is {wanted}", CPU_WHEELS)
    if not is_in_range(version, wanted):
        return problem(name, f"{version}; supported is {wanted}", f"python -m pip install '{name}{wanted}'")
    return ok(name, version)


def tensorflow(installed: Mapping[str, str], imported: Answer | None) -> list[Finding]:
    """TensorFlow's versions, and how its import in a child process went.

    Args:
        installed: version by distribution.
        imported: of the child, whose last line is JSON; none: it was not started.
    """
    wanted = SUPPORTED["tensorflow"]
    if not installed:
        message = f"is not installed; supported is {wanted}"
        return [problem("tensorflow", message, f"{CPU_WHEELS}   (with GPUs: requirements/gpu.txt)")]
    named = ", ".join(f"{name} {version}" for name, version in installed.items())
    findings = []
    if len(installed) > 1:
        message = f"{named} are both installed, and each overwrites files of the other"
        remedy = f"python -m pip uninstall -y {' '.join(installed)} && {CPU_WHEELS}"
        findings.append(problem("tensorflow", message, remedy))
    elif not all(is_in_range(version, wanted) for version in installed.values()):
        findings.append(problem("tensorflow", f"{named}; supported is {wanted}", CPU_WHEELS))
    else:
        findings.append(ok("tensorflow", named))
    return findings if imported is None else [*findings, _import(imported)]


def _import(imported: Answer) -> Finding:
    try_it = "python -c 'import tensorflow'"
    if imported.code is None:
        message = "importing TensorFlow takes longer than the doctor waits: a busy machine, or a slow disk"
        return warning("import", message, f"time {try_it}")
    told = read_import(imported)
    if told is None:
        if imported.code < 0:
            reason = meaning(imported.code) + (", an instruction this processor lacks" if imported.code == -4 else "")
        else:
            reason = imported.last_words()
        return problem("import", f"TensorFlow cannot be imported: {reason}", f"{try_it}; {CPU_WHEELS}")
    if told["backend"] != "tensorflow":
        message = f"Keras computes with {told['backend']}, and the trainer needs tensorflow"
        return problem("import", message, "export KERAS_BACKEND=tensorflow")
    return ok("import", f"TensorFlow and Keras in {told['secs']:.1f} s, {'CUDA' if told['cuda'] else 'CPU'} build")


def read_import(imported: Answer) -> dict[str, Any] | None:
    """What the child that imported TensorFlow told; none if it failed.

    Returns:
        {"secs": of the import, "cuda": whether built with it, "gpus": their number, "backend": Keras's}.
    """
    try:
        told = json.loads(imported.out.splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return told if imported.code == 0 and isinstance(told, dict) else None


# Cores and memory


def cores(usable: int, of_machine: int, limit: float | None) -> Finding:
    """Cores.

    Args:
        usable: that a plan counts with.
        of_machine: that the machine has.
        limit: of the cgroup; none: unlimited.
    """
    told = f"{usable} of {of_machine}" if usable != of_machine else f"{usable}"
    if limit is not None and limit < usable:
        message = f"{told}, but the cgroup gives no more than {limit:g}; tasks would start too many threads"
        return warning("cores", message, "device.intra_op_threads={ps:1,worker:1}")
    return ok("cores", told if limit is None else f"{told}, a cgroup's limit of {limit:g}")


def memory(meminfo: Mapping[str, int], limit: int | None, used: int) -> Finding:
    """Main memory.

    Args:
        meminfo: bytes, as /proc/meminfo names them.
        limit: bytes that the cgroup may take; none: all.
        used: bytes that it has taken, without files that are only cached.
    """
    if "MemTotal" not in meminfo:
        return warning("memory", "unknown: there is no /proc/meminfo", "look yourself: about 0.5 GiB is needed a task")
    total, free = meminfo["MemTotal"], meminfo.get("MemAvailable", meminfo.get("MemFree", 0))
    told = f"{_gib(free)} of {_gib(total)} available"
    if limit is not None and limit < total:
        free = min(free, limit - used)
        told += f"; a cgroup's limit of {_gib(limit)}, {_gib(used)} in use"
    if free < LITTLE_MEMORY:
        return warning("memory", told, "end other programs, or use a smaller cluster=; a task needs about 0.5 GiB")
    return ok("memory", told)


def read_meminfo(text: str) -> dict[str, int]:
    """Bytes by name, from /proc/meminfo."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}


def cgroup_folders(own: str) -> dict[str, list[str]]:
    """Where the limits of this process stand, innermost first, from /proc/self/cgroup.

    In a container the process often sees its own group as the root, so the root is always among them.

    Returns:
        Folders by controller: "cpu" and "memory" of cgroup v1, "" of v2.
    """
    folders: dict[str, list[str]] = {}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            if name in ("", "cpu", "memory"):
                below = PurePosixPath("/sys/fs/cgroup") / name
                parts = [p for p in PurePosixPath(path).parts if p not in ("/", "..")]
                folders[name] = [str(below.joinpath(*parts[:end])) for end in range(len(parts), -1, -1)]
    return folders


def read_cpu_max(text: str) -> float | None:
    """Cores, from cpu.max of cgroup v2, or from "quota period" of v1; none: no limit."""
    quota, _, period = text.strip().partition(" ")
    if not (quota.isdigit() and period.isdigit() and int(period)):  # "max", or -1
        return None
    return int(quota) / int(period)


def read_limit(text: str) -> int | None:
    """Bytes, from memory.max of cgroup v2 or memory.limit_in_bytes of v1; none: no limit."""
    number = int(text) if text.strip().isdigit() else None  # "max"
    return number if number is not None and number < 2**60 else None  # v1 writes a number near 2**63


def read_used(usage: str, stat: str) -> int:
    """Bytes that a cgroup cannot give back: memory.current (v1: usage_in_bytes) without memory.stat's idle files."""
    idle = re.findall(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)[-1:]  # v1: the total comes after
    return max(0, int(usage) - sum(map(int, idle))) if usage.strip().isdigit() else 0


# Network


def localhost(refused: str | None) -> Finding:
    if refused is None:
        return ok("localhost", "a task can listen and be reached")
    remedy = "sudo ip link set lo up; and 127.0.0.1 localhost belongs into /etc/hosts"
    return problem("localhost", f"a task could not listen or be reached: {refused}", remedy)


def ephemeral_ports(text: str | None) -> Finding:
    found = read_port_range(text)
    if found is None:
        return ok("free ports", "their range is not told here")
    low, high = found
    told = f"{low} to {high}, for tasks without an address of their own"
    if high - low + 1 < FEW_PORTS:
        return warning("free ports", told, "sudo sysctl -w net.ipv4.ip_local_port_range='32768 60999'")
    return ok("free ports", told)


def read_port_range(text: str | None) -> tuple[int, int] | None:
    numbers = (text or "").split()
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 and all(map(str.isdigit, numbers)) else None


def ports(local: Sequence[Port], elsewhere: int, unknown: Mapping[str, str], ephemeral: str | None) -> list[Finding]:
    """The addresses of the cluster.

    Args:
        local: ports that tasks of this machine need, status pages included.
        elsewhere: number of tasks on other machines.
        unknown: why a host name could not be resolved, by name.
        ephemeral: /proc/sys/net/ipv4/ip_local_port_range.
    """
    what, findings = "addresses", []
    for host, reason in unknown.items():
        remedy = f"getent hosts {host}; or write IP addresses into cluster.addresses"
        findings.append(warning(what, f"the host {host} is not known here: {reason}", remedy))
    taken = [port for port in local if port.taken_because is not None]
    for port in taken:
        remedy = f"ss -ltnp 'sport = :{port.number}' shows who listens; end it, or choose another port"
        message = f"port {port.number} of {port.whose} is not free: {port.taken_because}"
        findings.append(problem(what, message, remedy))
    low, high = read_port_range(ephemeral) or (0, -1)
    inside = [port.number for port in local if low <= port.number <= high]
    if inside:
        message = f"{_listed(inside)} {'is' if len(inside) == 1 else 'are'} among the ports {low} to {high} that any "
        remedy = f"choose ports below {low - CONTROL_PORT_OFFSET}: the status page listens {CONTROL_PORT_OFFSET} higher"
        findings.append(warning(what, message + "outgoing connection may take first", remedy))
    if not findings and (local or elsewhere):
        told = f"{_listed([port.number for port in local])} of this machine are free" if local else ""
        far = f"{elsewhere} tasks on other machines" if elsewhere else ""
        findings.append(ok(what, "; ".join(filter(None, [told, far]))))
    return findings


def proxies(environment: Mapping[str, str]) -> Finding:
    """Proxy variables, by name only: their values may hold passwords."""
    names = [name for name in (*PROXIES, *map(str.upper, PROXIES)) if environment.get(name)]
    if environment.get("grpc_proxy"):
        message = (
            "grpc_proxy is set: a task started on its own (job=, TF_CONFIG) would send its messages there and hang"
        )
        return warning("proxy", message, 'export grpc_proxy=""')
    if not names:
        return ok("proxy", "none")
    verb = "is" if len(names) == 1 else "are"
    return ok("proxy", f'{_listed(names)} {verb} set; tasks get grpc_proxy="" from the trainer, so gRPC goes around it')


# Files


def shared_memory(nbytes: int | None, gpu_count: int) -> Finding:
    if nbytes is None:
        return ok("/dev/shm", "not there; only NCCL, between several GPUs, needs it")
    if gpu_count > 1 and nbytes < LITTLE_SHARED_MEMORY:
        message = f"{_mib_of(nbytes)}; NCCL needs more between {gpu_count} GPUs"
        return warning("/dev/shm", message, "docker run --shm-size=1g, or sudo mount -o remount,size=1g /dev/shm")
    return ok("/dev/shm", f"{_mib_of(nbytes)}; only NCCL, between several GPUs, uses it")


def open_files(soft: int, hard: int) -> Finding:
    """Limits of a process; -1: none."""
    if 0 <= soft < FEW_FILES:
        enough = FEW_FILES * 4 if hard < 0 else min(hard, FEW_FILES * 4)
        message = f"{soft} files a process; a task opens one for each task it talks to, and its data's"
        return warning("ulimit -n", message, f"ulimit -n {enough}")
    return ok("ulimit -n", "unlimited" if soft < 0 else f"{soft} files a process")


def run_directory(path: str, exists_at: str, free: int, refused: str | None) -> Finding:
    """Where runs write.

    Args:
        path: as it will be.
        exists_at: the folder of it that is there already.
        free: bytes.
        refused: why no file can be written there; none: it can.
    """
    what = "run directory"
    if refused is not None:
        remedy = f"run=/a/folder/of/yours, or sudo mkdir -p {path} && sudo chown $USER {path}"
        return problem(what, f"{path} cannot be written: {refused}", remedy)
    told = f"{path}, {_gib(free)} free"
    if free < LITTLE_DISK:
        remedy = f"df -h {exists_at}; remove old runs, or run=/another/disk/first"
        return (problem if free < NO_DISK else warning)(what, told, remedy)
    return ok(what, told)


# The config and TF_CONFIG


def config(problems: Sequence[Problem], cluster: str) -> list[Finding]:
    findings = [problem("config", f"{p.key}: {p.message}", p.remedy) for p in problems if p.key not in TOLD_APART]
    return findings or [ok("config", f"cluster={cluster} holds on this machine")]


def tf_config(text: str | None, problems: Sequence[Problem], task: str, cluster: str) -> Finding:
    """What a scheduler says.

    Args:
        text: the environment variable.
        problems: of reading it.
        task: that it gives to this process.
        cluster: that it describes.
    """
    if not text:
        return ok("TF_CONFIG", "not set; the trainer starts all tasks itself")
    for found in problems:
        if found.key == "TF_CONFIG":
            return problem("TF_CONFIG", found.message, found.remedy)
    return ok("TF_CONFIG", f"this process plays {task} of {cluster}")


# Words


def summary(findings: Sequence[Finding]) -> str:
    """The last line of the page."""
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    problems, warnings = counts[Level.problem], counts[Level.warning]
    if not problems and not warnings:
        return "nothing is missing"
    told = [f"{n} {word}{'' if n == 1 else 's'}" for n, word in ((problems, "problem"), (warnings, "warning")) if n]
    return ", ".join(told) + ("" if problems else "; runs can start")


def _listed(items: Sequence[object]) -> str:
    words = list(map(str, items))
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"


def _mib_of(nbytes: int) -> str:
    return _gib(nbytes) if nbytes >= GIB else f"{nbytes / 2**20:.0f} MiB"
