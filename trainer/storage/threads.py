"""Keeps the thread counts of a run's tasks: with a different number, a worker's sums round differently."""

from dataclasses import replace
from pathlib import Path

from trainer.config import yaml_files
from trainer.config.schema import RunConfig
from trainer.plan.addresses import JOBS
from trainer.plan.devices import of_task
from trainer.plan.plan import Plan
from trainer.storage.damage import DAMAGED


def taken_from_earlier(config: RunConfig) -> RunConfig:
    """Returns the config with the thread counts of the run that it continues, where it sets none.

    With a different number of replicas the bits differ anyway; then tasks use what their machines have.
    """
    if (folder := _earlier(config)) is None:
        return config
    try:
        before = yaml_files.load((folder / "config.yaml").read_bytes())
        threads, workers = before["device"]["intra_op_threads"], before["cluster"]["worker"]
        replicas = before["train"].get("replicas")
    except (OSError, *DAMAGED):
        return config
    same_replicas = workers == config.cluster.worker if replicas is None else replicas == config.train.replicas
    if not same_replicas or not isinstance(threads, dict):
        return config
    kept = {
        job: count
        for job, count in threads.items()
        if job in JOBS and isinstance(count, int) and count > 0 and getattr(config.cluster, job)
    }
    return replace(config, device=replace(config.device, intra_op_threads=kept | config.device.intra_op_threads))


def _earlier(config: RunConfig) -> Path | None:
    """Returns the run that a config continues; None if it starts a new one."""
    if config.resume == "never" or (config.resume == "auto" and config.run is None):
        return None
    named = Path(config.run or "" if config.resume == "auto" else config.resume)
    return next((folder for folder in (named, *named.parents[:2]) if (folder / "config.yaml").is_file()), None)


def of_jobs(config: RunConfig, plan: Plan) -> dict[str, int]:
    """Returns `device.intra_op_threads` for a config that sets the threads of every task."""
    given = config.device.intra_op_threads
    left = [task for task in plan.tasks if of_task(given, task.job, task.index) is None]
    return {task.job: task.intra_op_threads for task in left} | given
