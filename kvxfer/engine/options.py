"""The worker's settings: every field is one flag of ``kvxfer worker``, with its help, its unit and its bound."""

from __future__ import annotations

import dataclasses
import os
import secrets
from typing import Any

from kvxfer.config import AgentConfig, check_addresses, check_coordinator_files, check_positive, is_loopback
from kvxfer.engine.request import FailurePolicy
from kvxfer.engine.scheduler import SchedulerLimits
from kvxfer.errors import ConfigError
from kvxfer.openai.transfer_params import BODY_BYTES_MAX, LEG_BYTES_MAX
from kvxfer.serving.limits import ServingLimits
from kvxfer.types import Lane, Role, check_agent_id

DEFAULTS = SchedulerLimits()
AGENT_DEFAULTS = AgentConfig()
DTYPES = ("float32", "bfloat16", "float16")


def _option(default: Any, text: str, choices: tuple[str, ...] = ()) -> Any:
    metadata = {"help": text, "choices": choices} if choices else {"help": text}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class WorkerOptions(ServingLimits):
    """What ``kvxfer worker`` is told; checked once, here. Raises ConfigError for a bad value."""

    role: Role = dataclasses.field(default=Role.BOTH, metadata={"help": "which part of a request this worker takes"})
    model: str = _option("smollm2-135m-instruct", "name of a known model, hub id, or directory of a Llama-family model")
    served_model_name: str = _option("", "name that clients use; empty means the model's own")
    host: str = _option(
        "127.0.0.1", "address to listen on, for HTTP and for transfers; other than loopback needs TLS or --insecure"
    )
    port: int = _option(0, "HTTP port; 0 takes a free one")
    data_port: int = _option(0, "port for transfers; 0 takes a free one")
    advertise_host: str = _option("", "host that others reach this worker by, where it is not --host")
    coordinator: str = _option(
        "", "host:port of the coordinator, or of several with commas; empty runs this worker alone, without transfers"
    )
    coordinator_ca_file: str = _option("", "PEM file with the CAs of the coordinator's certificate; empty: no TLS")
    coordinator_cert_file: str = _option(
        "", "PEM file with the certificate to show to the coordinator, in place of the token"
    )
    coordinator_key_file: str = _option("", "PEM file with its key; empty: it is in coordinator_cert_file")
    token_file: str = _option("", "file with the cluster token; empty means the default place")
    tls_cert_file: str = _option(
        "", "PEM file with the certificate of the HTTP port, and those that signed it; empty: no TLS"
    )
    tls_key_file: str = _option("", "PEM file with the certificate's key; empty: it is in tls_cert_file")
    tls_client_ca_file: str = _option(
        "", "PEM file with the CAs of callers' certificates: routers, and no others, then send requests"
    )
    revoked_file: str = _option(
        "", "file with identities and fingerprints of callers' certificates that count no more, one a line"
    )
    leg_keys: bool = _option(
        True, "without tls_client_ca_file: take requests only with a key that the coordinator hands out to routers"
    )
    leg_key_file: str = _option(
        "", "file with keys, one a line, one of which a router shows; beside those of the coordinator"
    )
    agent_id: str = _option("", "name among the workers; empty means the role and some random letters")
    block_tokens: int = _option(16, "tokens a KV block")
    pool_blocks: int = _option(0, "KV blocks of the pool; 0 takes as many as --kv-cache-mb holds")
    kv_cache_mb: int = _option(512, "size of the KV pool in MiB, where --pool-blocks is 0")
    chunk_tokens: int = _option(
        DEFAULTS.chunk_tokens, "most prompt tokens of one request in a step; announced together"
    )
    max_batch_tokens: int = _option(DEFAULTS.max_batch_tokens, "most tokens in a step")
    max_running: int = _option(DEFAULTS.max_running, "most requests that compute at once")
    max_waiting: int = _option(DEFAULTS.max_waiting, "most requests that wait; more are answered 503")
    threads: int = _option(0, "compute threads; 0 takes --cores shared among --host-workers")
    cores: int = _option(0, "cores of this machine to share; 0 takes all that this process may use")
    host_workers: int = _option(1, "workers that share the cores")
    on_transfer_failure: FailurePolicy = dataclasses.field(
        default=FailurePolicy.RECOMPUTE,
        metadata={"help": "recompute: compute the prompt here when its transfer fails; fail: answer the error"},
    )
    lanes: tuple[Lane, ...] = _option(AGENT_DEFAULTS.lanes, "lanes to use, best first")
    grant_ttl_s: float = _option(
        AGENT_DEFAULTS.grant_ttl_s, "how long a prompt is kept for a reader that sends no heartbeat"
    )
    transfer_deadline_s: float = _option(
        AGENT_DEFAULTS.transfer_deadline_s, "longest time for one transfer, from its grant on"
    )
    grant_wait_s: float = _option(
        AGENT_DEFAULTS.grant_wait_s, "how long a decode leg that names no timeout_s waits for its grant"
    )
    unknown_wait_s: float = _option(
        AGENT_DEFAULTS.unknown_wait_s, "how long a pull of a prompt that this worker was never asked for may wait"
    )
    engine_silent_s: float = _option(
        AGENT_DEFAULTS.engine_silent_s, "a prefill worker that has work and makes no step for so long counts as gone"
    )
    room_wait_s: float = _option(
        2.0, "how long a request waits for freed blocks before a prompt kept for another worker is revoked"
    )
    runtime_dir: str = _option("", "directory for the agent's Unix socket; empty: a default one")
    dtype: str = _option("float32", "type of weights and KV", DTYPES)
    device: str = _option("cpu", "torch device that computes")
    max_body_bytes: int = _option(
        BODY_BYTES_MAX + LEG_BYTES_MAX,
        f"longest request body; a router in front needs one that is {LEG_BYTES_MAX} bytes shorter",
    )
    shutdown_grace_s: float = _option(5.0, "how long requests in flight may go on after a stop was asked for")
    record_block_digests: bool = _option(
        False, "hash every committed block, and show the hashes at /debug/block-digests"
    )
    insecure: bool = _option(False, "listen beyond loopback without TLS")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("port", "data_port"):
            if not 0 <= getattr(self, name) < 65536:
                raise ConfigError(f"{name} must be 0 to 65535, not {getattr(self, name)}")
        for name in ("pool_blocks", "threads", "cores"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, not {getattr(self, name)}")
        check_positive("block_tokens", self.block_tokens, maximum=1024)
        check_positive("kv_cache_mb", self.kv_cache_mb, maximum=1 << 24)
        check_positive("room_wait_s", self.room_wait_s, maximum=86400.0)
        check_positive("host_workers", self.host_workers, maximum=1024)
        if not 0 <= self.shutdown_grace_s <= 3600:
            raise ConfigError(f"shutdown_grace_s must be 0 to 3600, not {self.shutdown_grace_s}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.agent_id:
            check_agent_id(self.agent_id)
        if self.coordinator:
            check_addresses("coordinator", self.coordinator)
        check_coordinator_files(self.coordinator_ca_file, self.coordinator_cert_file, self.coordinator_key_file)
        for name, needed in (
            *(("tls_key_file", "tls_cert_file"), ("tls_client_ca_file", "tls_cert_file")),
            ("revoked_file", "tls_client_ca_file"),
        ):
            if getattr(self, name) and not getattr(self, needed):
                raise ConfigError(f"{name} needs {needed}")
        if self.tls_client_ca_file and self.leg_key_file:
            raise ConfigError("leg_key_file counts nothing beside tls_client_ca_file: callers show certificates")
        if not self.insecure and not is_loopback(self.host):
            self._check_reachable()
        self.limits()
        self.agent_config()

    def _check_reachable(self) -> None:
        """Raise ConfigError where others than routers could use the HTTP port, or read along."""
        if not self.tls_cert_file:
            raise ConfigError(
                f"host {self.host!r} is not loopback and there is no TLS: give tls_cert_file and "
                "tls_client_ca_file, or pass --insecure"
            )
        if not self.tls_client_ca_file and not self.leg_key_file and not (self.coordinator and self.leg_keys):
            raise ConfigError(
                f"host {self.host!r} is not loopback, and everybody there could send requests: give "
                "tls_client_ca_file or leg_key_file, or pass --insecure"
            )

    def limits(self) -> SchedulerLimits:
        """What the scheduler is bound by."""
        return SchedulerLimits(
            max_batch_tokens=self.max_batch_tokens,
            chunk_tokens=self.chunk_tokens,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
        )

    def agent_config(self) -> AgentConfig:
        """How this worker's agent behaves."""
        return AgentConfig(
            bind_host=self.host,
            bind_port=self.data_port,
            advertise_host=self.advertise_host,
            insecure=self.insecure,
            coordinator_ca_file=self.coordinator_ca_file,
            coordinator_cert_file=self.coordinator_cert_file,
            coordinator_key_file=self.coordinator_key_file,
            lanes=self.lanes,
            runtime_dir=self.runtime_dir,
            grant_ttl_s=self.grant_ttl_s,
            transfer_deadline_s=self.transfer_deadline_s,
            grant_wait_s=self.grant_wait_s,
            unknown_wait_s=self.unknown_wait_s,
            engine_silent_s=self.engine_silent_s,
        )

    def new_agent_id(self) -> str:
        """The agent id given, or a fresh one."""
        return self.agent_id or f"{self.role}-{secrets.token_hex(4)}"

    def thread_count(self) -> int:
        """Compute threads of this worker."""
        return self.threads or max(1, (self.cores or len(os.sched_getaffinity(0))) // self.host_workers)

    def block_count(self, block_bytes: int) -> int:
        """Blocks of the pool, each ``block_bytes`` long; raise ConfigError where not even one fits."""
        count = self.pool_blocks or (self.kv_cache_mb << 20) // block_bytes
        if count < 1:
            raise ConfigError(f"kv_cache_mb {self.kv_cache_mb} does not hold one block of {block_bytes} bytes")
        return count
