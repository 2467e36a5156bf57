"""Print what pyproject.toml asks for, a line each: all extras that tests use, without torch and what needs it, and
without the tools that only `make check` uses."""

from __future__ import annotations

import pathlib
import re
import tomllib

LEFT_OUT = {"accelerate", "atheris", "grpc-stubs", "kvxfer", "mypy", "ruff", "torch", "transformers", "types-protobuf"}

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
asked = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
print(*sorted({one for one in asked if re.split(r"[\[<>=!~ ]", one)[0] not in LEFT_OUT}), sep="\n")
