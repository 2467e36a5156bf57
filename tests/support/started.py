"""A process that was started, by its name: what it logs is kept, and where it does not become ready that is said with
the reason. It has a session of its own, which ends with it. Decides nothing about what it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvxfer.cli.progress import wait_while_it_gets_on
from kvxfer.errors import DeadlineExceededError, KvxferError

SILENT_S = 120.0
"""A start that does nothing for so long is given up."""
POLL_S = 0.1
STOP_S = 20.0
LAST_LINES = 15

T = TypeVar("T")


class Started:
    """``name``, of what is run by ``command``; stdout and stderr go to ``<directory>/<name>.log``. Raises
    KvxferError, naming it, where it cannot be begun at all."""

    def __init__(self, name: str, command: Sequence[str], directory: pathlib.Path, environment: dict[str, str]) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self.is_ready = False
        try:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
                )
        except OSError as error:
            raise KvxferError(f"{name} could not be started: {error}") from None

    async def wait(self, look: Callable[[], Awaitable[T | None]]) -> T:
        """What ``look`` finds once it finds something. Raises DeadlineExceededError where it did not become ready, and
        KvxferError where it ended, both with its name, its last line, and where its log is."""
        try:
            found = await wait_while_it_gets_on(
                self._find(look), session=self.process.pid, written_bytes=self._log_bytes, timeout_s=SILENT_S
            )
        except TimeoutError as why:
            raise DeadlineExceededError(self._told(f"did not become ready: {why}")) from None
        self.is_ready = True
        return found

    async def _find(self, look: Callable[[], Awaitable[T | None]]) -> T:
        while True:
            found = await look()
            if found is not None:
                return found
            if self.process.poll() is not None:
                raise KvxferError(self._told(f"ended with code {self.process.returncode} before it was ready"))
            await asyncio.sleep(POLL_S)

    def end(self) -> None:
        """Stop it, and in the end all that it started."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S if self.is_ready else 1.0)
        self.kill()

    def kill(self) -> None:
        """End all of it at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _log_bytes(self) -> int:
        return self.log.stat().st_size

    def _told(self, what: str) -> str:
        return told(self.name, what, self.log)


def told(name: str, what: str, log: pathlib.Path) -> str:
    """That ``what`` is so of the process ``name``, with the end of its ``log``, and where that is."""
    last = log.read_text(errors="replace").splitlines()[-LAST_LINES:] if log.exists() else []
    return "\n  ".join([f"{name} {what}; its log is {log}", *last])


def kvxfer(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvxfer.cli", *arguments, f"--exit-with-parent={os.getpid()}"]


async def ready(part: Started) -> dict[str, str]:
    """The ready line of a part of kvxfer. Raises what :meth:`Started.wait` raises."""

    async def look() -> dict[str, str] | None:
        for line in part.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                values = json.loads(line)
                if isinstance(values, dict) and values.get("event") == "ready":
                    return values
        return None

    return await part.wait(look)
