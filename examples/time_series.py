"""A forecast: the next 24 hours of a power grid's load, from the last week.

    python -m trainer examples/time_series.yaml      half a minute on 2 cores; eval_mae 0.36

The load is made here, and of no real grid: daily and weekly cycles, a temperature that drifts from day to day, and
noise. Its unit is the load's standard deviation. To repeat the last week has an error of 0.49, the last day 0.44.
"""

import keras
import numpy as np
from keras import layers

DAY, WEEK = 24, 7 * 24  # hours


def load(*, years=4):
    """Windows of a week and the day that follows; the last year is evaluated on."""
    series = _series(years * 52 * WEEK)
    split = (years - 1) * 52 * WEEK
    return {"train": _windows(series[:split], every=6), "evaluate": _windows(series[split:], every=DAY)}


def _series(hours):
    random, hour = np.random.default_rng(1994), np.arange(hours)
    day = 2 * np.pi * hour / DAY
    is_weekend = hour // DAY % 7 >= 5
    cycle = (1.0 - 0.5 * is_weekend) * (np.sin(day - 2.1) + 0.4 * np.sin(2 * day - 1.0)) - 0.8 * is_weekend
    temperature = np.zeros(hours // DAY)
    for i in range(1, len(temperature)):
        temperature[i] = 0.85 * temperature[i - 1] + random.normal(0, 0.25)
    series = cycle + np.interp(hour, np.arange(len(temperature)) * DAY, temperature) + random.normal(0, 0.15, hours)
    return ((series - series.mean()) / series.std()).astype("float32")[:, None]


def _windows(series, *, every):
    begins = range(0, len(series) - WEEK - DAY + 1, every)
    x = np.stack([series[i : i + WEEK] for i in begins])
    y = np.stack([series[i + WEEK : i + WEEK + DAY, 0] for i in begins])
    return x, y


def forecaster(spec, *, width=32):
    """Causal convolutions that see 1, 2, 4, ... hours back; the answer is what is added to the day one week before."""
    inputs = keras.Input(spec.features.shape)
    x = inputs
    for level in range(7):
        x = layers.Conv1D(width, 2, padding="causal", dilation_rate=2**level, activation="relu")(x)
    change = layers.Dense(DAY, name="change")(x[:, -1])
    model = keras.Model(inputs, inputs[:, :DAY, 0] + change)
    model.compile(loss="mae", metrics=["mae"])
    return model
