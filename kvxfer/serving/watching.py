"""Files that are read again when they change: keys, certificates. Decides when; what they say is the reader's."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

from kvxfer.errors import ConfigError

log = logging.getLogger("kvxfer.serving")

POLL_S = 1.0

Stamp = tuple[int, int, int]
"""Time of the last change, size, inode: a replaced file has another one."""


class WatchedFiles:
    """An async context manager: within it, ``load`` is called again after one of ``paths`` has changed. Where it raises
    ConfigError there is one warning for each state of the files, and what it took last stays. ``what`` names them in
    logs. Make it before the files are read for the first time, so that no change is missed.
    """

    def __init__(self, paths: Sequence[str], load: Callable[[], None], *, what: str, poll_s: float = POLL_S) -> None:
        self._paths = tuple(path for path in paths if path)
        self._load = load
        self._what = what
        self._poll_s = poll_s
        self._stamps = self._look()
        self._task: asyncio.Task[None] | None = None

    def poll(self) -> None:
        """Read the files again if one of them changed."""
        stamps = self._look()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        extra = {"paths": ", ".join(self._paths)}
        try:
            self._load()
            log.info("%s were read again", self._what, extra=extra)
        except ConfigError as error:
            log.warning("%s are not taken, the last ones stay: %s", self._what, error, extra=extra)
        except Exception:
            log.exception("reading %s broke, the last ones stay", self._what, extra=extra)

    def _look(self) -> tuple[Stamp | None, ...]:
        return tuple(map(_stamp, self._paths))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            self.poll()

    async def __aenter__(self) -> WatchedFiles:
        if self._paths:
            self._task = asyncio.create_task(self._run(), name=f"kvxfer {self._what}")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def __repr__(self) -> str:
        return f"WatchedFiles({self._what}: {', '.join(self._paths)})"


def _stamp(path: str) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
