"""A^n + B^n on one device and on two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trainer.commands import matpow
from trainer.commands.matpow import Device, Form
from trainer.config.schema import MatpowConfig
from trainer.faults import exit_codes
from trainer.faults.problems import ConfigError

CPU0, CPU1 = Device("cpu", 0), Device("cpu", 1)
FORMS = [Form("one device", CPU0, CPU0), Form("two devices", CPU0, CPU1)]
SMALL = MatpowConfig(power=4, size=8)


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("/cpu:0", CPU0),
        ("/CPU:1", CPU1),
        ("/gpu:3", Device("gpu", 3)),
        ("/device:GPU:3", Device("gpu", 3)),
        ("/job:localhost/replica:0/task:0/device:CPU:1", CPU1),
    ],
)
def test_a_device_is_read_in_tensorflows_forms(text, device):
    assert Device.parse(text) == device


@pytest.mark.parametrize("text", ["", "cpu", "/cpu", "/cpu:", "/cpu:-1", "/tpu:0", "/cpu:0 ", "/cpu:٣"])
def test_what_is_no_device_is_refused_with_the_form(text):
    with pytest.raises(ValueError, match="is not a device; a device is /cpu:N or /gpu:N"):
        Device.parse(text)


@pytest.mark.parametrize("names", [[], ["/cpu:0"], ["/cpu:0", "/CPU:0"], ["/cpu:0", "/cpu:1", "/cpu:2"]])
def test_other_than_two_devices_are_refused(names):
    with pytest.raises(ConfigError, match=r"are not two devices[^\n]+\n    e\.g\. matpow\.devices=\[/cpu:0,/cpu:1\]"):
        matpow.choose(names)


def test_a_device_that_is_not_here_is_refused_with_what_there_is():
    message = r"/cpu:9 is not here; this machine has /cpu:0 to /cpu:1\n    e.g. matpow.devices=\[/cpu:0,/cpu:1\]"
    with pytest.raises(ConfigError, match=message):
        matpow.check_there([CPU0, Device("cpu", 9)], cpus=2, gpus=None)
    with pytest.raises(ConfigError, match=r"/gpu:0 is not here; this machine has /cpu:0 to /cpu:3, and no GPU"):
        matpow.check_there([CPU0, Device("gpu", 0)], cpus=4, gpus=0)
    with pytest.raises(
        ConfigError, match=r"has /cpu:0 to /cpu:3 and /gpu:0\n    e.g. matpow.devices=\[/cpu:0,/gpu:0\]"
    ):
        matpow.check_there([Device("gpu", 0), Device("gpu", 1)], cpus=4, gpus=1)
    matpow.check_there([CPU0, Device("gpu", 1)], cpus=4, gpus=2)


def test_a_single_core_still_shows_placement():
    assert [matpow.cpus_of(cores) for cores in (1, 2, 8)] == [2, 2, 8]


def test_each_product_runs_where_its_form_puts_it():
    measured, difference = matpow.measure(FORMS, SMALL, seed=1, sees_gpus=False)
    assert [did.ran_on for did in measured] == [
        {"A": {"/cpu:0": 3}, "B": {"/cpu:0": 3}},
        {"A": {"/cpu:0": 3}, "B": {"/cpu:1": 3}},
    ]
    assert [did.sum_on for did in measured] == ["/cpu:0", "/cpu:0"]
    assert all(matpow.ran_as_asked(form, did, 3) for form, did in zip(FORMS, measured, strict=True))
    assert not matpow.ran_as_asked(FORMS[1], measured[0], 3)
    assert difference == 0
    assert all(did.seconds > 0 for did in measured)


@pytest.mark.parametrize("power", [1, 2, 5])
def test_the_sum_is_that_of_numpy(power):
    session = matpow._Session(FORMS[1], MatpowConfig(power=power, size=6), seed=3, sees_gpus=False)
    total = session.warm_up()
    a, b = (session._session.run(f"{name}/first:0") for name in ("A", "B"))
    expected = np.linalg.matrix_power(a.astype(float), power) + np.linalg.matrix_power(b.astype(float), power)
    np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-5)
    assert abs(a.std() * 6**0.5 - 1) < 0.5  # scaled, so that powers keep their size
    assert not np.array_equal(a, b)


def test_another_seed_draws_other_matrices():
    def total(seed: int) -> np.ndarray:
        return matpow._Session(FORMS[0], SMALL, seed=seed, sees_gpus=False).warm_up()

    assert np.array_equal(total(1), total(1))
    assert not np.array_equal(total(1), total(2))


def test_the_table_says_where_everything_ran(capsys):
    assert matpow.run(SMALL, seed=0) == exit_codes.OK
    out = capsys.readouterr().out
    assert out.startswith("A^4 + B^4, 8 x 8, float32, median of 5 runs")
    rows = [re.sub(r"\s+", " ", line) for line in out.splitlines() if line.startswith("│")]
    assert rows[0].startswith("│ one device │ 3 on /cpu:0 │ 3 on /cpu:0 │ /cpu:0 │ 0.")
    assert rows[1].startswith("│ two devices │ 3 on /cpu:0 │ 3 on /cpu:1 │ /cpu:0 │ 0.")
    assert "the sums are equal bit for bit" in out


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("overrides", "code", "said"),
    [
        (["experiment=matpow", "matpow.size=16"], 0, "the sums are equal bit for bit"),
        (["mode=matpow", "matpow.devices=[/cpu:0,/gpu:0]"], 2, "no GPU that TensorFlow sees"),
    ],
    ids=["experiment", "no such device"],
)
def test_the_command_answers_without_noise(overrides, code, said, tmp_path: Path):
    ended = subprocess.run(
        [sys.executable, "-m", "trainer", *overrides],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert said in (ended.stderr if code else ended.stdout)
    assert "oneDNN" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_module_imports_no_tensorflow():
    modules = "trainer.commands.matpow, trainer.commands.doctor.probe"
    code = f"import sys, {modules}; assert not {{'tensorflow', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
