"""The leg key: the header that carries it, and files that name keys, read again when they change.

Decides what such a file may say. It must never know which request carries a key.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import AsyncIterator

from kvxfer.errors import ConfigError
from kvxfer.observe import hide
from kvxfer.serving.watching import WatchedFiles

LEG_KEY = b"x-kvxfer-leg-key"
"""Name of the header. No client's header of that name goes to a worker, and no worker sends one."""
POLL_S = 1.0
"""How often it is looked whether the file has changed."""
FILE_BYTES_MAX = 1 << 16
FILE_KEYS_MAX = 16
_KEY = re.compile(rb"[!-~]{16,1024}")


class LegKeyFile:
    """The keys of one file; none until one is loaded."""

    def __init__(self, path: str = "") -> None:
        self._path = path
        self.keys: tuple[bytes, ...] = ()
        """A router shows the first; a worker takes each."""

    def load(self) -> None:
        """Read the keys: one a line, without blank lines and those that begin with ``#``. Raises ConfigError that says
        nothing of what stands there, and then the last keys stay."""
        path = self._path
        try:
            with open(path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                content = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise ConfigError(f"leg_key_file: cannot read {path}: {error.strerror}") from None
        lines = [line.strip() for line in content.splitlines()]
        keys = tuple(dict.fromkeys(line for line in lines if line and not line.startswith(b"#")))
        if len(content) > FILE_BYTES_MAX or not 0 < len(keys) <= FILE_KEYS_MAX:
            raise ConfigError(f"leg_key_file: {path} must hold 1 to {FILE_KEYS_MAX} keys, one a line")
        if not all(map(_KEY.fullmatch, keys)):
            raise ConfigError(f"leg_key_file: a key in {path} is not 16 to 1,024 visible ASCII characters")
        if mode & 0o007:
            raise ConfigError(f"leg_key_file: {path} may be read by others (mode {mode & 0o777:04o}); chmod 600 it")
        for key in keys:
            hide(key.decode("ascii"))
        self.keys = keys

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """What a request to a worker carries because of it."""
        return ((LEG_KEY, self.keys[0]),) if self.keys else ()

    def __repr__(self) -> str:
        return f"LegKeyFile({len(self.keys)} keys)"


@contextlib.asynccontextmanager
async def followed_leg_keys(path: str) -> AsyncIterator[LegKeyFile]:
    """Within the block the keys are those of the file, also after it has changed; none where ``path`` is empty. Raises
    ConfigError for a file that is wrong at the start; one that is wrong later changes nothing."""
    file = LegKeyFile(path)
    if not path:
        yield file
        return
    watched = WatchedFiles([path], file.load, what="leg keys", poll_s=POLL_S)
    file.load()
    async with watched:
        yield file
