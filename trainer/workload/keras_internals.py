"""The private parts of Keras that the trainer needs, each with the reason; only this module imports keras.src."""

from keras.src.backend import get_keras_mask, random_seed_dtype, set_keras_mask
from keras.src.backend.common import global_state
from keras.src.layers.layer import CallContext
from keras.src.layers.preprocessing.index_lookup import IndexLookup
from keras.src.losses import loss as losses
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.random import seed_generator
from keras.src.saving import saving_lib
from keras.src.trainers.trainer import Trainer
from keras.src.utils.naming import to_snake_case

__all__ = [
    "CallContext",  # a step sets `training` for layers without the argument
    "IndexLookup",  # the base class of lookups, whose `adapt` is recorded
    "Trainer",  # whose `compile` is asked whether it names an optimizer
    "get_keras_mask",  # masks are carried over to labels that are converted
    "global_state",  # the call context and the names in use, which one model must not leave to the next
    "losses",  # whose `reduce_weighted_values` tells the count that a loss is divided by
    "random_seed_dtype",  # of a seed generator's state
    "saving_lib",  # reads .weights.h5 files without a model
    "seed_generator",  # whose generator of those who have none is replaced while a step is traced
    "set_keras_mask",  # the same
    "squeeze_or_expand_to_same_rank",  # what a loss does to its labels
    "to_snake_case",  # the names that Keras gives by default
]
