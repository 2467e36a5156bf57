"""What the demos of foreign engines have in common: how they are ended, what they say where they fail, which logs stay.
Decides nothing about the engines.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx

from kvxfer.errors import KvxferError

T = TypeVar("T")


def run(name: str, work: Callable[[pathlib.Path], Coroutine[Any, Any, bool]], *, is_verbose: bool = False) -> int:
    """Run ``work`` in a directory of its own, where the logs lie, until it is done, fails, or is told to end (Ctrl-C,
    SIGTERM); it ends what it started itself. The exit code: 0 where ``work`` says that all is well, 1, or 130. The logs
    stay where that is 1."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix=f"kvxfer-{name}-"))
    code = 1
    try:
        code = 0 if asyncio.run(until_told_to_end(work(directory))) else 1
    except KvxferError as error:
        print(f"{name}: {error}", file=sys.stderr)
    except httpx.HTTPError as error:
        print(f"{name}: no answer: {type(error).__name__} {error}", file=sys.stderr)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"{name}: interrupted; all processes are ended", file=sys.stderr)
        code = 130
    for log in sorted(directory.glob("*.log")) if is_verbose else ():
        print(f"--- {log.name}\n{log.read_text(errors='replace')}", file=sys.stderr)
    if code == 1:
        print(f"The logs of all processes are kept in {directory}", file=sys.stderr)
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return code


async def until_told_to_end(work: Coroutine[Any, Any, T]) -> T:
    """SIGTERM ends it as Ctrl-C does: with all that it started. Both are heard, also where a shell that started this in
    the background has it ignore Ctrl-C."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


def count(least: int, most: int) -> Callable[[str], int]:
    """A type of argparse: a whole number, from ``least`` to ``most``."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text[:9]) <= most and len(text) <= 9):
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {text!r:.60}")
        return int(text)

    return parse


def model_directory(text: str) -> pathlib.Path:
    """A type of argparse: a directory that a model lies in."""
    path = pathlib.Path(text)
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r:.200} is no directory of a model: it has no config.json")
    return path
