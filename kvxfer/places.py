"""Where the files of a user lie, on hosts that give a user no home, no passwd entry and nothing to write to.

Decides which variable names a place, and the one sentence that says what to set where there is none. It must never
make a file, nor know what is kept there.
"""

from __future__ import annotations

import errno
import os
import pathlib
import pwd
import tempfile

from kvxfer.errors import ConfigError

NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR})
"""Errors of a place that another setting would mend; a full disk is not one of them."""


def home() -> pathlib.Path | None:
    """``$HOME``, else what the passwd entry of this user id says; None where there is neither."""
    named = os.environ.get("HOME", "")
    if not named:
        try:
            named = pwd.getpwuid(os.getuid()).pw_dir
        except (KeyError, OSError):  # arbitrary user ids of containers
            return None
    return pathlib.Path(named) if named else None


def base_dir(variable: str, below_home: str, *, what: str, instead: str) -> pathlib.Path:
    """``$variable`` (one of the XDG base directories), else ``below_home`` in the home directory.

    Raises ConfigError where there is neither: ``what`` has no place, and ``instead`` names what to set.
    """
    named = os.environ.get(variable, "")
    if named:
        return pathlib.Path(named)
    found = home()
    if found is None:
        raise ConfigError(f"there is no place for {what}: user id {os.getuid()} has no home directory; set {instead}")
    return found / below_home


def expand(path: str) -> pathlib.Path:
    """``path`` with a leading ``~`` made into a home directory. Raises ConfigError where that is not known."""
    expanded = os.path.expanduser(path)
    if path.startswith("~") and expanded == path:
        if path == "~" or path.startswith("~/"):
            raise ConfigError(f"{path}: user id {os.getuid()} has no home directory; set HOME, or write the whole path")
        raise ConfigError(f"{path}: there is no such user; write the whole path")
    return pathlib.Path(expanded)


def temporary_dir() -> str:
    """A directory for temporary files. Raises ConfigError where none can be written, saying what to set."""
    try:
        return tempfile.gettempdir()
    except OSError:
        tried = os.environ.get("TMPDIR") or "/tmp, /var/tmp and the working directory"
        raise ConfigError(f"no temporary directory can be written ({tried}); set TMPDIR") from None


def unwritable(path: pathlib.Path) -> str:
    """Why nothing can be made at ``path``, or nothing. Looks at permissions and read-only mounts, and makes nothing."""
    for parent in (path, *path.parents):
        try:
            parent.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"{parent}: {error.strerror}"
        if not parent.is_dir():
            return f"{parent} is no directory"
        return "" if os.access(parent, os.W_OK | os.X_OK, effective_ids=True) else f"{parent} cannot be written"
    return f"{path} cannot be reached"
