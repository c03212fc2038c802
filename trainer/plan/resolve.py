"""Completes a config from a scheduler's variables, `cluster.hosts` and the model. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from trainer.config.limits import check_limits, check_read
from trainer.config.schema import (
    Launch,
    OptimizerConfig,
    OptimizerName,
    RunConfig,
    ScheduleConfig,
    ScheduleName,
    TrainConfig,
)
from trainer.config.typed import Mode, Target
from trainer.faults.problems import ConfigError, Problem
from trainer.plan import environment, slurm, tf_config
from trainer.plan.description import CompiledOptimizer
from trainer.plan.devices import key_of
from trainer.plan.hosts import each_alone, resolve_hosts


def resolve(
    config: RunConfig, environ: Mapping[str, str], mode: Mode = Mode.train, target: Target = Target.compose
) -> tuple[RunConfig, list[Problem]]:
    """Returns the config with cluster, role, addresses and GPUs, so that it is complete by itself.

    Args:
        environ: variables, in which a scheduler may assign a task to this process.
        target: of trainer render.

    Returns:
        The config, and the problems of these sources, or between them and the command line.
    """
    config, problems = _resolve_role(config, environ, mode)
    cluster = config.cluster
    if config.launch.name is Launch.slurm and config.job is None and not cluster.hosts:
        cluster = replace(cluster, hosts=slurm.hosts(environ))
    if mode is Mode.render and target is not Target.compose and not cluster.addresses:
        cluster = replace(cluster, addresses=each_alone(cluster))
    config, of_hosts = resolve_hosts(replace(config, cluster=cluster), mode)
    return config, [*problems, *of_hosts]


def _resolve_role(config: RunConfig, environ: Mapping[str, str], mode: Mode) -> tuple[RunConfig, list[Problem]]:
    """Takes the task of this process from a scheduler's variables."""
    gpus: Sequence[int] = ()
    try:
        if text := environ.get("TF_CONFIG"):
            cluster, job, task, gpus = tf_config.role_of(config.cluster, text)
            config = replace(config, cluster=cluster, job=job, task=task)
        elif mode is Mode.train and config.job is None and slurm.is_step(environ):
            cluster, job, task, gpus = slurm.role_of(config.cluster, environ)
            # Every task must know the run directory, and a requeued job continues there.
            run = config.run or f"runs/{config.name}-{cluster.name}-slurm-{environ['SLURM_JOB_ID']}"
            config = replace(config, cluster=cluster, job=job, task=task, run=run)
    except ConfigError as error:
        return config, list(error.problems)
    gpus = gpus or range(len(environment.allotted_gpus(environ)))
    if config.job == "worker" and gpus and key_of(config.device.gpus, config.job, config.task or 0) is None:
        given = config.device.gpus | {f"worker:{config.task or 0}": list(gpus)}
        config = replace(config, device=replace(config.device, gpus=given))
    return config, []


def resolve_optimizer(
    section: OptimizerConfig, given: Sequence[str], compiled: CompiledOptimizer | None
) -> tuple[OptimizerConfig, list[Problem]]:
    """Returns the optimizer that the model was compiled with, except for keys that the config sets.

    Returns:
        The section, and the problems of the combination.
    """
    if compiled is not None and is_taken(given, compiled):
        if left_out := [*_check_left_out(given, compiled)]:
            return section, left_out
        settings = {"name": OptimizerName(compiled.name), **compiled.settings}
        if schedule := settings.get("schedule"):
            settings["schedule"] = ScheduleConfig(**{**schedule, "name": ScheduleName(schedule["name"])})
        section = replace(section, **{key: value for key, value in settings.items() if key not in given})
    return section, [*check_limits(section, "optimizer."), *check_optimizer(section)]


def resolve_steps(train: TrainConfig, examples: int, *, updates_of_batch: int = 1) -> tuple[TrainConfig, list[Problem]]:
    """Converts `train.epochs` to steps; the last step may reach into the next epoch.

    Args:
        examples: to train on; 0 if unknown.
        updates_of_batch: updates that each batch makes.

    Returns:
        The section, and the problem if the epochs cannot be converted.
    """
    if train.epochs is None:
        return train, []
    if not examples:
        message = "the training data is a stream, so the number of examples in an epoch is unknown"
        remedy = "type train.steps=N instead; N = epochs x examples / train.batch_size"
        return train, [Problem("train.epochs", "conflict", message, remedy)]
    return replace(train, steps=-(-train.epochs * examples * updates_of_batch // train.batch_size)), []


def _check_left_out(given: Sequence[str], compiled: CompiledOptimizer) -> Iterator[Problem]:
    """Refuses settings of compile() that would be ignored, unless the config replaces them."""
    for left_out in compiled.left_out:
        if left_out.key not in given:
            message = f"compile() was given {left_out.text}, which cannot be reproduced here"
            yield Problem(f"optimizer.{left_out.key}", "not-supported", message, left_out.remedy)


def check_optimizer(section: OptimizerConfig) -> Iterator[Problem]:
    """Checks that the optimizer and its schedule use the keys that are set, and that these fit its rate."""
    yield from check_read(section, "optimizer.")
    yield from check_read(section.schedule, "optimizer.schedule.")
    least = section.plateau.min_rate
    if section.plateau.patience is not None and least >= section.learning_rate:
        message = f"{least} is not below optimizer.learning_rate={section.learning_rate}"
        remedy = f"type optimizer.plateau.min_rate={section.learning_rate / 100:g}"
        yield Problem("optimizer.plateau.min_rate", "out-of-range", message, remedy)


def is_taken(given: Sequence[str], compiled: CompiledOptimizer | None) -> bool:
    """Whether the model is trained by its own optimizer, because the config does not choose one."""
    return compiled is not None and "name" not in given
