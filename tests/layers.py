"""Draws the folders of trainer/ by floors, from their imports, and counts the floors and the arrows between folders.

`python tests/layers.py [CHECKOUT]`; a floor is the longest path of imports below a folder, and folders that import each
other share one. A module directly in trainer/ counts as a folder of its own.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

Graph = Mapping[str, set[str]]

FLOORS = {  # of the folders of trainer/; one imports lower floors only
    "faults": 1,
    "config": 2,
    "plan": 3,
    "storage": 4,
    "workload": 4,
    "observe": 5,
    "engine": 6,
    "task": 7,
    "launch": 8,
    "commands": 9,
    "__main__": 10,
}


def module_paths(checkout: Path) -> dict[str, Path]:
    """Every module of trainer/ by its full name; a package has the name of its folder."""
    paths = {}
    for path in sorted((checkout / "trainer").rglob("*.py")):
        parts = path.relative_to(checkout).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imported(source: str) -> Iterator[tuple[str, str]]:
    """Every import of a module, also inside functions and for types only: (module, name from it, or nothing)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not followed"
            yield from ((node.module or "", alias.name) for alias in node.names)


def module_graph(checkout: Path) -> dict[str, set[str]]:
    """The modules of trainer/ that each of them imports."""
    paths = module_paths(checkout)
    graph: dict[str, set[str]] = {module: set() for module in paths}
    for module, path in paths.items():
        for target, name in imported(path.read_text()):
            target = f"{target}.{name}" if f"{target}.{name}" in paths else target
            if target in paths and target != module:
                graph[module].add(target)
    return graph


def folder_graph(modules: Graph, package: str = "trainer") -> dict[str, set[str]]:
    """The same between the direct children of a package: its files, its folders, and its own `__init__`."""

    def child(module: str) -> str:
        return module.removeprefix(package).removeprefix(".").split(".")[0] or "__init__"

    inside = {module for module in modules if module == package or module.startswith(f"{package}.")}
    graph: dict[str, set[str]] = {child(module): set() for module in inside}
    for module in inside:
        graph[child(module)] |= {child(target) for target in modules[module] & inside} - {child(module)}
    return graph


def components(graph: Graph) -> list[set[str]]:
    """The strongly connected sets of nodes, each after all that it reaches (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    result: list[set[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in order:
                visit(target)
            if target in stack:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == order[node]:
            start = stack.index(node)
            result.append(set(stack[start:]))
            del stack[start:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return result


def cycles(graph: Graph) -> list[list[str]]:
    """The sets of nodes that reach each other."""
    return [sorted(nodes) for nodes in components(graph) if len(nodes) > 1]


def floors(graph: Graph) -> dict[str, int]:
    """For each node the longest path below it, counted from 1; nodes that reach each other share a floor."""
    result: dict[str, int] = {}
    for nodes in components(graph):
        below = {target for node in nodes for target in graph[node]} - nodes
        result |= dict.fromkeys(nodes, 1 + max((result[target] for target in below), default=0))
    return result


def arrows_up(graph: Graph, by_floor: Mapping[str, int]) -> list[tuple[str, str]]:
    """The imports that do not lead to a lower floor."""
    pairs = ((node, target) for node in sorted(graph) for target in sorted(graph[node]))
    return [(node, target) for node, target in pairs if by_floor[target] >= by_floor[node]]


def draw(graph: Graph, by_floor: Mapping[str, int]) -> Iterable[str]:
    """One line for each folder, the highest floor first."""
    for node in sorted(graph, key=lambda node: (-by_floor[node], node)):
        yield f"{by_floor[node]:2}  {node:<20} {' '.join(sorted(graph[node], key=by_floor.__getitem__))}".rstrip()


def main(checkout: Path) -> None:
    graph = folder_graph(module_graph(checkout))
    graph = {node: targets - {"__init__"} for node, targets in graph.items() if node != "__init__"}
    by_floor = FLOORS if set(graph) == set(FLOORS) else floors(graph)
    print(*draw(graph, by_floor), sep="\n")
    up = arrows_up(graph, by_floor)
    arrows = sum(map(len, graph.values()))
    print(f"{max(by_floor.values())} floors, {arrows} arrows between {len(graph)} folders, {len(up)} that run up")
    print(*(f"  {node} -> {target}" for node, target in up), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
