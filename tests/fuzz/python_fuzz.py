#!/usr/bin/env python3
"""Fuzzes one Python decoder of foreign bytes (python_targets) with atheris: libFuzzer, guided by kvxfer's bytecode.

    TARGET=NAME PYTHONPATH=. python tests/fuzz/python_fuzz.py [-OPTION=VALUE ...] [DIRECTORY or FILE ...]

The options are libFuzzer's. Without a path it begins with the kept corpus, and adds to what was found here before.
libFuzzer starts this file again for -merge=1, with its options alone: therefore the environment names the target.
"""

from __future__ import annotations

import logging
import os
import pathlib
import sys

import atheris

# An editable install has a finder whose loader runs code that atheris has not instrumented: only the checkout counts.
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable_")]
with atheris.instrument_imports(include=["kvxfer"]):
    from tests.fuzz.python_targets import TARGETS

ROOT = pathlib.Path(__file__).resolve().parents[2]


def main() -> None:
    name = os.environ.get("TARGET", "")
    if name not in TARGETS:
        sys.exit(f"TARGET={name}: name one of {', '.join(TARGETS)}")
    target, arguments = TARGETS[name], sys.argv[1:]
    if all(argument.startswith("-") for argument in arguments):
        found = ROOT / "build/fuzz/corpus-python" / name
        found.mkdir(parents=True, exist_ok=True)
        for place, seed in enumerate(target.seeds):
            (found / f"seed-{place}").write_bytes(seed)
        arguments += [str(found), str(ROOT / "tests/fuzz/corpus-python" / name)]

    def run(data: bytes) -> None:
        target.is_value(data)

    logging.disable(logging.CRITICAL)
    atheris.Setup([sys.argv[0], *arguments], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
