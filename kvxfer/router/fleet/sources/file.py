"""A YAML file as a source of workers, read again whenever it changes. Decides when; what it may say is
`worker_file`'s."""

from __future__ import annotations

import asyncio
import logging
import os
import pathlib

from kvxfer.errors import ConfigError
from kvxfer.router.fleet.sources.worker_file import FILE_BYTES_MAX, read_worker_file
from kvxfer.router.fleet.worker import Worker, WorkerSource
from kvxfer.router.fleet.workers import Workers

log = logging.getLogger("kvxfer.router")

POLL_S = 1.0

Stamp = tuple[int, int, int]
"""Time of the last change, size, inode: a replaced file has another one."""


class FileSource:
    """An async context manager. A file that is bad or gone later on leaves the last list, with one warning for each
    state of the file."""

    def __init__(self, path: str, workers: Workers, *, poll_s: float = POLL_S) -> None:
        self._path = pathlib.Path(path)
        self._workers = workers
        self._poll_s = poll_s
        self._stamp: Stamp | None = None
        self._task: asyncio.Task[None] | None = None
        self.last_error = ""

    def load(self) -> None:
        """Read the file. Raises ConfigError, and then the list stays as it was."""
        self._stamp = self._look()
        self._take(self._read())

    def _read(self) -> tuple[Worker, ...]:
        try:
            with self._path.open("rb") as file:
                content = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror or error}") from None
        return read_worker_file(str(self._path), content)

    def _take(self, workers: tuple[Worker, ...]) -> None:
        self._workers.replace(WorkerSource.FILE, workers)
        self.last_error = ""

    async def poll(self) -> None:
        """Read the file again if it changed: in a thread, since 10,000 workers take more than a second."""
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._take(await asyncio.to_thread(self._read))
            log.info("the file of workers was read again", extra={"path": str(self._path)})
        except ConfigError as error:
            self.last_error = str(error)
            log.warning("the file of workers is not taken, its last list stays: %s", error)
        except Exception:
            log.exception("reading the file of workers broke", extra={"path": str(self._path)})

    def _look(self) -> Stamp | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self.poll()

    async def __aenter__(self) -> FileSource:
        """Raises ConfigError where the file cannot be taken at the start."""
        self.load()
        self._task = asyncio.create_task(self._run(), name="kvxfer router file of workers")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def __repr__(self) -> str:
        return f"FileSource({str(self._path)!r}, last_error={self.last_error!r})"
