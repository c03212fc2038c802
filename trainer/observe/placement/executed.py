"""Reads which operations a `Session.run` executed, and where. Pure: reads protocol buffers, imports no TensorFlow.

With `RunOptions(output_partition_graphs=True)` TensorFlow returns the graphs that it executed, in other tasks too: one
per device, after placement, inlining, lowering of loops and optimization. For a function that is called eagerly it
returns them once, when the function first runs.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

COMPILED = "compiled"

# Ops that move a tensor between two partitions, or between a partition and the client.
TRANSFERS = frozenset({"_Send", "_Recv", "_HostSend", "_HostRecv", "_Arg", "_Retval"})
# Ops that pass a tensor on or read only its shape; TensorFlow may keep them on the host, or add some.
QUIET = re.compile(
    "Const|_HostConst|IdentityN?|StopGradient|NoOp|ControlTrigger|Placeholder|PlaceholderWithDefault|Bitcast|"
    "Enter|Exit|Switch|Merge|NextIteration|LoopCond|ShapeN?|Size|Rank|VarHandleOp|ReadVariableOp"
)
# Of tensorflow/core/framework/types.proto: float, double, complex64, bfloat16, complex128, half and two of 8 bits.
FLOATS = frozenset({1, 2, 8, 14, 18, 19, 24, 25})
XLA_OPS = frozenset({"XlaLaunch", "XlaLaunchV2", "_XlaRun"})

Functions = Mapping[str, Any]  # FunctionDef by name


class Operation(NamedTuple):
    """One operation that ran."""

    name: str  # with the names of its callers: "replica0/PartitionedCall/model/dense_1/MatMul"
    type: str  # "MatMul", on a CPU often "_MklMatMul"; COMPILED: a whole function as one operation of XLA
    device: str  # "/job:ps/task:0/cpu:0"; "/cpu:0" of a session without a cluster
    computes: bool = False  # with floating-point numbers; bookkeeping may run elsewhere without harm
    holds: int = 0  # operations that were compiled into it, if known


class Transfer(NamedTuple):
    """Tensors that one device sent to another."""

    source: str
    target: str
    tensors: tuple[str, ...]  # names of the operations that made them


class Executed(NamedTuple):
    """All operations and transfers of one `Session.run`, sorted."""

    operations: tuple[Operation, ...]
    transfers: tuple[Transfer, ...]


def executed(metadata: Any, library: Any | None = None) -> Executed:
    """Reads the RunMetadata of one `Session.run`.

    Args:
        library: `graph.as_graph_def().library`. A session without a cluster returns no functions with its graphs, so
            what runs in a function that was not inlined is found only there.

    Raises:
        ValueError: if the session was not asked for its graphs.
    """
    if not metadata.partition_graphs:
        raise ValueError(
            "the metadata holds no graph; run the session with options=RunOptions(output_partition_graphs=True)"
        )
    libraries = [*([] if library is None else [library]), *(graph.library for graph in metadata.partition_graphs)]
    functions = {f.signature.name: f for one in libraries for f in one.function}
    nodes = [node for graph in metadata.partition_graphs for node in graph.node]
    return Executed(tuple(sorted(set(_operations(nodes, functions, "", "")))), tuple(_transfers(nodes)))


def short(device: str, inside: str = "") -> str:
    """Abbreviates a device: "/job:ps/replica:0/task:0/device:CPU:1" -> "/job:ps/task:0/cpu:1".

    `inside` is a device that says what `device` leaves open.
    """
    parts = _parts(inside) | _parts(device)
    task = f"/job:{parts['job']}/task:{parts.get('task', '0')}" if parts.get("job", "localhost") != "localhost" else ""
    return task + parts.get("device", "")


def _parts(device: str) -> dict[str, str]:
    parts = {}
    for part in filter(None, device.split("/")):
        key, _, value = part.removeprefix("device:").partition(":")
        if key in ("job", "task"):
            parts[key] = value
        elif key != "replica":
            parts["device"] = f"/{key.lower()}:{value or 0}"
    return parts


def _operations(nodes: Iterable[Any], functions: Functions, caller: str, inside: str) -> Iterator[Operation]:
    for node in nodes:
        if node.op in TRANSFERS:
            continue
        name, device = caller + node.name, short(node.device, inside)
        if _is_compiled(node):
            number = sum(_size(functions, function) for _, function in _called(node))
            yield Operation(name, COMPILED, device, computes=True, holds=number)
            continue
        yield Operation(name, node.op, device, computes=_computes(node))
        for attribute, function in _called(node):
            if function in functions:
                # Named as TensorFlow names what it inlines: a call's operations below it, a loop's below its "body".
                below = f"{name}/" if attribute == "f" else f"{name}/{attribute}/"
                others = {f: body for f, body in functions.items() if f != function}  # a function may call itself
                yield from _operations(functions[function].node_def, others, below, device)


def _called(node: Any) -> list[tuple[str, str]]:
    """Yields (attribute, function) of the functions that a node runs; input pipelines run elsewhere, earlier."""
    if "Dataset" in node.op or "Iterator" in node.op:
        return []
    called = [(key, f) for key in sorted(node.attr) for f in (node.attr[key].func, *node.attr[key].list.func)]
    return [(key, f.name) for key, f in called if f.name]


def _size(functions: Functions, function: str) -> int:
    """Counts the operations of a function, including functions that it calls."""
    if function not in functions:
        return 0
    others = {f: body for f, body in functions.items() if f != function}
    body = functions[function].node_def
    return len(body) + sum(_size(others, called) for node in body for _, called in _called(node))


def _is_compiled(node: Any) -> bool:
    return node.op in XLA_OPS or ("_XlaMustCompile" in node.attr and node.attr["_XlaMustCompile"].b)


def _computes(node: Any) -> bool:
    # Only `dtype` if it exists: "T" of a random op is its shape's type. `in`, because reading an attribute adds it.
    keys = ("dtype",) if "dtype" in node.attr else ("T", "SrcT", "DstT")
    types = [node.attr[key].type for key in keys if key in node.attr]
    return not QUIET.fullmatch(node.op) and bool(types) and FLOATS.issuperset(types)


def _transfers(nodes: Iterable[Any]) -> Iterator[Transfer]:
    """Yields the transfers, by link; a fetch or feed of the client has the same device at both ends."""
    links: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        if node.op in ("_Recv", "_HostRecv"):
            source, target = (short(node.attr[f"{end}_device"].s.decode()) for end in ("send", "recv"))
            if source != target:
                name = re.sub(r"^edge_\d+_", "", node.attr["tensor_name"].s.decode())
                links.setdefault((source, target), []).append(name)
    for (source, target), tensors in sorted(links.items()):
        yield Transfer(source, target, tuple(sorted(tensors)))
