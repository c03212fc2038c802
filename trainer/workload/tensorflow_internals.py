"""The private parts of TensorFlow that the trainer needs, each with the reason."""

from tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2 import CoordinatedJob
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.data.ops.dataset_ops import _VariantDataset as VariantDataset
from tensorflow.python.eager import context
from tensorflow.python.eager.context import eager_mode
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.framework.override_binary_operator import maybe_promote_tensors
from tensorflow.python.ops import gen_math_ops, gen_random_ops
from tensorflow.python.ops.script_ops import _py_funcs as python_functions
from tensorflow.python.training.device_setter import STANDARD_PS_OPS

__all__ = [
    "STANDARD_PS_OPS",  # the operations that a device setter places on parameter servers
    "CoordinatedJob",  # the tasks that a server of collectives waits for
    "FuncGraph",  # whose `capture` must make constants of eager tensors
    "RewriterConfig",  # sessions say which of Grappler's passes may run
    "VariantDataset",  # a rewritten pipeline is made into a dataset again
    "context",  # of eager mode, which servers of collectives share
    "eager_mode",  # numpy values are read while a graph is built
    "gen_math_ops",  # whose `add_n` adds in no order that is written down
    "gen_random_ops",  # whose draws get their own seeds while a step is traced
    "is_op_determinism_enabled",  # instruments leave out what it forbids
    "maybe_promote_tensors",  # as operators of tensors do before they compare
    "python_functions",  # those that a pipeline calls, by their tokens
]
