"""Judges addresses, ports and proxies. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.commands.doctor.finding import Finding, judged, ok, problem, warning
from trainer.config.words import listed
from trainer.faults.problems import Problem
from trainer.plan.addresses import CONTROL_PORT_OFFSET

FEW_PORTS = 1000
USER_NAMESPACES = {  # settings of kernels: the value that forbids them, and one that does not
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user.max_user_namespaces": ("0", "10000"),
}
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True)
class Port:
    """A port that a task of this machine will listen on."""

    number: int
    whose: str  # the key of its address, e.g. cluster.addresses.ps[0]
    taken_because: str | None  # the operating system's reason; none: it is free


def localhost(refused: str | None) -> Finding:
    if refused is None:
        return ok("localhost", "a task can listen and be reached")
    remedy = "sudo ip link set lo up; /etc/hosts must contain 127.0.0.1 localhost"
    return problem("localhost", f"a task could not listen or be reached: {refused}", remedy)


def isolation(refused: str, settings: Mapping[str, str]) -> Finding:
    """Judges whether tasks can have their own network: why not, and the kernel's settings of USER_NAMESPACES."""
    if not refused:
        return ok("isolation", "no other program can reach the tasks of a run on this machine")
    pairs = [(name, text, *USER_NAMESPACES[name]) for name, text in settings.items()]
    allowed = [f"{name}={other}" for name, text, forbidding, other in pairs if text.strip() == forbidding]
    remedy = f"sudo sysctl -w {' '.join(allowed)}" if allowed else "launch=docker, whose network is closed"
    message = f"not available, so anyone who can reach this machine can reach the tasks of a run: {refused}"
    return warning("isolation", message, remedy)


def ephemeral_ports(text: str | None) -> Finding:
    bounds = read_port_range(text)
    if bounds is None:
        return ok("free ports", "their range is unknown on this machine")
    low, high = bounds
    message = f"{low} to {high}, for tasks without an address of their own"
    if high - low + 1 < FEW_PORTS:
        return warning("free ports", message, "sudo sysctl -w net.ipv4.ip_local_port_range='32768 60999'")
    return ok("free ports", message)


def read_port_range(text: str | None) -> tuple[int, int] | None:
    numbers = (text or "").split()
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 and all(map(str.isdigit, numbers)) else None


def ports(local: Sequence[Port], elsewhere: int, unknown: Mapping[str, str], ephemeral: str | None) -> list[Finding]:
    """Judges the ports of this machine's tasks, given the number of other tasks and the hosts that do not resolve."""
    what, findings = "addresses", []
    for host, reason in unknown.items():
        remedy = f"getent hosts {host}; or write IP addresses into cluster.addresses"
        findings.append(warning(what, f"the host {host} cannot be resolved here: {reason}", remedy))
    for port in local:
        if port.taken_because is not None:
            remedy = f"ss -ltnp 'sport = :{port.number}' shows who listens; end it, or choose another port"
            message = f"port {port.number} of {port.whose} is not free: {port.taken_because}"
            findings.append(problem(what, message, remedy))
    low, high = read_port_range(ephemeral) or (0, -1)
    inside = [port.number for port in local if low <= port.number <= high]
    if inside:
        message = f"{listed(inside)} {'is' if len(inside) == 1 else 'are'} among the ports {low} to {high} that any "
        remedy = f"choose ports below {low - CONTROL_PORT_OFFSET}: the status page listens {CONTROL_PORT_OFFSET} higher"
        findings.append(warning(what, message + "outgoing connection may take first", remedy))
    if not findings and (local or elsewhere):
        message = f"{listed([port.number for port in local])} of this machine are free" if local else ""
        far = f"{elsewhere} tasks on other machines" if elsewhere else ""
        findings.append(ok(what, "; ".join(filter(None, [message, far]))))
    return findings


def proxies(environment: Mapping[str, str]) -> Finding:
    """Judges proxy variables, by name only: their values may contain passwords."""
    names = [name for name in (*PROXIES, *map(str.upper, PROXIES)) if environment.get(name)]
    if environment.get("grpc_proxy"):
        message = (
            "grpc_proxy is set: a task started on its own (job=, TF_CONFIG) would send its messages there and hang"
        )
        return warning("proxy", message, 'export grpc_proxy=""')
    if not names:
        return ok("proxy", "none")
    verb = "is" if len(names) == 1 else "are"
    return ok("proxy", f'{listed(names)} {verb} set; tasks get grpc_proxy="" from the trainer, so gRPC goes around it')


def tf_config(text: str | None, problems: Sequence[Problem], task: str, cluster: str) -> Finding:
    """Judges the variable by the problems of reading it, and by the task and cluster that it sets for this process."""
    if not text:
        return ok("TF_CONFIG", "not set; the trainer starts all tasks itself")
    return judged("TF_CONFIG", f"this process runs {task} of {cluster}", problems)
