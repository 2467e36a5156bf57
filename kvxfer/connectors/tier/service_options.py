"""The settings of a ``kvxfer tier`` process; the command line makes its flags from these fields."""

from __future__ import annotations

import dataclasses

from kvxfer.config import AgentConfig, check_addresses, check_copy_threads, check_positive, is_loopback
from kvxfer.errors import ConfigError
from kvxfer.types import ChecksumMode, Exposure, Lane, check_agent_id

UNIT_BYTES_MIN = 4096


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclasses.dataclass(frozen=True)
class TierServiceOptions:
    """How one process keeps blocks. Raises ConfigError for a bad value."""

    capacity_bytes: int = dataclasses.field(metadata=_help("bytes of memory for blocks, all taken at the start"))
    unit_bytes: int = dataclasses.field(
        default=UNIT_BYTES_MIN, metadata=_help("blocks take whole units; every engine's block must be a multiple")
    )
    agent_id: str = dataclasses.field(default="tier-0", metadata=_help("name of this process's agent"))
    coordinator: str = dataclasses.field(
        default="",
        metadata=_help(
            "host:port of the coordinator, or of several with commas; empty: engines ask this process's HTTP port"
        ),
    )
    token_file: str = dataclasses.field(
        default="",
        metadata=_help("cluster token file; default $KVXFER_TOKEN_FILE or the state directory, made if missing"),
    )
    coordinator_ca_file: str = dataclasses.field(
        default="", metadata=_help("PEM file with the CAs of the coordinator's certificate; empty: no TLS")
    )
    coordinator_cert_file: str = dataclasses.field(
        default="", metadata=_help("PEM file with the certificate to show to the coordinator, in place of the token")
    )
    coordinator_key_file: str = dataclasses.field(
        default="", metadata=_help("PEM file with its key; empty: it is in coordinator_cert_file")
    )
    bind_host: str = dataclasses.field(default="127.0.0.1", metadata=_help("address on which engines reach the agent"))
    bind_port: int = dataclasses.field(default=0, metadata=_help("port of the agent; 0: any free one"))
    advertise_host: str = dataclasses.field(
        default="", metadata=_help("address that engines dial, if it is not bind_host")
    )
    insecure: bool = dataclasses.field(
        default=False,
        metadata=_help("allow --http-host beyond loopback although HTTP is plain, and sessions without OpenSSL"),
    )
    http_host: str = dataclasses.field(default="127.0.0.1", metadata=_help("address of the HTTP port"))
    http_port: int = dataclasses.field(
        default=0, metadata=_help("HTTP port with /metrics, /health and /metadata; 0: any free one")
    )
    lanes: tuple[Lane, ...] = dataclasses.field(default=AgentConfig.lanes, metadata=_help("allowed lanes, best first"))
    exposure: Exposure = dataclasses.field(
        default=Exposure.POOL, metadata=_help("what a reader could read: the whole pool, or only granted blocks")
    )
    checksum: ChecksumMode = dataclasses.field(
        default=ChecksumMode.OFF, metadata=_help("which transfers carry checksums")
    )
    copy_threads: int = dataclasses.field(
        default=AgentConfig.copy_threads, metadata=_help("threads that copy large blocks; 0: as many as are idle")
    )
    deadline_s: float = dataclasses.field(default=10.0, metadata=_help("bound of the pull of one block"))

    def __post_init__(self) -> None:
        check_agent_id(self.agent_id)
        check_positive("deadline_s", self.deadline_s, maximum=600.0)
        check_copy_threads("copy_threads", self.copy_threads)
        if self.coordinator:
            check_addresses("coordinator", self.coordinator)
        if self.unit_bytes < UNIT_BYTES_MIN or self.unit_bytes % UNIT_BYTES_MIN:
            raise ConfigError(f"unit_bytes must be a multiple of {UNIT_BYTES_MIN}, not {self.unit_bytes}")
        if self.capacity_bytes < self.unit_bytes:
            raise ConfigError(f"capacity_bytes must be at least unit_bytes, {self.unit_bytes}")
        if not 0 <= self.http_port < 65536:
            raise ConfigError(f"http_port must be 0 to 65535, not {self.http_port}")
        if not is_loopback(self.http_host) and not self.insecure:
            raise ConfigError(
                f"http_host {self.http_host!r} is not loopback, and HTTP is not encrypted there: --insecure accepts "
                "that, for a network that you trust"
            )
        _ = self.agent_config

    @property
    def agent_config(self) -> AgentConfig:
        """The part that the agent needs."""
        return AgentConfig(
            bind_host=self.bind_host,
            bind_port=self.bind_port,
            advertise_host=self.advertise_host,
            insecure=self.insecure,
            coordinator_ca_file=self.coordinator_ca_file,
            coordinator_cert_file=self.coordinator_cert_file,
            coordinator_key_file=self.coordinator_key_file,
            discovery=not self.coordinator,
            lanes=self.lanes,
            copy_threads=self.copy_threads,
            transfer_deadline_s=self.deadline_s,
            stall_s=0.5,
            reconnect_s=1.0,
        )
