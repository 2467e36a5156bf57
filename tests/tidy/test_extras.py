"""The extras of pyproject.toml bring what the parts of kvxfer that need them import, and nothing else."""

from __future__ import annotations

import ast
import pathlib
import re
import sys
import tomllib

import pytest

pytestmark = pytest.mark.checkout

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARTS = {
    "router": ("router", "serving", "openai"),
    "engine": ("engine", "serving", "openai", "cli"),
    "mock": ("mock_engine",),
    "certs": ("trust",),
    "load": ("load", "workload"),
}
"""By extra: the parts that run with it. The service on one machine (cli) is the built-in engine's."""
DISTRIBUTION = {"yaml": "pyyaml", "zmq": "pyzmq", "google": "protobuf", "grpc": "grpcio"}
BROUGHT = {"starlette": "fastapi", "pydantic_core": "pydantic", "tokenizers": "transformers"}
BROUGHT |= {"huggingface_hub": "transformers"}
"""Packages that another one of the extra always brings."""
FOR_OTHERS = {"accelerate", "gguf", "jinja2", "safetensors"}
"""Transformers imports them, and does not bring them all."""


def names(texts: list[str]) -> set[str]:
    return {re.split(r"[<>=!~; \[]", text)[0].lower() for text in texts}


def extras() -> dict[str, set[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {name: names(texts) for name, texts in project["optional-dependencies"].items()}
    found["engine"] |= found["router"]
    return {name: packages | names(project["dependencies"]) for name, packages in found.items()}


def imported(part: str) -> set[str]:
    found = set()
    for path in (ROOT / "kvxfer" / part).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    found -= {*sys.stdlib_module_names, "kvxfer"}
    return {BROUGHT.get(name) or DISTRIBUTION.get(name) or name.replace("_", "-").lower() for name in found}


@pytest.mark.parametrize("extra", PARTS)
def test_an_extra_brings_what_its_parts_import(extra: str) -> None:
    needed = set().union(*map(imported, PARTS[extra]))
    assert not needed - extras()[extra]


@pytest.mark.parametrize("extra", PARTS)
def test_an_extra_brings_nothing_that_no_part_imports(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = names(project["optional-dependencies"][extra]) - {"kvxfer"} - FOR_OTHERS
    assert not own - set().union(*map(imported, PARTS[extra]))
