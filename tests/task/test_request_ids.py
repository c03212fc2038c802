"""TensorFlow's servers refuse no request of a task for an id that repeats by chance."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import tensorflow as tf

from trainer.task import request_ids

USER_FILE = """
import ctypes
import os
from pathlib import Path

import keras
import tensorflow as tf
from trainer.task.request_ids import OF_PROCESS, slot_and_target


def tiny(input_shape, classes):
    library = ctypes.CDLL(str(Path(tf.sysconfig.get_lib()) / "libtensorflow_framework.so.2"))
    draw = getattr(library, OF_PROCESS)
    draw.restype = ctypes.c_uint64
    slot, target = slot_and_target()
    Path(os.environ["DRAWN"], str(os.getpid())).write_text(f"{draw()} {slot.value == target}")
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])
"""


def test_ids_come_from_the_generator_of_the_process():
    assert request_ids.make_unique()
    slot, target = request_ids.slot_and_target()
    assert slot.value == target


def test_where_there_is_no_such_slot_nothing_changes(monkeypatch, caplog):
    monkeypatch.setattr(request_ids, "_are_unique", False)
    monkeypatch.setattr(request_ids, "OF_THREAD", "_ZN3tsl6random7NothingEv")
    assert not request_ids.make_unique()
    assert "are not unique" in caplog.text


@pytest.mark.cluster
def test_every_task_has_unique_ids_and_a_generator_of_its_own(start, tmp_path: Path):
    (tmp_path / "mine.py").write_text(USER_FILE)
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    run = start("cluster=1ps2w", "user=mine.py", "model=tiny", "train.steps=3", environment={"DRAWN": str(drawn)})
    assert run.wait() == 0, run.output
    numbers, unique = zip(*(file.read_text().split() for file in drawn.iterdir()), strict=True)
    assert len(numbers) >= 2
    assert len(set(numbers)) == len(numbers)
    assert set(unique) == {"True"}


def test_each_run_of_a_session_takes_its_id_from_there():
    """With a function in its place that draws the same number again, the second run is refused as a repetition."""
    assert request_ids.make_unique()
    slot, target = request_ids.slot_and_target()
    draws = ctypes.CFUNCTYPE(ctypes.c_uint64)(lambda: 7)
    server = tf.distribute.Server({"worker": ["localhost:0"]}, job_name="worker", task_index=0)
    with tf.Graph().as_default():
        nothing = tf.no_op()
        with tf.compat.v1.Session(server.target) as session:
            session.run(nothing)
            slot.value = ctypes.cast(draws, ctypes.c_void_p).value
            try:
                session.run(nothing)
                with pytest.raises(tf.errors.AbortedError, match="received twice"):
                    session.run(nothing)
            finally:
                slot.value = target
            session.run(nothing)
