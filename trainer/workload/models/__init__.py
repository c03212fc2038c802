"""The built-in models; each is a plain function from shapes and options to a Keras model that returns logits."""

from collections.abc import Callable
from typing import Any

from trainer.workload.models.cnn import cnn
from trainer.workload.models.ctr import ctr
from trainer.workload.models.mlp import mlp
from trainer.workload.models.oracle import oracle
from trainer.workload.models.resnet20 import resnet20

MODELS: dict[str, Callable[..., Any]] = {"cnn": cnn, "ctr": ctr, "mlp": mlp, "oracle": oracle, "resnet20": resnet20}

__all__ = ["MODELS", "cnn", "ctr", "mlp", "oracle", "resnet20"]
