"""The doctor: the verdicts on recorded answers, and on this machine."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trainer.commands.doctor import docker, finding, gpus, machine, network, probe, software
from trainer.commands.doctor.finding import Answer, Finding, Level
from trainer.commands.doctor.network import Port
from trainer.faults.problems import Problem
from trainer.plan.checks.versions import CPU_WHEELS, SUPPORTED, is_in_range

ROOT = Path(__file__).resolve().parents[2]
OK, WARNING, PROBLEM = Level.ok, Level.warning, Level.problem

# Two GPUs as nvidia-smi lists them; the second is nearly full.
GPUS = """\
0, GPU-1b2c, NVIDIA A100-SXM4-40GB, 550.90.07, 40960, 40326
1, GPU-9f8e, NVIDIA A100-SXM4-40GB, 550.90.07, 40960, 512
"""
PROCESSES = """\
GPU-9f8e, 4242, python, 38000
GPU-9f8e, 4243, /opt/app, with a comma, 1400
GPU-1b2c, 77, [Not Found], [N/A]
"""
BANNER = "| NVIDIA-SMI 550.90.07              Driver Version: 550.90.07      CUDA Version: 12.4     |\n"
NO_DRIVER = """\
NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. \
Make sure that the latest NVIDIA driver is installed and running.
"""
IMPORTED = {"secs": 2.46, "cuda": True, "gpus": 2, "backend": "tensorflow"}
NO_ENGINE = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"


def gpu_findings(answer: Answer | None, *, device_files: int = 0, wanted: bool = False) -> list[Finding]:
    apps, banner = Answer(0, PROCESSES), Answer(0, BANNER)
    return gpus.gpus(answer, apps, banner, device_files=device_files, wanted=wanted)


def levels(findings: list[Finding]) -> list[tuple[str, Level]]:
    return [(finding.what, finding.level) for finding in findings]


def test_the_supported_versions_are_those_of_pyproject():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = "{SUPPORTED["Python"]}"' in text
    for name, wanted in SUPPORTED.items():
        if name != "Python":
            assert re.findall(rf'"{name}(?:-cpu|\[and-cuda\])?([<>=][^"]+)"', text)[0] == wanted


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.21.0", True), ("2.21.1rc0", True), ("2.22.0", False), ("2.9.3", False), ("3.0", False), ("2.21", True)],
)
def test_a_version_is_compared_by_its_numbers(version, fits):
    assert is_in_range(version, ">=2.21,<2.22") is fits


def test_another_python_is_a_problem_with_a_remedy():
    verdict = software.package("Python", "3.9.18", ", /usr/bin/python3")
    assert (verdict.level, verdict.message) == (PROBLEM, "Python 3.9.18 is installed; supported: >=3.10,<3.14")
    assert "make PYTHON=" in verdict.remedy


def test_a_library_that_is_missing_or_too_old_is_a_problem():
    assert software.package("keras", None).level is PROBLEM
    verdict = software.package("keras", "2.15.0")
    assert (verdict.level, verdict.remedy) == (PROBLEM, CPU_WHEELS)


def test_tensorflow_that_imports_is_fine(snapshot):
    findings = software.tensorflow({"tensorflow": "2.21.0"}, Answer(0, "noise\n" + json.dumps(IMPORTED)))
    assert findings == snapshot


def test_a_missing_tensorflow_is_one_problem():
    assert levels(software.tensorflow({}, None)) == [("tensorflow", PROBLEM)]


def test_two_tensorflows_in_one_place_are_a_problem():
    both = {"tensorflow": "2.21.0", "tensorflow-cpu": "2.21.0"}
    verdict = software.tensorflow(both, None)[0]
    assert verdict.level is PROBLEM
    assert verdict.remedy.startswith("python -m pip uninstall -y tensorflow tensorflow-cpu &&")


@pytest.mark.parametrize(
    ("imported", "level"),
    [
        (Answer(1, "", "Traceback\nImportError: libfoo.so.1: cannot open"), PROBLEM),
        (Answer(-4), PROBLEM),
        (Answer(None), WARNING),
        (Answer(0, json.dumps(IMPORTED | {"backend": "jax"})), PROBLEM),
    ],
    ids=["no library", "no instruction", "slow", "another backend"],
)
def test_a_broken_import_says_how_it_ended(imported, level, snapshot):
    verdict = software.tensorflow({"tensorflow-cpu": "2.21.0"}, imported)[1]
    assert verdict.level is level
    assert verdict == snapshot


def test_gpus_are_listed_with_the_driver_and_their_processes():
    driver, first, _ = gpu_findings(Answer(0, GPUS))
    assert driver == Finding(OK, "driver", "NVIDIA 550.90.07, CUDA up to 12.4")
    text = "NVIDIA A100-SXM4-40GB, 40,326 of 40,960 MiB free; pid 77 [Not Found] (memory unknown)"
    assert first == Finding(OK, "GPU 0", text)


def test_a_nearly_full_gpu_names_its_largest_process_and_an_emptier_gpu(snapshot):
    full = gpu_findings(Answer(0, GPUS))[2]
    assert full.level is WARNING
    assert "512 of 40,960 MiB free; pid 4242 python (38,000 MiB)" in full.message
    assert full.message == snapshot
    assert full.remedy == snapshot


def test_a_full_gpu_whose_processes_are_hidden_is_a_warning(snapshot):
    findings = gpus.gpus(Answer(0, GPUS), Answer(0, ""), None, device_files=2, wanted=False)
    assert (findings[0].message, findings[2].level) == ("NVIDIA 550.90.07", WARNING)
    assert findings[2].message == snapshot


def test_a_gpu_with_unknown_memory_is_fine():
    findings = gpu_findings(Answer(0, "0, GPU-5, NVIDIA GB10, 580.95.05, [N/A], [N/A]\n"))
    assert findings[1] == Finding(OK, "GPU 0", "NVIDIA GB10, memory unknown")


def test_an_old_driver_says_which_is_needed():
    verdict = gpu_findings(Answer(0, GPUS.replace("550.90.07", "470.223.02")))[0]
    assert verdict.level is WARNING
    assert "needs driver 525.60 or newer" in verdict.message


@pytest.mark.parametrize(
    ("answer", "device_files", "wanted", "level"),
    [
        (None, 0, False, OK),
        (None, 2, False, WARNING),
        (None, 2, True, PROBLEM),
        (Answer(9, NO_DRIVER), 1, False, WARNING),
        (Answer(9, NO_DRIVER), 1, True, PROBLEM),
        (Answer(6, "No devices were found\n"), 0, False, OK),
        (Answer(None), 1, False, WARNING),
        (Answer(1, "", ""), 0, False, WARNING),
    ],
)
def test_no_gpu_is_fine_but_one_that_cannot_be_queried_is_not(answer, device_files, wanted, level):
    assert levels(gpu_findings(answer, device_files=device_files, wanted=wanted)) == [("GPUs", level)]


@pytest.mark.parametrize(
    ("seen", "facts", "complaints", "visible", "expected"),
    [
        (0, {"gpus": 0, "cuda": False}, "", None, None),
        (2, {"gpus": 2, "cuda": True}, "", None, (OK, "all 2;")),
        (2, {"gpus": 0, "cuda": False}, "", None, (WARNING, "built without CUDA")),
        (2, {"gpus": 0, "cuda": True}, "", "-1", (WARNING, "0 of 2, as CUDA_VISIBLE_DEVICES=-1 says")),
        (
            2,
            {"gpus": 0, "cuda": True},
            "E0000 00:00:1 7 cuda_fft.cc:467] Unable to register cuFFT factory\n"
            "W0000 00:00:1 7 gpu_device.cc:2342] Cannot dlopen some GPU libraries.\n",
            None,
            (WARNING, "0 of 2: Cannot dlopen some GPU libraries."),
        ),
    ],
)
def test_gpus_that_tensorflow_does_not_see_are_reported_with_the_reason(seen, facts, complaints, visible, expected):
    findings = gpus.gpus_of_tensorflow(seen, facts, complaints, visible, wanted=False)
    assert [(f.level, expected[1] in f.message) for f in findings] == (
        [] if expected is None else [(expected[0], True)]
    )


def test_gpus_that_a_config_wants_must_be_seen():
    findings = gpus.gpus_of_tensorflow(2, {"gpus": 0, "cuda": False}, "", None, wanted=True)
    assert findings[0].level is PROBLEM


def test_a_limit_below_one_core_is_a_warning(snapshot):
    assert machine.cores(4, 8, None) == Finding(OK, "cores", "4 of 8")
    assert machine.cores(1, 8, 1.5) == snapshot
    assert machine.cores(1, 8, 0.5).level is WARNING


def test_memory_counts_the_cgroup(snapshot):
    meminfo = {"MemTotal": 16 * 2**30, "MemAvailable": 8 * 2**30}
    assert machine.memory(meminfo, None, 0) == Finding(OK, "memory", "8.00 GiB of 16.00 GiB available")
    verdict = machine.memory(meminfo, 2 * 2**30, 3 * 2**29)
    assert verdict.level is WARNING
    assert verdict.message == snapshot
    assert machine.memory({}, None, 0).level is WARNING


def test_the_values_of_proxies_are_not_shown():
    environment = {"http_proxy": "http://user:secret@proxy:3128", "HTTPS_PROXY": "http://secret", "all_proxy": ""}
    verdict = network.proxies(environment)
    assert verdict.level is OK
    assert verdict.message.startswith("http_proxy and HTTPS_PROXY are set; tasks get grpc_proxy")
    assert "secret" not in verdict.message


def test_a_proxy_for_grpc_itself_is_a_warning():
    verdict = network.proxies({"grpc_proxy": "http://secret"})
    assert (verdict.level, verdict.remedy, "secret" in verdict.message) == (WARNING, 'export grpc_proxy=""', False)


def test_taken_ports_are_problems_and_ephemeral_ones_are_warnings(snapshot):
    local = [Port(2222, "ps[0]", "Address already in use"), Port(40000, "worker[0]", None)]
    findings = network.ports(local, 1, {"nowhere": "Name or service not known"}, "32768\t60999\n")
    assert levels(findings) == [("addresses", WARNING), ("addresses", PROBLEM), ("addresses", WARNING)]
    assert findings[1].message == snapshot
    assert findings[2].remedy.startswith("choose ports below 31768")


def test_free_ports_and_tasks_elsewhere_are_on_one_line(snapshot):
    findings = network.ports([Port(2222, "ps[0]", None), Port(3222, "its page", None)], 3, {}, None)
    assert findings == snapshot
    assert network.ports([], 0, {}, None) == []


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (network.ephemeral_ports("32768 60999"), OK),
        (network.ephemeral_ports("60000 60100"), WARNING),
        (network.ephemeral_ports(""), OK),
        (network.localhost(None), OK),
        (network.localhost("Network is unreachable"), PROBLEM),
        (network.isolation("", {}), OK),
        (network.isolation("it needs Linux", {}), WARNING),
        (machine.shared_memory(None, 0), OK),
        (machine.shared_memory(64 * 2**20, 1), OK),
        (machine.shared_memory(64 * 2**20, 2), WARNING),
        (machine.run_directory("/r/a", "/r", 50 * 2**30, None), OK),
        (machine.run_directory("/r/a", "/r", 2**29, None), WARNING),
        (machine.run_directory("/r/a", "/r", 2**20, None), PROBLEM),
        (machine.run_directory("/r/a", "/r", 2**40, "Permission denied"), PROBLEM),
    ],
)
def test_each_limit_has_its_level_and_what_is_not_ok_has_a_remedy(finding, level):
    assert finding.level is level
    assert bool(finding.remedy) is (level is not OK)


def test_the_setting_that_forbids_user_namespaces_is_named(snapshot):
    settings = {"user.max_user_namespaces": "96365\n", "kernel.apparmor_restrict_unprivileged_userns": "1\n"}
    verdict = network.isolation("this system refuses it (unshare: Permission denied)", settings)
    assert verdict.message == snapshot
    assert verdict.remedy == "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"


def test_only_nccl_uses_shared_memory(snapshot):
    assert machine.shared_memory(2**26, 0).message == snapshot
    assert machine.shared_memory(None, 0).message == snapshot
    assert machine.shared_memory(2**26, 2) == snapshot


@pytest.mark.parametrize("key", finding.OTHER_LINES)
def test_what_has_a_line_of_its_own_is_reported_once(key):
    problems = [Problem(key, "malformed", "it is bad", "unset it"), Problem("seed", "wrong-type", "bad", "seed=1")]
    assert finding.judged(key, "fine", problems) == Finding(PROBLEM, key, "it is bad", "unset it")
    assert finding.judged(key, "fine", problems[1:]) == Finding(OK, key, "fine")
    assert finding.config(problems, "local") == [Finding(PROBLEM, "config", "seed: bad", "seed=1")]


def info(**facts: object) -> Answer:
    return Answer(0, json.dumps({"ServerVersion": "28.2.2", "Runtimes": {"runc": {}}, **facts}))


@pytest.mark.parametrize(
    ("answer", "compose", "gpu_count", "expected"),
    [
        (None, None, 0, [("docker", OK)]),
        (Answer(None), Answer(None), 0, [("docker", WARNING), ("compose", WARNING)]),
        (info(), Answer(0, "2.36.2\n"), 0, [("docker", OK), ("compose", OK)]),
        (info(ServerVersion="19.03.15"), Answer(0, "2.36.2\n"), 0, [("docker", WARNING), ("compose", OK)]),
        (info(ServerVersion="20.10.24"), Answer(0, "2.36.2\n"), 0, [("docker", OK), ("compose", OK)]),
        (info(), Answer(0, "v2.20.3\n"), 0, [("docker", OK), ("compose", WARNING)]),
        (info(), None, 0, [("docker", OK), ("compose", WARNING)]),
        (info(), Answer(125, "", "unknown flag: --short\n"), 0, [("docker", OK), ("compose", WARNING)]),
        (info(), Answer(0, "5.0.0"), 1, [("docker", OK), ("compose", OK), ("docker GPUs", WARNING)]),
        (
            info(Runtimes={"nvidia": {}, "runc": {}}),
            Answer(0, "2.27.0"),
            1,
            [("docker", OK), ("compose", OK), ("docker GPUs", OK)],
        ),
        (Answer(0, '{"host": {}, "version": {}}'), Answer(0, "2.36.2"), 0, [("docker", WARNING), ("compose", OK)]),
        (Answer(1, "not JSON"), Answer(0, "2.36.2"), 0, [("docker", WARNING), ("compose", OK)]),
    ],
)
def test_docker_is_judged_by_what_containers_need(answer, compose, gpu_count, expected):
    findings = docker.docker(answer, compose, gpu_count)
    assert levels(findings) == expected
    assert all(bool(finding.remedy) is (finding.level is not OK) for finding in findings)


DOCKER = """\
#!/bin/sh
case "$1" in
info) echo '{"ServerVersion": "19.03.15", "Runtimes": {"runc": {}}}' ;;
compose) echo 2.20.3 ;;
esac
"""


def test_an_old_docker_without_gpus_is_reported_with_the_requirements(tmp_path, monkeypatch, snapshot):
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert [(one.what, one.level, one.message) for one in probe.check_docker(1)] == snapshot
    remedies = [one.remedy for one in probe.check_docker(1)]
    assert remedies[0] == snapshot
    assert remedies[1] == snapshot
    assert remedies[2] == snapshot


def test_a_machine_without_docker_is_fine(tmp_path, monkeypatch, snapshot):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.check_docker(1) == snapshot


def test_an_engine_that_is_down_differs_from_one_without_permission():
    down = Answer(1, json.dumps({"ServerVersion": "", "Runtimes": None}), NO_ENGINE + "\n")
    assert "no engine: Cannot connect" in docker.docker(down, None, 0)[0].message
    refused = "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock"
    closed = Answer(1, json.dumps({"ServerVersion": "", "ServerErrors": [refused]}))
    assert "usermod -aG docker" in docker.docker(closed, None, 0)[0].remedy


def test_the_last_line_counts_problems_and_warnings():
    warned, bad = finding.warning("a", "b", "c"), finding.problem("a", "b", "c")
    assert finding.summary([finding.ok("a", "b")]) == "all checks passed"
    assert finding.summary([warned, warned]) == "2 warnings; runs can start"
    assert finding.summary([warned, bad]) == "1 problem, 1 warning"


def test_a_command_that_is_missing_or_hangs_is_not_an_error(monkeypatch):
    assert probe.command("no-such-command-here") is None
    monkeypatch.setattr(probe, "COMMAND_SECS", 0.1)
    assert probe.command("sleep", "30") == Answer(None)


def test_a_check_that_hangs_or_fails_is_a_warning():
    done = threading.Event()
    hanging = probe.start(lambda: [finding.ok("disk", str(done.wait(30)))])
    assert probe.collect("disk", hanging, time.monotonic())[0].message == "no answer within 10 s"
    done.set()
    broken = probe.start(lambda: [finding.ok("x", str(1 // 0))])
    failed = probe.collect("x", broken, time.monotonic() + 5)[0]
    assert (failed.level, "ZeroDivisionError" in failed.message) == (WARNING, True)


def test_gpus_are_queried_with_the_fields_that_are_read(tmp_path, monkeypatch):
    """A scripted nvidia-smi answers the very questions that the doctor asks."""
    script = (
        '#!/bin/sh\ncase "$1" in\n'
        f"--query-gpu={gpus.GPU_FIELDS}) cat <<'END'\n{GPUS}END\n;;\n"
        f"--query-compute-apps={gpus.PROCESS_FIELDS}) cat <<'END'\n{PROCESSES}END\n;;\n"
        f"'') cat <<'END'\n{BANNER}END\n;;\n*) exit 2;;\nesac\n"
    )
    (tmp_path / "nvidia-smi").write_text(script)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    listed = probe.command("nvidia-smi", f"--query-gpu={gpus.GPU_FIELDS}", probe.CSV)
    findings = probe.check_gpus(listed, 2, wanted=False)
    assert levels(findings) == [("driver", OK), ("GPU 0", OK), ("GPU 1", WARNING)]


def test_ports_of_this_machine_are_tried():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        if port + 1000 > 65535:
            pytest.skip("the status page's port would be too high")
        local, elsewhere, unknown = probe.locate({"ps": [f"127.0.0.1:{port}", "192.0.2.1:2222", "not an address"]})
    assert [one.number for one in local] == [port, port + 1000]
    assert [one.whose.rpartition(" ")[2] for one in local] == ["cluster.addresses.ps[0]"] * 2
    assert "already in use" in local[0].taken_because
    assert (elsewhere, unknown) == (1, {})


def test_trying_the_run_directory_leaves_nothing_behind(tmp_path):
    verdict = probe.check_run_directory(tmp_path / "runs" / "first")
    assert re.fullmatch(rf"{tmp_path}/runs/first, [\d.]+ [GM]iB free", verdict.message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.isdir("/sys/kernel"), reason="there is no /sys, where nobody can make a file")
def test_a_run_directory_that_cannot_be_written_is_a_problem():
    verdict = probe.check_run_directory(Path("/sys/kernel/mine"))
    assert verdict.level is PROBLEM
    assert "/sys/kernel/mine" in verdict.message
    assert "sudo mkdir -p /sys/kernel/mine" in verdict.remedy


def test_a_run_directory_below_a_file_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("")
    verdict = probe.check_run_directory(tmp_path / "file" / "run")
    assert verdict.level is PROBLEM
    assert "Not a directory" in verdict.message


def test_the_page_is_aligned_and_keeps_text_in_brackets(capsys):
    finding.show([finding.ok("cores", "2"), finding.problem("run directory", "a [b] c", "sudo mkdir -p /x")])
    assert capsys.readouterr().out.splitlines() == [
        "ok       cores          2",
        "problem  run directory  a [b] c",
        "                          sudo mkdir -p /x",
        "",
        "1 problem",
    ]


@pytest.mark.slow
def test_the_doctor_checks_this_machine_without_importing_tensorflow(tmp_path):
    code = (
        "import sys; from trainer.__main__ import console\n"
        "try: console()\n"
        "finally: print('imported:', *sorted({'tensorflow', 'keras', 'numpy'} & set(sys.modules)))"
    )
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", code, "mode=doctor", "train.batch_size=255", "cluster=4w"],
        cwd=tmp_path,
        env=os.environ | {"TF_CONFIG": "{", "http_proxy": "http://secret@proxy:1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert time.monotonic() - started < 20  # 10, and the start of Python on a busy machine
    *page, imported = ended.stdout.splitlines()
    assert (ended.returncode, imported) == (probe.PROBLEM_FOUND, "imported:"), ended.stdout + ended.stderr
    lines = {line[9:].split("  ")[0]: line.split()[0] for line in page if re.match(r"(ok|warning|problem) ", line)}
    assert (lines["Python"], lines["tensorflow"], lines["TF_CONFIG"], lines["config"]) == ("ok", "ok", *["problem"] * 2)
    assert "type train.batch_size=256" in ended.stdout
    assert "secret" not in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_machine_without_any_command_has_no_problem_from_it(tmp_path):
    # Stand-ins, whose import takes no seconds; the test above imports the real ones.
    none = "class test: is_built_with_cuda = bool\nclass config: list_physical_devices = list\n"
    (tmp_path / "tensorflow.py").write_text(none)
    (tmp_path / "keras.py").write_text("class backend:\n    def backend(): return 'tensorflow'\n")
    ended = subprocess.run(
        [sys.executable, "-m", "trainer", "mode=doctor"],
        cwd=tmp_path,
        env=os.environ | {"PATH": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(r"^ok +docker +not installed", ended.stdout, re.MULTILINE), ended.stdout + ended.stderr
    assert ended.stderr == ""
