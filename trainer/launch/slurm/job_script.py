"""Renders the script of a job, which runs the same command as the launcher in the allocation. Pure."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.config import shell
from trainer.config.schema import ClusterConfig, SlurmConfig
from trainer.plan.devices import tasks_of

STOP_EARLY_SECS = 120  # before the time limit, so that the run can save; Slurm may be early by up to a minute
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

# A requeued job resumes from its newest checkpoint, whatever resume= its command has.
# The launcher saves at SIGTERM and ends with 143. If the job still runs then, its time was up, and it is queued again;
# a job that was cancelled, or preempted, is not in that state any more.
BODY = """\
trap 'kill -TERM $launcher' TERM
{command} ${{SLURM_RESTART_COUNT:+resume=auto}} &
launcher=$!
wait $launcher; code=$?
while kill -0 $launcher 2>/dev/null; do wait $launcher; code=$?; done
state=$(squeue -h -j $SLURM_JOB_ID -o %T)
if [ $code = 143 ] && [ "$state" = RUNNING ] && [ ${{SLURM_RESTART_COUNT:-0}} -lt {requeue} ]; then
  scontrol requeue $SLURM_JOB_ID && sleep 60
fi
exit $code
"""


def render(job: SlurmConfig, cluster: ClusterConfig, command: Sequence[str], run: Path) -> str:
    """Returns the text of the script.

    Args:
        command: of the launcher in the job.
        run: the run directory, which all nodes share.
    """
    options = "".join(f"#SBATCH {shell.joined([option])}\n" for option in _options(job, cluster, run))
    return f"#!/bin/bash\n{options}{BODY.format(command=shell.joined(command), requeue=job.requeue)}"


def _options(job: SlurmConfig, cluster: ClusterConfig, run: Path) -> Iterator[str]:
    yield f"--job-name={run.name}"
    yield f"--ntasks={len(tasks_of(cluster))}"
    if job.nodes is not None:
        yield f"--nodes={job.nodes}"
    if job.cpus_per_task is not None:
        yield f"--cpus-per-task={job.cpus_per_task}"
    if job.gpus_per_worker and job.nodes:
        yield f"--gpus-per-node={-(-cluster.worker // job.nodes) * job.gpus_per_worker}"
    elif job.gpus_per_worker:
        yield f"--gpus={cluster.worker * job.gpus_per_worker}"
    if job.time is not None:
        yield f"--time={limit(job.time)}"
    yield "--requeue"
    yield "--open-mode=append"
    yield f"--signal=B:TERM@{STOP_EARLY_SECS}"
    yield f"--output={run}/slurm/%j.out"
    yield from shlex.split(job.args)


def limit(text: str) -> str:
    """Returns a time limit for sbatch: 90m -> 01:30:00; other forms are returned unchanged."""
    parts = re.fullmatch(r"(\d+)([smhd])", text.strip())
    if parts is None:
        return text
    minutes, seconds = divmod(int(parts[1]) * UNITS[parts[2]], 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"
