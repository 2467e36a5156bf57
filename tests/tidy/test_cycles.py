"""No circles of imports: between Python files, between C++ headers, or between the rooms of the native core.

An import counts wherever it stands in a file: in a function it hides a circle from Python, and under TYPE_CHECKING from
the reader alone, who cannot understand either file before the other.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator, Mapping

import pytest

import kvxfer

PACKAGE = pathlib.Path(kvxfer.__file__).parent
NATIVE = pathlib.Path(__file__).resolve().parents[2] / "kvxfer" / "_native"
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)

NATIVE_FLOORS = {"machines": 0, "memory": 1, "lanes": 2, "io": 3, "scan": 0, "bindings": 4, "fuzz": 4}
"""Rooms of the native core. ``bindings`` are the files beside the rooms."""

Graph = Mapping[str, set[str]]


def circles(graph: Graph) -> list[set[str]]:
    """The strongly connected parts of more than one node (Tarjan's algorithm, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []
    for root in graph:
        work: list[tuple[str, Iterator[str]]] = [(root, iter(sorted(graph[root])))] if root not in index else []
        while work:
            node, others = work[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
            for other in others:
                if other not in index:
                    work.append((other, iter(sorted(graph[other]))))
                    break
                if other in stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    part = set(stack[stack.index(node) :])
                    del stack[stack.index(node) :]
                    if len(part) > 1:
                        found.append(part)
    return found


def new_circles(graph: Graph) -> list[str]:
    return [" <-> ".join(sorted(part)) for part in circles(graph)]


def python_graph(package: pathlib.Path) -> dict[str, set[str]]:
    """Which modules of ``package`` each of them imports."""
    modules = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    graph = {}
    for name, path in modules.items():
        imported: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= {one if one in modules else str(node.module) for one in whole}
        graph[name] = (imported & modules.keys()) - {name}
    return graph


def native_files() -> list[pathlib.Path]:
    return [path for suffix in ("cpp", "hpp") for path in sorted(NATIVE.rglob(f"*.{suffix}"))]


def included(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The files of the native core that ``path`` includes, by their names beside it or below the core."""
    for name in INCLUDE.findall(path.read_text()):
        for found in (path.parent / name, NATIVE / name):
            if found.exists():
                yield found
                break
        else:
            raise AssertionError(f"{path.relative_to(NATIVE)} includes {name}, which is not there")


def room_of(path: pathlib.Path) -> str:
    parts = path.relative_to(NATIVE).parts
    return parts[0] if len(parts) > 1 else "bindings"


def test_python_files_import_each_other_in_no_circle() -> None:
    wrong = new_circles(python_graph(PACKAGE))
    assert not wrong, "\n".join(wrong)


@pytest.mark.checkout
def test_native_headers_include_each_other_in_no_circle() -> None:
    graph = {str(path.relative_to(NATIVE)): set[str]() for path in native_files()}
    for path in native_files():
        graph[str(path.relative_to(NATIVE))] = {str(found.relative_to(NATIVE)) for found in included(path)}
    wrong = new_circles(graph)
    assert not wrong, "\n".join(wrong)


@pytest.mark.checkout
def test_native_rooms_include_each_other_in_no_circle() -> None:
    graph: dict[str, set[str]] = {room_of(path): set() for path in native_files()}
    for path in native_files():
        graph[room_of(path)] |= {room_of(found) for found in included(path)} - {room_of(path)}
    wrong = new_circles(graph)
    assert not wrong, "\n".join(wrong)


@pytest.mark.checkout
def test_native_rooms_include_lower_rooms_only() -> None:
    wrong = []
    for path in native_files():
        room = room_of(path)
        for other in {room_of(found) for found in included(path)} - {room}:
            if NATIVE_FLOORS[other] >= NATIVE_FLOORS[room]:
                wrong.append(f"{path.relative_to(NATIVE)} ({room}) includes {other}")
    assert not wrong, "\n".join(wrong)


def test_circles_of_a_graph_with_two_circles_are_both_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert sorted(map(sorted, circles(graph))) == [["a", "b", "c"], ["d", "e"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_python_graph_counts_imports_in_functions_and_for_types(tmp_path: pathlib.Path) -> None:
    package = tmp_path / "p"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("def later() -> None:\n    from p import two\n")
    (package / "two.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.one import later\n"
    )
    assert circles(python_graph(package)) == [{"p.one", "p.two"}]
