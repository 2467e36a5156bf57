"""The house's floors (docs/ARCHITECTURE.md): a module imports only its own part and strictly lower floors."""

from __future__ import annotations

import ast
import pathlib
import sys
from collections.abc import Iterator

import pytest

import kvxfer

PACKAGE = pathlib.Path(kvxfer.__file__).parent

FLOORS = {
    "errors": 0,
    "types": 1,
    "config": 2,
    "protocol": 3,
    "layout": 3,
    "workload": 3,
    "policy": 4,
    "forecast": 5,
    "clock": 6,
    "observe": 6,
    "open_files": 6,
    "ratelimit": 6,
    "one_host": 6,
    "patience": 6,
    "places": 6,
    "trust": 6,
    "_native": 6,
    "_pb": 6,
    "transport": 7,
    "rpc": 7,
    "agent": 8,
    "coordinator": 8,
    "openai": 8,
    "serving": 9,
    "router": 10,
    "connectors": 10,
    "engine": 10,
    "mock_engine": 10,
    "load": 10,
    "cli": 11,
    "testing": 11,
}
PURE_FLOOR = 5
"""Floors up to this one decide purely: standard library and numpy, and none of IMPURE."""
IMPURE = {"time", "random", "asyncio", "logging", "os", "socket", "threading", "subprocess", "secrets", "datetime"}
EDGE_FLOOR = 9
EDGE_ONLY = {
    *("torch", "transformers", "fastapi", "starlette", "uvicorn", "uvloop", "h11", "httptools", "httpx"),
    *("vllm", "sglang"),
}
"""Packages that only floors from EDGE_FLOOR upward may import."""
NEVER = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def modules() -> list[pathlib.Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py")


def part_of(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in the file, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "kvxfer":
                yield from ((node.lineno, f"kvxfer.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, str(node.module)


def kvxfer_parts(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    for line, name in imports(path):
        top, _, rest = name.partition(".")
        if top == "kvxfer" and rest and rest != "__version__":
            yield line, rest.partition(".")[0]


def test_every_part_has_a_floor() -> None:
    assert {part_of(path) for path in modules()} <= set(FLOORS)


def test_imports_go_down() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} ({part_of(path)}, floor {FLOORS[part_of(path)]}) imports kvxfer.{part}"
        for path in modules()
        for line, part in kvxfer_parts(path)
        if part != part_of(path) and FLOORS.get(part, 99) >= FLOORS[part_of(path)]
    ]
    assert not wrong, "\n".join(wrong)


def test_low_floors_are_pure() -> None:
    wrong = []
    for path in modules():
        if FLOORS[part_of(path)] > PURE_FLOOR:
            continue
        for line, name in imports(path):
            top = name.partition(".")[0]
            is_known = top in sys.stdlib_module_names or top in ("numpy", "kvxfer")
            if top in IMPURE or not is_known:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_engines_and_servers_live_at_the_edge() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for path in modules()
        if FLOORS[part_of(path)] < EDGE_FLOOR
        for line, name in imports(path)
        if name.partition(".")[0] in EDGE_ONLY
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_unpickles_or_evaluates() -> None:
    wrong = []
    for path in modules():
        wrong += [f"{path.relative_to(PACKAGE)}:{line} imports {name}" for line, name in imports(path) if name in NEVER]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno} calls {node.func.id}()")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("one", "other"), [("sim", "contract"), ("contract", "sim")])
def test_the_two_products_of_testing_do_not_see_each_other(one: str, other: str) -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for path in sorted((PACKAGE / "testing" / one).rglob("*.py"))
        for line, name in imports(path)
        if name.startswith(f"kvxfer.testing.{other}")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("floor", "part"), [(FLOORS["engine"], "router"), (FLOORS["coordinator"], "agent")])
def test_equal_floors_do_not_see_each_other(floor: int, part: str) -> None:
    """The two pairs that would be easiest to join stay apart in the table itself."""
    assert FLOORS[part] == floor
