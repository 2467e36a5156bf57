"""A Python process that a test starts, and that can import ``tests.support`` as the test can."""

from __future__ import annotations

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def environment(**more: str) -> dict[str, str]:
    """This process's, with the repository last in PYTHONPATH: a kvxfer that PYTHONPATH names is found before the
    checkout's."""
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """``tests.support.MODULE`` as a program of ``python``, to be run in :func:`environment`."""
    return [python, "-m", f"tests.support.{module}", *arguments]
