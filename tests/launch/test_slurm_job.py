"""The script of a Slurm job, and what is said of a job."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from quick_config import load

from trainer.launch.slurm import job_script, launcher
from trainer.storage.run_directory import RunDirectory

QUOTED = "name=it's"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2h", "02:00:00"), ("90m", "01:30:00"), ("45s", "00:00:45"), ("1d", "24:00:00"), ("1-12:00:00", "1-12:00:00")],
)
def test_a_time_limit_is_written_as_sbatch_takes_it(text: str, expected: str):
    assert job_script.limit(text) == expected


def test_the_script_asks_for_what_the_config_says():
    config = load([
        "cluster=2ps4w", "launch=slurm", "slurm.time=2h", "slurm.nodes=2", "slurm.gpus_per_worker=1", "slurm.requeue=3",
        "slurm.args=\"--partition=gpu --comment='it is mine'\"",
    ])  # fmt: skip
    text = job_script.render(
        config.slurm, config.cluster, ["python", "-m", "trainer", QUOTED], Path("/shared/runs/mine")
    )
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=mine\n#SBATCH --ntasks=6\n#SBATCH --nodes=2\n")
    for option in ("--gpus-per-node=2", "--time=02:00:00", "--requeue", "--partition=gpu", "'--comment=it is mine'"):
        assert f"\n#SBATCH {option}\n" in text
    assert "#SBATCH --output=/shared/runs/mine/slurm/%j.out" in text
    assert f"\n{shlex.join(['python', '-m', 'trainer', QUOTED])} ${{SLURM_RESTART_COUNT:+resume=auto}} &\n" in text
    assert "-lt 3 ]" in text


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """commands(name, script) puts a command of Slurm into the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def add(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return add


def test_the_job_is_queued_again_only_when_its_time_was_up(tmp_path: Path, commands):
    commands("scontrol", f"echo $@ >>{tmp_path}/asked; exit 1")
    config = load(["cluster=2ps4w", "launch=slurm"])
    script = tmp_path / "job.sh"

    def ended(code: int, state: str, restarts: str = "0") -> tuple[int, bool]:
        commands("squeue", f"echo {state}")
        script.write_text(job_script.render(config.slurm, config.cluster, ["sh", "-c", f"exit {code}"], tmp_path))
        environment = os.environ | {"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": restarts}
        asked = tmp_path / "asked"
        asked.unlink(missing_ok=True)
        return subprocess.run(["bash", str(script)], env=environment, check=False).returncode, asked.exists()

    assert ended(143, "RUNNING") == (143, True)
    assert ended(143, "COMPLETING") == (143, False)  # cancelled, or preempted
    assert ended(143, "RUNNING", restarts="10") == (143, False)
    assert ended(65, "RUNNING") == (65, False)
    assert ended(0, "RUNNING") == (0, False)


def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(launcher, "POLL_SECS", 0.01)
    config = load(["cluster=2ps4w", "launch=slurm"])
    return launcher.run(
        config.slurm, config.cluster, ["cluster=2ps4w", "launch=slurm", "run=x"], RunDirectory(tmp_path / "run")
    )


def test_a_job_is_followed_to_its_exit_code(tmp_path: Path, commands, capsys, monkeypatch):
    run = tmp_path / "run"
    commands("sbatch", f"echo step 1 >{run}/slurm/17.out; echo '17;cluster'")
    commands(
        "squeue",
        f'case "$*" in *--start*) echo 2026-11-25T14:05:00; exit;; esac; n=$(cat {tmp_path}/n 2>/dev/null || echo 0); '
        f"echo $((n+1)) >{tmp_path}/n; case $n in 0) echo 'PENDING Resources';; 1) echo 'RUNNING None';; *) ;; esac",
    )
    commands("scontrol", "echo 'JobId=17 JobState=FAILED ExitCode=65:0'")
    assert submitted(tmp_path, monkeypatch) == 65
    output = capsys.readouterr().out
    assert "submitted as job 17" in output
    assert "job 17: pending (Resources), starts about 2026-11-25 14:05:00\n" in output
    assert "step 1\n" in output
    script = (run / "slurm/job.sh").read_text()
    assert f" -m trainer cluster=2ps4w launch=slurm run={run} ${{SLURM_RESTART_COUNT:+resume=auto}} &" in script


def test_a_job_that_lives_is_followed_and_not_submitted_again(tmp_path: Path, commands, capsys, monkeypatch):
    folder = tmp_path / "run/slurm"
    folder.mkdir(parents=True)
    (folder / "job").write_text("17\n")
    commands("sbatch", "echo 99")
    commands("squeue", f"test -e {tmp_path}/n || echo 'RUNNING None'; touch {tmp_path}/n")
    commands("scontrol", "echo 'JobId=17 JobState=COMPLETED ExitCode=0:0'")
    assert submitted(tmp_path, monkeypatch) == 0
    assert "following job 17" in capsys.readouterr().out


def test_a_refused_job_is_one_sentence(tmp_path: Path, commands, monkeypatch):
    commands("sbatch", "echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")
    with pytest.raises(launcher.SlurmError, match="sbatch refused: sbatch: error: invalid partition"):
        submitted(tmp_path, monkeypatch)


def test_a_machine_without_slurm_is_one_sentence(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(launcher.SlurmError, match="sbatch not found"):
        submitted(tmp_path, monkeypatch)
