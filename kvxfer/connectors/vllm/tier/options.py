"""The settings of a tier in vLLM's ``secondary_tiers``. Decides defaults and bounds, and refuses unknown keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvxfer.config import AgentConfig, check_addresses, check_coordinator_files, check_positive
from kvxfer.connectors.tier.file_store import THREADS_MAX
from kvxfer.errors import ConfigError
from kvxfer.types import Lane, check_agent_id

_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
OF_VLLM = frozenset({"type", "module_path", "backpressure", "locality"})


@dataclasses.dataclass(frozen=True)
class TierOptions:
    """One tier of one engine. Raises ConfigError naming the setting that is wrong."""

    store: str = "file"
    """``file``: a directory; ``pool``: the memory of a ``kvxfer tier`` process."""
    path: str = ""
    """Of ``file``: the directory. Data-parallel engines take a folder each below it."""
    capacity_bytes: int = 0
    """Of ``file``: its bound."""
    threads: int = 4
    """Of ``file``: threads that read and write."""
    service: str = ""
    """Of ``pool``: the agent of the ``kvxfer tier`` process."""
    coordinator: str = ""
    """Of ``pool``: ``host:port`` of the coordinator, or of several with commas between; or"""
    service_url: str = ""
    """the address of the service's HTTP port, where its signed agent metadata is."""
    token_file: str = ""
    """The cluster token; empty: the default place."""
    coordinator_ca_file: str = ""
    """PEM file with the CAs of the coordinator's certificate; empty: no TLS."""
    coordinator_cert_file: str = ""
    """PEM file with the certificate to show to the coordinator, in place of the token."""
    coordinator_key_file: str = ""
    """PEM file with its key; empty: it is in ``coordinator_cert_file``."""
    agent_id: str = ""
    """This engine's own agent; empty: one that is drawn."""
    lanes: tuple[Lane, ...] = AgentConfig.lanes
    bind_host: str = AgentConfig.bind_host
    advertise_host: str = ""
    insecure: bool = False
    """As the connector's: accept sessions with other hosts that are not encrypted."""
    lookup_wait_s: float = 1.0
    """A question to the service that is not answered in this time counts as a miss."""
    deadline_s: float = 10.0
    """The bound of the move of one block to or from the service."""
    window: int = 32
    """Blocks that are moved to or from the service at a time."""

    def __post_init__(self) -> None:
        if self.store == "file":
            if not self.path or self.capacity_bytes < 1:
                raise ConfigError("a tier with the store 'file' needs path and capacity_bytes")
        elif self.store == "pool":
            if not self.service or bool(self.coordinator) == bool(self.service_url):
                raise ConfigError("a tier with the store 'pool' needs service, and one of coordinator and service_url")
            check_agent_id(self.service)
        else:
            raise ConfigError(f"store must be 'file' or 'pool', not {self.store!r:.100}")
        if self.coordinator:
            check_addresses("coordinator", self.coordinator)
        check_coordinator_files(self.coordinator_ca_file, self.coordinator_cert_file, self.coordinator_key_file)
        if self.coordinator_cert_file and not self.agent_id:
            raise ConfigError("coordinator_cert_file needs agent_id: the certificate's name, or that name with '.tier'")
        if self.service_url and not self.service_url.startswith(("http://", "https://")):
            raise ConfigError(f"service_url must begin with http:// or https://, not {self.service_url!r:.100}")
        if self.agent_id:
            check_agent_id(self.agent_id)
        check_positive("threads", self.threads, maximum=THREADS_MAX)
        check_positive("lookup_wait_s", self.lookup_wait_s, maximum=600.0)
        check_positive("deadline_s", self.deadline_s, maximum=600.0)
        check_positive("window", self.window, maximum=1024)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> TierOptions:
        """From one entry of ``secondary_tiers``. Raises ConfigError for an unknown key or a value of another kind."""
        fields = {field.name: str(field.type) for field in dataclasses.fields(cls)}
        found: dict[str, Any] = {}
        for name, value in values.items():
            if name in OF_VLLM:
                continue
            if name not in fields:
                raise ConfigError(f"{name!r} is no setting of a kvxfer tier; it has {', '.join(sorted(fields))}")
            kinds = _KINDS.get(fields[name])
            if kinds is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
                raise ConfigError(f"{name} must be of type {fields[name]}, not {value!r:.100}")
            found[name] = _lanes(value) if name == "lanes" else value
        return cls(**found)


def _lanes(value: Any) -> tuple[Lane, ...]:
    try:
        lanes = tuple(Lane(name) for name in (value.split(",") if isinstance(value, str) else value))
    except (ValueError, TypeError):
        raise ConfigError(f"lanes must name some of {', '.join(Lane)}, not {value!r:.100}") from None
    if not lanes:
        raise ConfigError("lanes must name at least one lane")
    return lanes
