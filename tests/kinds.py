"""The kinds of models in the zoo, each with its data and with what a config says of its loss and metrics."""

from __future__ import annotations

import functools
from pathlib import Path

import keras

from trainer.workload import build, frozen, trial
from trainer.workload.compiling import Wanted
from trainer.workload.workload import Workload

ZOO = str(Path(__file__).with_name("zoo.py"))
KINDS = {  # model and data, options of the model, what the config names
    "softmax": ("softmax", "pictures", {}, {}),
    "one-hot labels": ("smoothed", "one_hot", {}, {}),
    "dicts and texts": ("wide_and_deep", "people", {}, {}),
    "two outputs": ("two_outputs", "two_targets", {}, {}),
    "a loss of two": ("one_of_two_losses", "listed_targets", {}, {}),
    "labels of one of two": ("one_labelled_output", "one_hot", {}, {}),
    "labels by name, outputs in a list": ("listed_outputs", "two_targets", {}, {}),
    "a named loss": ("autoencoder", "itself", {}, {"loss": "mse", "metrics": ["mean_absolute_error", "rmse"]}),
    "compute_loss": ("Variational", "unlabelled", {"latent": 3}, {}),
    "a class": (
        "Plain",
        "pictures",
        {"width": 16},
        {"metrics": ["accuracy", {"SparseTopKCategoricalAccuracy": {"k": 1, "name": "top"}}]},
    ),
    "pixels": ("segmentation", "pixels", {}, {}),
    "masks": ("recurrent", "sentences", {}, {}),
    "masked steps": ("tagger", "tagged", {}, {}),
    "frozen weights": ("fine_tuned", "weighted", {}, {}),
    "layers without training": ("with_blocks", "weighted", {}, {}),
    "a call that keeps training": ("Unaware", "weighted", {}, {}),
    "weights": ("small", "weighted", {}, {}),
    "options of a loss": ("small", "weighted", {}, {"loss": "SparseCategoricalCrossentropy"}),
    "binary, of logits": ("binary", "far", {}, {}),
    "names used twice": ("same_names", "pairs", {}, {}),
    "a tensor used three times": ("with_three_way_skip", "far", {}, {}),
}


@functools.cache
def workload(kind: str) -> Workload:
    """The model, the data and the objective of a kind; opened once, because tests change none of them."""
    model_name, data_name, options, named = KINDS[kind]
    data = build.open_data_set(data_name, {}, seed=1, user_file=ZOO)
    model = build.build_model(model_name, options, data, seed=1, user_file=ZOO)
    objective = build.open_objective(model, data, Wanted(**named), user_file=ZOO)
    trial.run(objective, data, has_values=True)
    objective.frozen = frozen.find(objective, data.spec)
    return Workload(model, data, objective, frozen.values_of(model, objective.frozen))


def for_keras(kind: str, one: Workload) -> keras.Model:
    """Another model of the kind, with the same values and compiled in the same way."""
    name, _, options, named = KINDS[kind]
    model = build.build_model(name, options, one.data, seed=1, user_file=ZOO)
    build.open_objective(model, one.data, Wanted(**named), user_file=ZOO)
    model.set_weights(one.model.get_weights())
    return model
