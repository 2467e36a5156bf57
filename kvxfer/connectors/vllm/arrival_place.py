"""Where an API server finds the listener for its arrivals: a socket file in a directory that only this user can enter,
so that no other user can take the name first, hear what arrives, or say what did not.

Both processes come to the same path by themselves: ``$XDG_RUNTIME_DIR/kvxfer``, else ``kvxfer-UID`` where temporary
files lie. Decides nothing of what is said there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pathlib
import socket
import stat

from kvxfer import places
from kvxfer.errors import ConfigError

PATH_MAX = 107
"""Bytes of a Unix socket's path, by the kernel."""


def make_socket(heard: socket.socket, agent_id: str) -> pathlib.Path:
    """Bind it where that agent is looked for. Raises ConfigError where there is no place for it, or a process listens
    there; OSError."""
    obstacles = []
    for path in _paths(agent_id):
        with contextlib.suppress(OSError):  # it is looked at below
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        obstacle = _obstacle(path.parent)
        if obstacle:
            obstacles.append(obstacle)
            continue
        if _is_heard(path):
            raise ConfigError(f"another engine of the name {agent_id!r} listens at {path}")
        _sweep(path.parent)
        heard.bind(os.fspath(path))
        return path
    raise ConfigError(f"there is no place for a socket: {'; '.join(obstacles)}; set XDG_RUNTIME_DIR or TMPDIR")


def find_socket(agent_id: str) -> str | None:
    """Where that agent listens, if it does; ``None``: there is no such place that is ours alone."""
    with contextlib.suppress(ConfigError):
        for path in _paths(agent_id):
            if not _obstacle(path.parent):
                return os.fspath(path)
    return None


def _paths(agent_id: str) -> list[pathlib.Path]:
    """The candidates, best first. Raises ConfigError where none is short enough, or none can be written."""
    name = f"arrivals-{hashlib.sha256(agent_id.encode()).hexdigest()[:16]}.sock"
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    directories = [pathlib.Path(named, "kvxfer").absolute()] if named else []
    directories.append(pathlib.Path(places.temporary_dir(), f"kvxfer-{os.geteuid()}").absolute())
    paths = [directory / name for directory in directories]
    short = [path for path in paths if len(os.fsencode(path)) <= PATH_MAX]
    if not short:
        raise ConfigError(f"{paths[-1]} is too long for a socket's path (PATH_MAX={PATH_MAX})")
    return short


def _obstacle(directory: pathlib.Path) -> str:
    """Why that directory is not ours alone, or nothing."""
    try:
        status = directory.lstat()
    except OSError as error:
        return f"{directory}: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        return f"{directory} must be ours alone: a directory of mode 0700, owned by uid {os.geteuid()}"
    return ""


def _sweep(directory: pathlib.Path) -> None:
    """Remove what processes that were killed left."""
    for path in directory.glob("arrivals-*.sock"):
        if not _is_heard(path):
            path.unlink(missing_ok=True)


def _is_heard(path: pathlib.Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(os.fspath(path)) not in (errno.ECONNREFUSED, errno.ENOENT)
