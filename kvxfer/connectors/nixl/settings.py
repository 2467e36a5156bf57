"""Settings of the drop-in that NIXL has no parameter for, from environment variables. Decides names and defaults.

``KVXFER_NIXL_HOST``        where the agent's data port and its metadata listener bind (127.0.0.1)
``KVXFER_NIXL_ADVERTISE``   what peers dial, where that differs
``KVXFER_NIXL_INSECURE=1``  allow an address that is not loopback: NIXL's metadata, which has the agent's key, is not
                            encrypted; data is, unless OpenSSL is missing
``KVXFER_NIXL_DEADLINE_S``  the most one transfer may take (600)
``KVXFER_NIXL_CHECKSUM``    CRC-32C over posts: off, auto (from another host), on or sampled (off)
``KVXFER_NIXL_STRIPES``     connections to one peer over which transfers are spread (1); 0: as many as are the fastest
``KVXFER_NIXL_COPY_THREADS``
                            threads that copy large reads on one host (a quarter of the processors, at most 4)
``KVXFER_NIXL_BAD_INPUT``   what the ``get_*_descs`` calls do with input that is no list of descriptors: ``none`` (the
                            default): they log it and return None, as NIXL does; ``raise``: they raise
``KVXFER_LANES``            the lanes that everything in the process may use
``NIXL_LOG_LEVEL``, ``NIXL_ETCD_*``, ``NIXL_TCPSTORE_*`` and most of ``NIXL_TELEMETRY_*`` mean what they mean to NIXL,
in NIXL's own file of settings too (:func:`with_file`); docs/nixl.md lists them all.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import tomllib
from collections.abc import Mapping

from kvxfer.config import DEFAULT_LANES, AgentConfig, allowed_lanes, checksum_mode, is_loopback
from kvxfer.errors import ConfigError
from kvxfer.types import ChecksumMode, ProgressMode

FILE = "/etc/nixl.cfg"
TRUE = frozenset({"y", "yes", "on", "1", "true", "enable", "enabled"})
FALSE = frozenset({"n", "no", "off", "0", "false", "disable", "disabled"})
MESSAGE_BYTES_MAX = 16 << 20
"""Of one notification."""
ENVELOPE_BYTES_MAX = 2048
QUEUE_BYTES_MAX = 256 << 20
"""Of notifications that wait for one agent."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """One agent's share of the environment, read when the agent is made."""

    host: str = "127.0.0.1"
    advertise: str = ""
    insecure: bool = False
    deadline_s: float = 600.0
    checksum: ChecksumMode = ChecksumMode.OFF
    stripes: int = 1
    copy_threads: int = 0
    none_for_bad_input: bool = True
    telemetry: bool | None = None
    """``None``: what the agent's own config says."""
    telemetry_dir: str = ""
    telemetry_exporter: str = ""
    telemetry_events: int = 4096
    telemetry_metrics: str = ""
    etcd_endpoints: str = ""
    etcd_namespace: str = "/nixl/agents/"
    tcpstore_endpoint: str = ""
    tcpstore_wait_s: float = 30.0
    tcpstore_answer_s: float = 5.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Raises ConfigError for a value that means nothing."""
        bad_input = environ.get("KVXFER_NIXL_BAD_INPUT", "").lower()
        if bad_input not in ("", "raise", "none"):
            raise ConfigError(f"KVXFER_NIXL_BAD_INPUT must be none or raise, not {bad_input!r}")
        if environ.get("KVXFER_NIXL_CHECKS"):
            raise ConfigError("KVXFER_NIXL_CHECKS is called KVXFER_NIXL_CHECKSUM now")
        deadline = environ.get("KVXFER_NIXL_DEADLINE_S") or "600"
        try:
            deadline_s = float(deadline)
        except ValueError:
            raise ConfigError(f"KVXFER_NIXL_DEADLINE_S must be a number of seconds, not {deadline!r}") from None
        return cls(
            host=environ.get("KVXFER_NIXL_HOST") or "127.0.0.1",
            advertise=environ.get("KVXFER_NIXL_ADVERTISE", ""),
            insecure=bool(_switch(environ, "KVXFER_NIXL_INSECURE")),
            deadline_s=deadline_s,
            checksum=checksum_mode("KVXFER_NIXL_CHECKSUM", environ.get("KVXFER_NIXL_CHECKSUM") or "off"),
            stripes=_number(environ, "KVXFER_NIXL_STRIPES", 1),
            copy_threads=_number(environ, "KVXFER_NIXL_COPY_THREADS", 0),
            none_for_bad_input=bad_input != "raise",
            telemetry=_switch(environ, "NIXL_TELEMETRY_ENABLE"),
            telemetry_dir=environ.get("NIXL_TELEMETRY_DIR", ""),
            telemetry_exporter=environ.get("NIXL_TELEMETRY_EXPORTER", ""),
            telemetry_events=_number(environ, "NIXL_TELEMETRY_BUFFER_SIZE", 4096),
            telemetry_metrics=environ.get("NIXL_TELEMETRY_ENABLED_METRICS", ""),
            etcd_endpoints=environ.get("NIXL_ETCD_ENDPOINTS", ""),
            etcd_namespace=environ.get("NIXL_ETCD_NAMESPACE") or "/nixl/agents/",
            tcpstore_endpoint=environ.get("NIXL_TCPSTORE_ENDPOINT", ""),
            tcpstore_wait_s=max(1, _number(environ, "NIXL_TCPSTORE_TIMEOUT_MS", 30000)) / 1000,
            tcpstore_answer_s=max(1, _number(environ, "NIXL_TCPSTORE_OP_TIMEOUT_MS", 5000)) / 1000,
        )

    def agent_config(self, environ: Mapping[str, str]) -> AgentConfig:
        """Raises ConfigError, also if KVXFER_LANES leaves no lane."""
        if not is_loopback(self.host) and not self.insecure:
            raise ConfigError(
                f"KVXFER_NIXL_HOST {self.host!r} is not loopback, and NIXL's metadata, which has the agent's key, "
                "is not encrypted: set KVXFER_NIXL_INSECURE=1 to accept that on a trusted network (insecure)"
            )
        return AgentConfig(
            bind_host=self.host,
            advertise_host=self.advertise,
            insecure=self.insecure,
            lanes=allowed_lanes(DEFAULT_LANES, environ),
            transfer_deadline_s=self.deadline_s,
            post_checksum=self.checksum,
            stripes=self.stripes,
            copy_threads=self.copy_threads,
            progress=ProgressMode.CALLER,  # programs of NIXL post small transfers, and poll for their end
            notifications_max=65536,
            notification_bytes_max=MESSAGE_BYTES_MAX + ENVELOPE_BYTES_MAX,
            notification_queue_bytes_max=QUEUE_BYTES_MAX,
        )


def with_file(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment, and behind it what NIXL's file of settings says of variables that are not set: the file that
    ``NIXL_CONFIG_FILE`` names, or ``.nixl.cfg`` of the home directory, or ``/etc/nixl.cfg``. It is TOML, with the
    variables' names as keys.

    A variable that is empty, in the environment or in the file, counts as not set. Raises ConfigError for a file that
    cannot be read, or that has a value that no variable can have.
    """
    named, home = environ.get("NIXL_CONFIG_FILE"), environ.get("HOME")
    places = [named] if named else [os.path.join(home, ".nixl.cfg"), FILE] if home else [FILE]
    for place in map(pathlib.Path, places):
        try:
            if not named and not place.exists():
                continue
            table = tomllib.loads(place.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"NIXL's settings in {str(place)!r} cannot be read: {error}") from None
        found = {name: _text(place, name, value) for name, value in table.items() if name.startswith("NIXL_")}
        return collections.ChainMap({name: value for name, value in environ.items() if value}, found)
    return environ


def _text(place: pathlib.Path, name: str, value: object) -> str:
    """A value from TOML as the text that the environment would have. Raises ConfigError."""
    text = "\0"  # not allowed, so this also means: no text
    if isinstance(value, str | int):
        with contextlib.suppress(ValueError):  # from a number of thousands of digits
            text = str(value)
    if "\0" in text:
        raise ConfigError(f"{name} in {str(place)!r} must be a text without NUL, a whole number, true or false")
    return text


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip() or str(default)
    if not (text.isascii() and text.isdecimal() and len(text) < 8):
        raise ConfigError(f"{name} must be a number, not {text!r}")
    return int(text)


def _switch(environ: Mapping[str, str], name: str) -> bool | None:
    text = environ.get(name, "").strip().lower()
    if not text:
        return None
    if text not in TRUE | FALSE:
        raise ConfigError(f"{name} must be yes or no, not {text!r}")
    return text in TRUE
