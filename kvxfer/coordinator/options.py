"""The coordinator's settings; the command line makes its flags from these fields. Must never know a flag."""

from __future__ import annotations

import dataclasses

from kvxfer.config import CoordinatorConfig, check_address, check_positive, is_loopback
from kvxfer.errors import ConfigError
from kvxfer.protocol.http_url import HostList

DEFAULTS = CoordinatorConfig()
LEG_KEY_PERIOD_MIN_S = 1.0
"""So much longer than the way of a new key to workers and routers."""


def check_store(name: str, value: str) -> None:
    """Raise ConfigError unless ``value`` names a store."""
    kind, _, rest = value.partition(":")
    if value == "memory" or (kind == "sqlite" and rest):
        return
    if kind != "etcd" or not rest:
        raise ConfigError(f"{name} must be memory, sqlite:PATH or etcd:HOST:PORT,..., not {value!r:.100}")
    for endpoint in rest.split(","):
        check_address(f"{name}, after etcd:,", endpoint)


@dataclasses.dataclass(frozen=True)
class CoordinatorOptions:
    """How one coordinator process runs. Raises ConfigError for a bad value."""

    host: str = dataclasses.field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = dataclasses.field(default=0, metadata={"help": "port to listen on; 0: any free one"})
    token_file: str = dataclasses.field(
        default="",
        metadata={"help": "cluster token file, made if missing; default $KVXFER_TOKEN_FILE or the state directory"},
    )
    tls_cert_file: str = dataclasses.field(
        default="",
        metadata={"help": "PEM file with this coordinator's certificate, and those that signed it; empty: no TLS"},
    )
    tls_key_file: str = dataclasses.field(
        default="", metadata={"help": "PEM file with the certificate's key; empty: it is in tls_cert_file"}
    )
    tls_client_ca_file: str = dataclasses.field(
        default="", metadata={"help": "PEM file with the CAs of callers' certificates, which TLS always asks for"}
    )
    revoked_file: str = dataclasses.field(
        default="",
        metadata={"help": "file with identities and fingerprints of certificates that count no more, one a line"},
    )
    insecure: bool = dataclasses.field(default=False, metadata={"help": "listen beyond loopback without TLS"})
    metrics_port: int | None = dataclasses.field(
        default=None, metadata={"help": "serve Prometheus metrics over HTTP on this port; 0: any free one"}
    )
    store: str = dataclasses.field(
        default="memory",
        metadata={
            "help": "what outlives this process: memory (nothing), sqlite:PATH (durable, one coordinator), or "
            "etcd:HOST:PORT,HOST:PORT (several coordinators)"
        },
    )
    store_ca_file: str = dataclasses.field(
        default="", metadata={"help": "PEM file with the CAs of etcd's certificates; empty: no TLS to etcd"}
    )
    store_cert_file: str = dataclasses.field(
        default="", metadata={"help": "PEM file with the certificate to show to etcd; empty: none"}
    )
    store_key_file: str = dataclasses.field(
        default="", metadata={"help": "PEM file with that certificate's key; empty: it is in store_cert_file"}
    )
    advertise_address: str = dataclasses.field(
        default="",
        metadata={"help": "host:port at which other coordinators reach this one, where that is not --host and --port"},
    )
    heartbeat_s: float = dataclasses.field(
        default=DEFAULTS.heartbeat_s, metadata={"help": "seconds between two heartbeats of an agent"}
    )
    suspect_after_s: float = dataclasses.field(
        default=DEFAULTS.suspect_after_s, metadata={"help": "seconds of silence after which an agent gets no new work"}
    )
    dead_after_s: float = dataclasses.field(
        default=DEFAULTS.dead_after_s, metadata={"help": "seconds of silence after which an agent is gone"}
    )
    members_max: int = dataclasses.field(default=DEFAULTS.members_max, metadata={"help": "most agents at a time"})
    heartbeats_a_s_max: float = dataclasses.field(
        default=DEFAULTS.heartbeats_a_s_max,
        metadata={"help": "heartbeats of all agents in a second; with more agents each is told a longer interval"},
    )
    whole_view_max: int = dataclasses.field(
        default=256,
        metadata={"help": "members beyond which an agent is told of those only that it asks for, or that ask for it"},
    )
    watchers_max: int = dataclasses.field(default=1024, metadata={"help": "most membership watchers at a time"})
    allow_http_host: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata={
            "help": "hosts that a worker may say it serves HTTP at, beside the one that it registers from: addresses, "
            "networks, names, or *.name for all below one"
        },
    )
    leg_key_period_s: float = dataclasses.field(
        default=86400.0,
        metadata={"help": "seconds after which routers show other keys to workers; of all coordinators the same"},
    )
    stop_grace_s: float = dataclasses.field(
        default=2.0, metadata={"help": "seconds that streams get to end when the coordinator stops"}
    )

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 65536:
                raise ConfigError(f"{name} must be 0 to 65535, not {value}")
        check_positive("watchers_max", self.watchers_max, maximum=1 << 16)
        if self.whole_view_max < 0:
            raise ConfigError(f"whole_view_max must be 0 or more, not {self.whole_view_max}")
        check_positive("stop_grace_s", self.stop_grace_s, maximum=60.0)
        check_positive("leg_key_period_s", self.leg_key_period_s, maximum=366 * 86400.0)
        if self.leg_key_period_s < LEG_KEY_PERIOD_MIN_S:
            raise ConfigError(
                f"leg_key_period_s must be at least {LEG_KEY_PERIOD_MIN_S:g}, not {self.leg_key_period_s}"
            )
        for name, needed in (
            ("tls_key_file", "tls_cert_file"),
            ("tls_client_ca_file", "tls_cert_file"),
            ("tls_cert_file", "tls_client_ca_file"),
            ("revoked_file", "tls_cert_file"),
            ("store_cert_file", "store_ca_file"),
            ("store_key_file", "store_cert_file"),
        ):
            if getattr(self, name) and not getattr(self, needed):
                raise ConfigError(f"{name} needs {needed}")
        if not is_loopback(self.host) and not self.tls_cert_file and not self.insecure:
            raise ConfigError(
                f"host {self.host!r} is not loopback and there is no TLS: token and session keys would cross the "
                "network in the clear; give tls_cert_file and tls_client_ca_file (`kvxfer certs` makes them), or pass "
                "--insecure on a network that you trust"
            )
        check_store("store", self.store)
        if self.store_ca_file and not self.store.startswith("etcd:"):
            raise ConfigError(f"store_ca_file is for a store in etcd, not for {self.store!r:.100}")
        if self.advertise_address:
            check_address("advertise_address", self.advertise_address)
        HostList("allow_http_host", self.allow_http_host)
        _ = self.config

    @property
    def config(self) -> CoordinatorConfig:
        """The part that the directory needs."""
        return CoordinatorConfig(
            self.heartbeat_s, self.suspect_after_s, self.dead_after_s, self.members_max, self.heartbeats_a_s_max
        )
