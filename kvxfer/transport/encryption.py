"""Which TCP sessions an agent encrypts, with which OpenSSL, and what stands in the way. Decides from the settings and
from where the agent listens; must never know a session, nor load OpenSSL for an agent that only loopback can reach.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from kvxfer._native import _core
from kvxfer.config import ENCRYPT_VARIABLE, AgentConfig, encrypt_mode, is_loopback
from kvxfer.errors import ConfigError, LaneUnavailableError
from kvxfer.types import EncryptMode

OPENSSL_VARIABLE = "KVXFER_OPENSSL_LIBRARY"


@dataclasses.dataclass(frozen=True)
class SessionEncryption:
    """As a core takes it."""

    mode: EncryptMode
    library: str
    tolerates_plain: bool
    """Whether ``auto`` is ``never`` where OpenSSL cannot be loaded."""


def session_encryption(config: AgentConfig, host: str, environ: Mapping[str, str] | None = None) -> SessionEncryption:
    """How an agent that listens on the numeric address ``host`` encrypts.

    Raises ConfigError where the settings cannot be kept: sessions beyond loopback would be plain without ``insecure``,
    or ``always`` is set and there is no OpenSSL.
    """
    environ = os.environ if environ is None else environ
    made = SessionEncryption(
        encrypt_mode(config.encrypt, environ),
        environ.get(OPENSSL_VARIABLE, "") or config.openssl_library,
        config.insecure,
    )
    is_far = not is_loopback(host)
    if made.mode is EncryptMode.NEVER:
        if is_far and not config.insecure:
            raise ConfigError(
                f"bind_host {config.bind_host!r} is not loopback, and nothing is encrypted: encrypt "
                f"({ENCRYPT_VARIABLE}) is never; set insecure to accept that on a trusted network"
            )
        return made
    is_needed = made.mode is EncryptMode.ALWAYS or (is_far and not config.insecure)
    obstacle = openssl_obstacle(made.library) if is_needed else ""
    if obstacle and made.mode is EncryptMode.ALWAYS:
        raise ConfigError(f"encrypt is always, and {obstacle}: install OpenSSL 3, or name it by {OPENSSL_VARIABLE}")
    if obstacle:
        raise ConfigError(
            f"bind_host {config.bind_host!r} is not loopback, and its sessions cannot be encrypted: {obstacle}; "
            f"install OpenSSL 3, name it by {OPENSSL_VARIABLE}, or set insecure to accept that on a trusted network"
        )
    return made


def openssl_obstacle(library: str = "") -> str:
    """Why OpenSSL cannot be used, or nothing where it can. Loads it into this process."""
    try:
        _core.openssl_version(library)
    except LaneUnavailableError as error:
        return str(error)
    return ""
