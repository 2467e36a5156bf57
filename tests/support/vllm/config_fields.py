"""Prints every field of vLLM's configuration, and every variable that vLLM reads of the environment: one a line, after
"counts" or "exempt". Run by vLLM's own Python, with the repository on PYTHONPATH."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from kvxfer.connectors.vllm.exempt_variables import SECRET, VARIABLES
from kvxfer.connectors.vllm.exemptions import CONFIG


def fields_of(cls: type[Any], prefix: str, above: tuple[type[Any], ...]) -> Iterator[str]:
    """By the whole name. A part that is exempt as a whole is one name, and so is a part within its own kind."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, kind = f"{prefix}{field.name}", hints.get(field.name, field.type)
        parts = [part for part in (*typing.get_args(kind), kind) if dataclasses.is_dataclass(part)]
        parts = [part for part in parts if part.__module__.startswith("vllm.config")]
        if not parts or CONFIG.why(name) is not None or any(part in above for part in parts):
            yield name
            continue
        for part in parts:
            yield from fields_of(part, f"{name}.", (*above, part))


def main() -> None:
    from vllm import envs
    from vllm.config import VllmConfig

    for name in sorted(set(fields_of(VllmConfig, "", (VllmConfig,)))):
        print("exempt" if CONFIG.why(name) is not None else "counts", name)
    for name in sorted(envs.environment_variables):
        is_exempt = SECRET.search(name) is not None or VARIABLES.why(name) is not None
        print("exempt" if is_exempt else "counts", f"env.{name}")


if __name__ == "__main__":
    main()
