"""Writes the trials of a sweep for the HPARAMS page of TensorBoard, where the package tensorboard is installed."""

import shutil
import time

from trainer.commands.sweep.trials import Sweep
from trainer.config.keys import shown

FOLDER = "hparams"


def write(sweep: Sweep) -> None:
    """Writes hparams/NNNN of the sweep anew.

    Raises:
        ImportError: if tensorboard is not installed.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    shutil.rmtree(sweep.path / FOLDER, ignore_errors=True)
    for trial in sweep.trials:
        values = {key: one if isinstance(one, int | float) else shown(one) for key, one in trial.values.items()}
        scores = [Summary.Value(tag=sweep.settings.metric, simple_value=trial.score)] if trial.scores else []
        writer = EventFileWriter(str(sweep.path / FOLDER / trial.name))
        for step, summary in ((0, hparams_pb(values, trial_id=trial.name)), (trial.steps, Summary(value=scores))):
            writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        writer.close()
