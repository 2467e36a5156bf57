"""The connector's settings, from ``kv_connector_extra_config``. Decides defaults and bounds; an unknown key is
refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvxfer.config import AgentConfig, check_address, check_checksum_mode, check_copy_threads, check_positive
from kvxfer.connectors.vllm.params import CARDS_MAX
from kvxfer.errors import ConfigError
from kvxfer.types import Lane, Role, check_agent_id

_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
SECONDS = (
    *("hold_ttl_s", "hold_life_max_s", "load_deadline_s", "grant_wait_s", "unknown_wait_s", "engine_silent_s"),
    *("room_wait_s", "idle_wait_s"),
)
"""Settings that are durations."""
RETIRED = {
    "pull_wait_s": "a request waits without blocks now, for a prompt that its source knows as long as its timeout_s or "
    "grant_wait_s says, and for one that it does not know as long as unknown_wait_s says: leave pull_wait_s out"
}
"""Keys that were settings, and what to do instead."""
ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE, "kv_both": Role.BOTH}


@dataclasses.dataclass(frozen=True)
class ConnectorOptions:
    """Settings of one engine; every rank has the same. Raises ConfigError naming the one that is wrong."""

    role: Role
    agent_id: str
    """Of rank 0; the others add their rank."""
    coordinator: str
    """``host:port`` of the coordinator, through which engines find each other; empty with ``introductions``."""
    introductions: bool = False
    """Instead of a coordinator: introduce this engine by what it answers, and know others by theirs."""
    token_file: str = ""
    """The cluster token; empty: the default place."""
    http_url: str = ""
    """Where this engine serves HTTP, for kvxfer's router."""
    lanes: tuple[Lane, ...] = AgentConfig.lanes
    """Allowed lanes, best first."""
    bind_host: str = AgentConfig.bind_host
    bind_port: int = 0
    """Of rank 0; rank r takes the r-th port after it. 0: any free ones."""
    advertise_host: str = ""
    insecure: bool = False
    """Accept that lane ``stream`` does not encrypt, on a network that is trusted."""
    stripes: int = AgentConfig.stripes
    copy_threads: int = AgentConfig.copy_threads
    checks: str = "off"
    """CRC-32Cs over pages: a ChecksumMode."""
    hold_ttl_s: float = 10.0
    """How long a computed prompt waits for a reader that gives no sign of life."""
    hold_life_max_s: float = 600.0
    """No sign of life keeps it longer."""
    load_deadline_s: float = 120.0
    """Of one load, which begins when the source has begun the prompt and vLLM has given it blocks."""
    grant_wait_s: float = 600.0
    """How long a request waits, without blocks, for a prompt that its source has not begun, where it does not say so
    itself (``timeout_s``)."""
    unknown_wait_s: float = 2.0
    """How long this engine may not have heard of a prompt that another awaits; it must have taken in its queue twice,
    or be idle."""
    engine_silent_s: float = 10.0
    """A source's engine that has work and began no step for so long, or said nothing, is given up."""
    room_wait_s: float = 2.0
    """In an engine of both roles: how long what may run waits for blocks while none come back, before a prompt that
    nobody has begun to read is taken back."""
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
        if bool(self.coordinator) == self.introductions:
            raise ConfigError("kv_connector_extra_config needs either coordinator: host:port, or introductions: true")
        if self.coordinator:
            check_address("coordinator", self.coordinator)
        elif self.http_url:
            raise ConfigError("http_url is for kvxfer's router, which finds engines by a coordinator")
        check_checksum_mode("checks", self.checks)
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
            kinds = _KINDS[str(fields[name].type)]
            if type(value) not in kinds:
                raise ConfigError(f"{name} must be {fields[name].type}, not {value!r}")
        return cls(role=ROLES[kv_role], **values)

    def check_front_end(self, parallel_config: Any) -> None:
        """Raise ConfigError where kvxfer's router could not say which engine behind ``http_url`` it means: it knows
        engines by their rank among all, and vLLM's hybrid load balancing numbers those of each node anew."""
        if self.http_url and getattr(parallel_config, "data_parallel_hybrid_lb", False):
            raise ConfigError(
                "kvxfer's router does not reach engines behind --data-parallel-hybrid-lb: leave http_url out, or "
                "balance internally or externally"
            )

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError for an engine of more ranks than one request can introduce."""
        if self.introductions and ranks > CARDS_MAX:
            raise ConfigError(f"introductions are for at most {CARDS_MAX} ranks, not {ranks}: use a coordinator")

    def agent_config(self, rank: int) -> AgentConfig:
        """Of the agent of one rank. A peer that stopped is given up within 3 s."""
        return AgentConfig(
            lanes=self.lanes,
            bind_host=self.bind_host,
            bind_port=self.bind_port + rank if self.bind_port else 0,
            advertise_host=self.advertise_host,
            insecure=self.insecure,
            introductions=self.introductions,
            stripes=self.stripes,
            copy_threads=self.copy_threads,
            grant_ttl_s=self.hold_ttl_s,
            grant_lifetime_max_s=max(self.hold_ttl_s, self.hold_life_max_s),
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
