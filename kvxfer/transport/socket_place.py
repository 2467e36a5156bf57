"""Chooses where an agent's Unix socket lies: in a directory that only its user can enter. It also removes the files and
directories that killed processes left. Decides the path; must never bind it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import pathlib
import secrets
import socket
import stat
import tempfile
import time

from kvxfer import places
from kvxfer.errors import ConfigError

SOCKET_PATH_MAX = 107
"""Bytes of a Unix socket's path, by the kernel."""
OWN_PREFIX = "kvxfer-socket-"
"""Of the directory that a process makes for its own socket, where it is given none."""
STALE_AFTER_S = 60.0
"""An older socket file without a listener was left by a killed process."""


@dataclasses.dataclass(frozen=True)
class SocketPlace:
    """``path`` is free, in a directory that only we can enter; ``own`` is that directory if it is to go with the
    socket. Without a path ``obstacle`` says why there is none, and what to set.
    """

    path: pathlib.Path | None
    own: OwnDirectory | None = None
    obstacle: str = ""


def find_socket_place(runtime_dir: str) -> SocketPlace:
    """A place for one socket: in ``runtime_dir`` where that is given, else in ``$XDG_RUNTIME_DIR/kvxfer``, else in a
    new temporary directory.

    Raises ConfigError where ``runtime_dir`` is given and no good.
    """
    name = f"{secrets.token_hex(8)}.sock"
    if runtime_dir:
        directory = _make_private(pathlib.Path(runtime_dir).absolute())
        if len(os.fsencode(directory / name)) > SOCKET_PATH_MAX:
            raise ConfigError(f"runtime_dir {runtime_dir!r} is too long for a socket's path (SOCKET_PATH_MAX=107)")
        return SocketPlace(directory / name)
    user_directory = os.environ.get("XDG_RUNTIME_DIR", "")
    if user_directory:
        shared = pathlib.Path(user_directory, "kvxfer").absolute()
        if len(os.fsencode(shared / name)) <= SOCKET_PATH_MAX:
            with contextlib.suppress(ConfigError):
                return SocketPlace(_make_private(shared) / name)
    try:
        own = OwnDirectory(places.temporary_dir())
        if len(os.fsencode(own.path / name)) > SOCKET_PATH_MAX:
            own.remove()
            own = OwnDirectory("/tmp")
    except (ConfigError, OSError) as error:
        why = str(error) if isinstance(error, ConfigError) else f"{error.filename or '/tmp'}: {error.strerror}"
        why = why.removesuffix("; set TMPDIR")
        return SocketPlace(None, obstacle=f"there is no place for a Unix socket: {why}; set XDG_RUNTIME_DIR or TMPDIR")
    return SocketPlace(own.path / name, own)


class OwnDirectory:
    """A directory of this process alone. A lock on it shows that the process runs."""

    def __init__(self, parent: str) -> None:
        """Removes those of processes that were killed, first. Raises OSError."""
        for path in pathlib.Path(parent).glob(f"{OWN_PREFIX}*"):
            _remove_if_left(path)
        while True:
            self.path = pathlib.Path(tempfile.mkdtemp(prefix=OWN_PREFIX, dir=parent))
            with contextlib.suppress(FileNotFoundError):  # taken for a killed one's, before it was locked
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                with contextlib.suppress(OSError):  # a file system without locks: no sweep is possible
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._descriptor)

    def remove(self) -> None:
        """Once, when what was in it is gone."""
        with contextlib.suppress(OSError):
            self.path.rmdir()
        os.close(self._descriptor)


def _remove_if_left(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                return
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in path.glob("*.sock"):
                left.unlink()
            path.rmdir()
        finally:
            os.close(descriptor)


def _make_private(directory: pathlib.Path) -> pathlib.Path:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise ConfigError(f"runtime directory {directory}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(f"runtime directory {directory} must be ours alone: mode 0700, owned by uid {os.geteuid()}")
    _sweep(directory)
    return directory


def _sweep(directory: pathlib.Path) -> None:
    """Remove the socket files of processes that were killed."""
    for path in directory.glob("*.sock"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < STALE_AFTER_S:
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)
                if probe.connect_ex(os.fsencode(path)) == errno.ECONNREFUSED:
                    path.unlink()
