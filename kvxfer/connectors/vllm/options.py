"""The connector's settings, from ``kv_connector_extra_config``. Decides defaults and bounds, and refuses unknown
keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvxfer.config import (
    AgentConfig,
    check_addresses,
    check_coordinator_files,
    check_copy_threads,
    check_positive,
    checksum_mode,
)
from kvxfer.connectors.vllm.params import DISCOVERED_RANKS_MAX
from kvxfer.errors import ConfigError
from kvxfer.types import ChecksumMode, Lane, Role, check_agent_id

_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
SECONDS = (
    *("kv_lease_duration", "kv_lease_max_s", "load_deadline_s", "grant_wait_s", "unknown_wait_s", "engine_silent_s"),
    *("room_wait_s", "idle_wait_s"),
)
"""Settings that are durations."""
RETIRED = {
    "pull_wait_s": "a request waits without blocks now, for a prompt that its source knows as long as its timeout_s or "
    "grant_wait_s says, and for one that it does not know as long as unknown_wait_s says: leave pull_wait_s out",
    "introductions": "it is called discovery now",
    "checks": "it is called checksum now",
    "hold_ttl_s": "it is called kv_lease_duration now, as in NixlConnector",
    "hold_life_max_s": "it is called kv_lease_max_s now",
}
"""Keys of former settings, and what replaces them."""
ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE, "kv_both": Role.BOTH}


@dataclasses.dataclass(frozen=True)
class ConnectorOptions:
    """Settings of one engine; every rank has the same. Raises ConfigError naming the one that is wrong."""

    role: Role
    agent_id: str
    """Of rank 0; the others add their rank."""
    coordinator: str
    """``host:port`` of the coordinator, or of several with commas between, through which
    engines find each other; empty with ``discovery``."""
    discovery: bool = False
    """Without a coordinator: answers carry this engine's signed agent metadata, and requests that of the sources."""
    token_file: str = ""
    """The cluster token; empty: the default place."""
    coordinator_ca_file: str = ""
    """PEM file with the CAs of the coordinator's certificate; empty: no TLS."""
    coordinator_cert_file: str = ""
    """PEM file with the certificate to show to the coordinator, in place of the token. It names ``agent_id``."""
    coordinator_key_file: str = ""
    """PEM file with its key; empty: it is in ``coordinator_cert_file``."""
    http_url: str = ""
    """Where this engine serves HTTP, for kvxfer's router."""
    lanes: tuple[Lane, ...] = AgentConfig.lanes
    """Allowed lanes, best first."""
    bind_host: str = AgentConfig.bind_host
    bind_port: int = 0
    """Of rank 0; rank r takes the r-th port after it. 0: any free ones."""
    advertise_host: str = ""
    insecure: bool = False
    """Accept sessions with other hosts that are not encrypted: no OpenSSL, or ``KVXFER_ENCRYPT=never``."""
    stripes: int = AgentConfig.stripes
    copy_threads: int = AgentConfig.copy_threads
    checksum: ChecksumMode = ChecksumMode.OFF
    """Which pages carry CRC-32C checksums."""
    kv_lease_duration: float = 10.0
    """Seconds that a computed prompt is kept for a reader that sends no heartbeat."""
    kv_lease_max_s: float = 600.0
    """Heartbeats keep it no longer than this."""
    load_deadline_s: float = 120.0
    """The bound of one load, from when its source has begun the prompt and vLLM has given it blocks."""
    grant_wait_s: float = 600.0
    """How long a request without ``timeout_s`` waits, without blocks, for a prompt that its source has not begun."""
    unknown_wait_s: float = 2.0
    """How long another engine waits for a prompt that this engine has not heard of. This engine must have read its
    queue twice meanwhile, or be idle."""
    engine_silent_s: float = 10.0
    """A source's engine counts as gone if it has work and makes no step, or says nothing, for this time."""
    room_wait_s: float = 2.0
    """In an engine of both roles: how long runnable requests wait for blocks while none are freed, before a kept prompt
    that no engine has begun to read is revoked."""
    overlap: bool = True
    """Announce blocks while the prompt is computed, layer by layer (concurrent requests)."""
    announce_layers: int = 0
    """Layers between two announcements; 0: an eighth of them."""
    staging_bytes: int = 1 << 30
    """Memory for blocks on their way from engines whose block or tensor parallel size is another."""
    idle_wait_s: float = 0.005
    """How long a step that computes nothing waits for a load to end."""
    huge_pages: bool = True
    """Move a KV cache in the host's memory into huge pages, in the background, when the engine starts."""
    record_digests: bool = False
    """Keep digests of the blocks of the last transfers, for tests."""

    def __post_init__(self) -> None:
        check_agent_id(self.agent_id)
        if bool(self.coordinator) == self.discovery:
            raise ConfigError("kv_connector_extra_config needs either coordinator: host:port, or discovery: true")
        if self.coordinator:
            check_addresses("coordinator", self.coordinator)
        elif self.http_url:
            raise ConfigError("http_url is for kvxfer's router, which finds engines by a coordinator")
        check_coordinator_files(self.coordinator_ca_file, self.coordinator_cert_file, self.coordinator_key_file)
        check_copy_threads("copy_threads", self.copy_threads)
        for name in SECONDS:
            check_positive(name, getattr(self, name), maximum=86400.0)
        if not 0 <= self.staging_bytes < 1 << 48:
            raise ConfigError(f"staging_bytes must be 0 to 2**48 - 1, not {self.staging_bytes}")
        if not 0 <= self.announce_layers < 1 << 16:
            raise ConfigError(f"announce_layers must be 0 to 65535, not {self.announce_layers}")

    @classmethod
    def from_config(cls, kv_role: str | None, engine_id: str | None, extra: Mapping[str, Any]) -> ConnectorOptions:
        """``kv_role`` and ``engine_id`` as vLLM has them; ``extra`` is ``kv_connector_extra_config``."""
        if kv_role not in ROLES:
            raise ConfigError(f"kv_role must be one of {', '.join(ROLES)}, not {kv_role!r}")
        values = {"agent_id": engine_id, "coordinator": "", **extra}
        fields = {field.name: field for field in dataclasses.fields(cls) if field.name != "role"}
        for name, value in values.items():
            if name in RETIRED:
                raise ConfigError(f"kv_connector_extra_config has {name!r}: {RETIRED[name]}")
            if name not in fields:
                raise ConfigError(f"kv_connector_extra_config has {name!r}; known are {', '.join(fields)}")
            if name == "lanes":
                values[name] = _lanes(value)
                continue
            if name == "checksum":
                values[name] = checksum_mode(name, value)
                continue
            kinds = _KINDS[str(fields[name].type)]
            if type(value) not in kinds:
                raise ConfigError(f"{name} must be {fields[name].type}, not {value!r}")
        return cls(role=ROLES[kv_role], **values)

    def check_front_end(self, parallel_config: Any) -> None:
        """Raise ConfigError if kvxfer's router could not name this engine behind ``http_url``: the router knows engines
        by their rank among all, and vLLM's hybrid load balancing numbers the engines of each node separately."""
        if self.http_url and getattr(parallel_config, "data_parallel_hybrid_lb", False):
            raise ConfigError(
                "kvxfer's router does not reach engines behind --data-parallel-hybrid-lb: leave http_url out, or "
                "balance internally or externally"
            )

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError for an engine of more ranks than one request has agent metadata of."""
        if self.discovery and ranks > DISCOVERED_RANKS_MAX:
            raise ConfigError(f"discovery is for at most {DISCOVERED_RANKS_MAX} ranks, not {ranks}: use a coordinator")

    def agent_config(self, rank: int) -> AgentConfig:
        """The settings of one rank's agent. A peer that stopped counts as gone within 3 s."""
        return AgentConfig(
            lanes=self.lanes,
            bind_host=self.bind_host,
            bind_port=self.bind_port + rank if self.bind_port else 0,
            advertise_host=self.advertise_host,
            insecure=self.insecure,
            coordinator_ca_file=self.coordinator_ca_file,
            coordinator_cert_file=self.coordinator_cert_file,
            coordinator_key_file=self.coordinator_key_file,
            discovery=self.discovery,
            stripes=self.stripes,
            copy_threads=self.copy_threads,
            grant_ttl_s=self.kv_lease_duration,
            grant_lifetime_max_s=max(self.kv_lease_duration, self.kv_lease_max_s),
            grant_wait_s=self.grant_wait_s,
            unknown_wait_s=self.unknown_wait_s,
            engine_silent_s=self.engine_silent_s,
            transfer_deadline_s=self.load_deadline_s,
            stall_s=0.5,
            reconnect_s=1.0,
        )


def _lanes(value: Any) -> tuple[Lane, ...]:
    names = value.split(",") if isinstance(value, str) else value
    try:
        return tuple(Lane(name) for name in names)
    except (ValueError, TypeError):
        raise ConfigError(f"lanes must name some of {', '.join(Lane)}, not {value!r}") from None
