"""The backend's settings, from environment variables: SGLang has no other place for the settings of a foreign backend.
Decides defaults and bounds, and refuses unknown variables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvxfer.config import AgentConfig, check_addresses, check_positive, checksum_mode
from kvxfer.errors import ConfigError
from kvxfer.types import ChecksumMode, Lane

PREFIX = "KVXFER_SGLANG_"
SECONDS = ("timeout_s", "unknown_wait_s", "engine_silent_s", "deadline_s")
"""Settings that are durations."""
RETIRED = {"checks": "checksum"}
"""Settings that have another name now."""
WAITS_MAX = 1 << 14
"""Prompts that all decode ranks together may await of one prefill rank."""
STALL_S = 0.5
RECONNECT_S = 1.0
"""With STALL_S: a peer that stopped is given up within 3 s."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of one engine; every rank has the same. Raises ConfigError naming the variable that is wrong."""

    host: str = AgentConfig.bind_host
    """Where this rank's agent listens."""
    advertise: str = ""
    """The host that peers dial, if it is another."""
    insecure: bool = False
    """Accept sessions with other hosts that are not encrypted: no OpenSSL, or ``KVXFER_ENCRYPT=never``."""
    coordinator: str = ""
    """``host:port`` of the coordinator, or of several with commas between, through which engines find each other;
    empty: by agent metadata over SGLang's own bootstrap."""
    token_file: str = ""
    """The cluster token; empty: the default place."""
    coordinator_ca_file: str = ""
    """PEM file with the CAs of the coordinator's certificate; empty: no TLS."""
    coordinator_cert_file: str = ""
    """PEM file with the certificate to show to the coordinator, in place of the token. Each rank's agent is called
    after its NAME, and some random letters."""
    coordinator_key_file: str = ""
    """PEM file with its key; empty: it is in ``coordinator_cert_file``."""
    lanes: tuple[Lane, ...] = AgentConfig.lanes
    """Allowed lanes, best first."""
    checksum: ChecksumMode = ChecksumMode.OFF
    """Which pages carry CRC-32C checksums."""
    stripes: int = AgentConfig.stripes
    timeout_s: float = 600.0
    """How long decode waits for a prompt that its prefill engine knows, if the request does not say."""
    unknown_wait_s: float = 2.0
    """How long another engine waits for a prompt that this engine has not heard of. This engine must have read its
    queue twice meanwhile, or be idle."""
    engine_silent_s: float = 10.0
    """A prefill engine that has work and makes no step for this time counts as gone."""
    deadline_s: float = 120.0
    """The bound of one chunk, from when it is granted."""

    def __post_init__(self) -> None:
        if self.coordinator:
            _named("coordinator", check_addresses, self.coordinator)
        elif self.coordinator_cert_file:
            raise ConfigError(f"{variable_of('coordinator_cert_file')} needs {variable_of('coordinator')}")
        if self.coordinator_ca_file and not self.coordinator_cert_file:
            raise ConfigError(f"{variable_of('coordinator_ca_file')} needs {variable_of('coordinator_cert_file')}")
        for name in SECONDS:
            value = getattr(self, name)
            _named(name, lambda shown, value=value: check_positive(shown, value, maximum=86400.0))
        try:
            self.agent_config()
        except ConfigError as error:
            raise ConfigError(f"{PREFIX}*: {error}") from None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Options:
        """What ``KVXFER_SGLANG_*`` say; one that is empty counts as unset."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for variable, text in sorted(environ.items()):
            if not variable.startswith(PREFIX) or not text:
                continue
            name = variable.removeprefix(PREFIX).lower()
            if name in RETIRED:
                raise ConfigError(f"{variable} is called {variable_of(RETIRED[name])} now")
            if name not in fields or variable != variable_of(name):
                known = ", ".join(variable_of(field) for field in fields)
                raise ConfigError(f"{variable} is not a setting; known are {known}")
            values[name] = _PARSERS[str(fields[name].type)](variable, text.strip())
        return cls(**values)

    def agent_config(self) -> AgentConfig:
        """Of the agent of one rank. Raises ConfigError."""
        return AgentConfig(
            lanes=self.lanes,
            bind_host=self.host,
            advertise_host=self.advertise,
            insecure=self.insecure,
            coordinator_ca_file=self.coordinator_ca_file,
            coordinator_cert_file=self.coordinator_cert_file,
            coordinator_key_file=self.coordinator_key_file,
            discovery=not self.coordinator,
            stripes=self.stripes,
            grant_wait_s=self.timeout_s,
            unknown_wait_s=self.unknown_wait_s,
            engine_silent_s=self.engine_silent_s,
            transfer_deadline_s=self.deadline_s,
            pull_wait_count_max=WAITS_MAX,
            stall_s=STALL_S,
            reconnect_s=RECONNECT_S,
        )


def variable_of(name: str) -> str:
    """The variable of a setting."""
    return PREFIX + name.upper()


def _named(name: str, check: Callable[..., None], *value: Any) -> None:
    check(variable_of(name), *value)


def _flag(variable: str, text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in known:
        raise ConfigError(f"{variable} must be 1 or 0, not {text!r}")
    return known[text.lower()]


def _whole(variable: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise ConfigError(f"{variable} must be a whole number, not {text!r:.100}")
    return int(text)


def _seconds(variable: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{variable} must be a number of seconds, not {text!r:.100}") from None


def _lanes(variable: str, text: str) -> tuple[Lane, ...]:
    try:
        return tuple(Lane(name.strip().lower()) for name in text.split(","))
    except ValueError:
        raise ConfigError(f"{variable} must name some of {', '.join(Lane)}, not {text!r:.100}") from None


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "str": lambda _, text: text,
    "bool": _flag,
    "int": _whole,
    "float": _seconds,
    "tuple[Lane, ...]": _lanes,
    "ChecksumMode": checksum_mode,
}
