"""What the router shows to its workers beside its certificate: the API key of a file that is read again when it
changes, and the key of a worker's legs.

Decides what such a file may say, and which leg key counts. It must never know which request carries them.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import AsyncIterator

from kvxfer.errors import ConfigError
from kvxfer.observe import hide
from kvxfer.router.fleet.worker import Worker
from kvxfer.serving.leg_keys import LEG_KEY, LegKeyFile
from kvxfer.serving.watching import WatchedFiles

POLL_S = 1.0
"""How often it is looked whether the file has changed."""
FILE_BYTES_MAX = 1 << 16
_KEY = re.compile(r"[!-~]{1,1024}")


Headers = tuple[tuple[bytes, bytes], ...]


def leg_headers(worker: Worker, file: LegKeyFile) -> Headers:
    """The key of a worker's legs: the coordinator's, else that of the file, else none."""
    return ((LEG_KEY, worker.leg_key.encode("ascii")),) if worker.leg_key else file.headers


class WorkerKey:
    """One key; none until a file is loaded."""

    def __init__(self) -> None:
        self.headers: Headers = ()
        """What a request to a worker carries because of it."""

    def load(self, path: str) -> None:
        """Take the key of a file: its one line, without blank lines and those that begin with ``#``. Raises ConfigError
        that says nothing of what stands there, and then the last key stays."""
        try:
            with pathlib.Path(path).open("rb") as file:
                content = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise ConfigError(f"cannot read the workers' API key from {path}: {error.strerror}") from None
        lines = [line.strip() for line in content.decode("latin-1").splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        if len(content) > FILE_BYTES_MAX or len(lines) != 1 or _KEY.fullmatch(lines[0]) is None:
            raise ConfigError(f"{path} must hold one API key, of 1 to 1,024 visible ASCII characters, in one line")
        hide(lines[0])
        self.headers = ((b"authorization", b"Bearer " + lines[0].encode("ascii")),)

    def __repr__(self) -> str:
        return f"WorkerKey(is_set={bool(self.headers)})"


@contextlib.asynccontextmanager
async def followed_worker_key(path: str) -> AsyncIterator[WorkerKey]:
    """Within the block the key is that of the file, also after it has changed; none where ``path`` is empty. Raises
    ConfigError for a file that is wrong at the start; one that is wrong later changes nothing."""
    key = WorkerKey()
    if not path:
        yield key
        return
    watched = WatchedFiles([path], lambda: key.load(path), what="the workers' API key", poll_s=POLL_S)
    key.load(path)
    async with watched:
        yield key
