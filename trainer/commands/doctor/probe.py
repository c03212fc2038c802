"""`trainer doctor`: checks this machine and says how to fix it.

All checks run concurrently, each in its own thread, with one deadline: a dead name server, disk or driver must
not hold up the others. TensorFlow is imported by a child process only. Verdicts are in `machine.py` and its
neighbours, which do not probe the machine.
"""

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainer.commands.doctor import finding, machine, network, software
from trainer.commands.doctor.docker import docker
from trainer.commands.doctor.finding import Answer, Finding, Level
from trainer.commands.doctor.gpus import GPU_FIELDS, PROCESS_FIELDS, gpus, gpus_of_tensorflow, read_gpus
from trainer.commands.doctor.network import Port
from trainer.config.schema import RunConfig
from trainer.config.typed import Mode
from trainer.faults.problems import Problem
from trainer.launch.processes import warm
from trainer.launch.processes.isolation import why_impossible
from trainer.launch.processes.ports import HeldPorts
from trainer.observe.machine import cgroup_limits, is_local, memory_info, read, this_machine, usable_cores, version_of
from trainer.plan.addresses import CONTROL_PORT_OFFSET, split
from trainer.plan.checks.versions import TENSORFLOWS
from trainer.plan.resolve import resolve
from trainer.plan.validate import validate

COMMAND_SECS = 8.5  # for one command
DEADLINE_SECS = 9.5  # for all checks; longer, so that a late command is reported as such
PROBLEM_FOUND = 1  # exit code
CSV = "--format=csv,noheader,nounits"
IMPORT = """
import json, time
started = time.monotonic()
import tensorflow, keras
facts = {"secs": time.monotonic() - started, "cuda": tensorflow.test.is_built_with_cuda()}
facts |= {"gpus": len(tensorflow.config.list_physical_devices("GPU")), "backend": keras.backend.backend()}
print(json.dumps(facts))
"""

T = TypeVar("T")


@dataclass(frozen=True)
class MachineNeeds:
    """The requirements of a config for this machine."""

    problems: Sequence[Problem]  # that it has here
    cluster: str  # e.g. 2ps4w
    addresses: Mapping[str, Sequence[str]]  # "host:port" by job
    task: str  # that this process runs, where TF_CONFIG says so
    run: str | None  # run directory
    gpus: bool  # whether it gives GPUs to tasks


def run(config: RunConfig) -> int:
    """Prints a line for each check; returns the exit code."""
    config, problems = resolve(config, os.environ, Mode.doctor)
    problems += validate(config, this_machine(with_gpu_memory=bool(config.device.gpus)), Mode.doctor)
    cluster, gpus = config.cluster, any(config.device.gpus.values())
    wanted = MachineNeeds(problems, cluster.name, cluster.addresses, f"{config.job}:{config.task}", config.run, gpus)
    findings = examine(wanted, os.environ)
    finding.show(findings)
    return PROBLEM_FOUND if any(one.level is Level.problem for one in findings) else 0


def examine(wanted: MachineNeeds, environment: Mapping[str, str]) -> list[Finding]:
    """Runs every check, and returns the findings in the order of the page."""
    deadline = time.monotonic() + DEADLINE_SECS
    installed = {name: version for name in TENSORFLOWS if (version := version_of(name))}
    not_isolated = why_impossible()  # before there are threads: it forks
    meminfo, limits = memory_info(), cgroup_limits()  # before TensorFlow's import takes half a GiB
    imported = start(lambda: command(sys.executable, "-c", IMPORT) if installed else None)
    listed = start(lambda: command("nvidia-smi", f"--query-gpu={GPU_FIELDS}", CSV))
    gpu_count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    settings = {name: read(Path("/proc/sys", *name.split("."))) for name in network.USER_NAMESPACES}
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    files = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} files per process"
    port_range = read(Path("/proc/sys/net/ipv4/ip_local_port_range"))
    checks: dict[str, Callable[[], list[Finding]]] = {
        "Python": lambda: [software.package("Python", platform.python_version(), f", {sys.executable}")],
        "tensorflow": lambda: software.tensorflow(installed, imported.result()),
        "packages": lambda: [software.package(name, version_of(name)) for name in ("keras", "hydra-core", "omegaconf")],
        "GPUs": lambda: check_gpus(listed.result(), gpu_count, wanted=wanted.gpus),
        "GPUs in TF": lambda: check_gpus_of_tensorflow(
            listed.result(), imported.result(), environment.get("CUDA_VISIBLE_DEVICES"), wanted=wanted.gpus
        ),
        "cores": lambda: [machine.cores(usable_cores(limits.cores), os.cpu_count() or 1, limits.cores)],
        "memory": lambda: [machine.memory(meminfo, limits.memory_bytes, limits.memory_used_bytes)],
        "isolation": lambda: [network.isolation(not_isolated, {} if os.geteuid() == 0 else settings)],
        "localhost": lambda: [network.localhost(try_localhost())],
        "free ports": lambda: [network.ephemeral_ports(port_range)],
        "addresses": lambda: network.ports(*locate(wanted.addresses), port_range),
        "proxy": lambda: [network.proxies(environment)],
        "TF_CONFIG": lambda: [
            network.tf_config(environment.get("TF_CONFIG"), wanted.problems, wanted.task, wanted.cluster)
        ],
        "/dev/shm": lambda: [machine.shared_memory(shared_memory_bytes(), gpu_count)],
        "ulimit -n": lambda: [finding.judged("ulimit -n", files, wanted.problems)],
        "run directory": lambda: [check_run_directory(Path(wanted.run or "runs"))],
        "docker": lambda: check_docker(gpu_count),
        "warm process": lambda: [machine.warm_process(one.pid, one.memory_bytes()) for one in warm.find()],
        "config": lambda: finding.config(wanted.problems, wanted.cluster),
    }
    started = {what: start(check) for what, check in checks.items()}
    return [finding for what, findings in started.items() for finding in collect(what, findings, deadline)]


def start(work: Callable[[], T]) -> Future[T]:
    """Runs `work` in a thread that does not keep the process from ending, unlike a thread of an executor."""
    future: Future[T] = Future()

    def answer() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=answer, daemon=True).start()
    return future


def collect(what: str, findings: Future[list[Finding]], deadline: float) -> list[Finding]:
    """Returns the findings of one check; a check that hangs or fails is a finding too."""
    remedy = "check it by hand; the other checks do not depend on it"
    try:
        return findings.result(max(0.0, deadline - time.monotonic()))
    except futures.TimeoutError:  # another class than the built-in one, before Python 3.11
        return [finding.warning(what, f"no answer within {DEADLINE_SECS:.0f} s", remedy)]
    except Exception as error:
        return [finding.warning(what, f"could not be checked: {type(error).__name__}: {error}", remedy)]


def command(*arguments: str) -> Answer | None:
    """Returns the output of a command, or None if there is no such command."""
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"LC_ALL": "C"},
        )
    except OSError:
        return None
    try:
        out, err = process.communicate(timeout=COMMAND_SECS)
    except subprocess.TimeoutExpired:
        process.kill()  # its end is not waited for: a process that hangs in a driver has none
        return Answer(None)
    return Answer(process.returncode, out, err)


def check_gpus(listed: Answer | None, device_files: int, *, wanted: bool) -> list[Finding]:
    if listed is None or listed.code is None:  # no nvidia-smi, or one that hangs
        return gpus(listed, None, None, device_files=device_files, wanted=wanted)
    processes = start(lambda: command("nvidia-smi", f"--query-compute-apps={PROCESS_FIELDS}", CSV))
    banner = command("nvidia-smi")
    return gpus(listed, processes.result(), banner, device_files=device_files, wanted=wanted)


def check_gpus_of_tensorflow(
    listed: Answer | None, imported: Answer | None, visible: str | None, *, wanted: bool
) -> list[Finding]:
    facts = software.read_import(imported) if imported is not None else None
    if imported is None or facts is None:  # the check of TensorFlow says why
        return []
    seen = len(read_gpus(listed.out)) if listed is not None else 0
    return gpus_of_tensorflow(seen, facts, imported.err, visible, wanted=wanted)


def check_docker(gpu_count: int) -> list[Finding]:
    compose = start(lambda: command("docker", "compose", "version", "--short"))
    return docker(command("docker", "info", "--format", "{{json .}}"), compose.result(), gpu_count)


def check_run_directory(path: Path) -> Finding:
    """Checks that an unnamed file can be written into the existing part of the path, and leaves nothing behind."""
    path = path.resolve()
    there = next(folder for folder in (path, *path.parents) if os.path.exists(folder))  # no error where it may not look
    refused = None
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        refused = f"{there}: {error.strerror}"
    return machine.run_directory(str(path), str(there), shutil.disk_usage(there).free, refused)


def shared_memory_bytes() -> int | None:
    return shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None


def try_localhost() -> str | None:
    """Listens on a free port and connects to it, as the tasks of a run do; returns why that failed."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(("localhost", server.getsockname()[1]), timeout=2).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def locate(by_job: Mapping[str, Sequence[str]]) -> tuple[list[Port], int, dict[str, str]]:
    """Returns this machine's ports among the addresses, the number of other addresses, and why hosts are unknown."""
    local: list[Port] = []
    elsewhere, unknown = 0, dict[str, str]()
    here: dict[str, bool] = {}  # by host
    for job, listed in by_job.items():
        for index, address in enumerate(listed):
            try:
                host, port = split(address)
            except ValueError:  # reported with the config's problems
                continue
            if host not in here and host not in unknown:
                try:
                    socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                    here[host] = is_local(host)
                except (OSError, UnicodeError) as error:
                    unknown[host] = str(error)
            key = f"cluster.addresses.{job}[{index}]"
            if here.get(host):
                whose = {port: key, port + CONTROL_PORT_OFFSET: f"the status page of {key}"}
                local += [Port(number, what, why_taken(number)) for number, what in whose.items()]
            elif host in here:
                elsewhere += 1
    return local, elsewhere, unknown


def why_taken(port: int) -> str | None:
    """Returns why a task could not listen on a port of every interface; None if it could."""
    try:
        with HeldPorts(0) as held:
            held.hold(port)
    except OSError as error:
        return error.strerror
    return None
