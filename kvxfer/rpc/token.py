"""The cluster token: a file that every process of a cluster reads. Decides which process may make it and which file is
too open; must never know what is proved with it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets

from kvxfer import places
from kvxfer.errors import ConfigError

TOKEN_FILE_VARIABLE = "KVXFER_TOKEN_FILE"
INSTEAD = "KVXFER_TOKEN_FILE, XDG_STATE_HOME or HOME"
"""What names another place for the token, where the default one is no good."""
TOKEN_BYTES_MAX = 4096
_TOKEN = re.compile(rb"[\x21-\x7e]{16,4096}")


def default_token_path() -> pathlib.Path:
    """``$KVXFER_TOKEN_FILE``, else ``$XDG_STATE_HOME/kvxfer/cluster-token``, else the same under ``~/.local/state``.

    Raises ConfigError where this user has none of them.
    """
    named = os.environ.get(TOKEN_FILE_VARIABLE)
    if named:
        return pathlib.Path(named)
    state = places.base_dir("XDG_STATE_HOME", ".local/state", what="the cluster token", instead=INSTEAD)
    return state / "kvxfer" / "cluster-token"


def load_token(path: str | os.PathLike[str]) -> bytes:
    """The token in an existing file: 16 to 4096 printable ASCII characters without spaces, surrounding white space
    removed.

    Raises ConfigError if it cannot be read, is no token, or may be read by others.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(TOKEN_BYTES_MAX + 2).strip()
    except OSError as error:
        raise ConfigError(f"cluster token file {os.fspath(path)}: {error.strerror}") from None
    others = 0o077 if status.st_uid == os.geteuid() else 0o007
    if status.st_mode & others:
        raise ConfigError(
            f"cluster token file {os.fspath(path)} may be read by others (mode {status.st_mode & 0o777:04o}); "
            "chmod 600 it"
        )
    if _TOKEN.fullmatch(text) is None:
        raise ConfigError(
            f"cluster token file {os.fspath(path)} must hold 16 to {TOKEN_BYTES_MAX} printable characters "
            "without spaces"
        )
    return text


def load_or_create_token(path: str | os.PathLike[str]) -> bytes:
    """The token in ``path``; a missing file is made first (mode 0600, 32 random bytes as hex). Of several makers at
    once, one wins and all get its token.

    Raises ConfigError as :func:`load_token`, or if the file cannot be made.
    """
    target = pathlib.Path(path)
    if not _is_there(target):
        draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        try:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(secrets.token_hex(32).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                os.link(draft, target)
            except FileExistsError:
                pass
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(draft)
        except OSError as error:
            hint = f"; {INSTEAD} names another place" if error.errno in places.NOT_WRITABLE else ""
            raise ConfigError(f"cluster token file {target} cannot be made: {error.strerror}{hint}") from None
    return load_token(target)


def _is_there(target: pathlib.Path) -> bool:
    try:
        return target.exists()
    except OSError:  # a directory that we may not enter: what comes next says so
        return False


def member_token(path: str) -> bytes:
    """The token of a worker or router. A file that was named must be there: one made by mistake would fit no other
    process.

    Only the default place (``path`` empty) is filled where it is empty. Raises ConfigError as :func:`load_token`.
    """
    return load_token(pathlib.Path(path)) if path else load_or_create_token(default_token_path())
