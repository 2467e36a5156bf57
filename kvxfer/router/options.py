"""The router's settings: every field is one flag of ``kvxfer router``, with its help, its unit and its bound."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvxfer.config import check_addresses, check_coordinator_files, check_positive, is_loopback
from kvxfer.errors import ConfigError
from kvxfer.policy.chooser import Policy
from kvxfer.protocol.http_url import HostList
from kvxfer.router.cors import Cors
from kvxfer.router.headers import check_passed
from kvxfer.router.pass_rules import read_rules
from kvxfer.serving.limits import ServingLimits

DIALECTS = ("vllm", "vllm-mooncake", "vllm-kvxfer", "sglang", "kvxfer")
LOCAL_PREFILL = ("on", "off")
POLICIES = tuple(policy.value for policy in Policy)
PROCESSES_MAX = 64
PREFILL_FAILURE = ("leave", "redispatch")
WORKER_NAMES = ("hosts", "identities")


def _option(default: Any, text: str, choices: tuple[str, ...] = ()) -> Any:
    metadata = {"help": text, "choices": choices} if choices else {"help": text}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class RouterOptions(ServingLimits):
    """What ``kvxfer router`` is told; checked once, here."""

    host: str = _option("127.0.0.1", "address to listen on; anything but loopback needs TLS, or --insecure")
    port: int = _option(0, "port to listen on; 0 takes a free one")
    workers: int = _option(1, "processes that serve requests; each takes connections from the same socket")
    coordinator: str = _option(
        "", "host:port of the coordinator (or of several, with commas) that names the workers; empty: none is asked"
    )
    prefill: tuple[str, ...] = _option((), "URL of a prefill worker; may be repeated")
    decode: tuple[str, ...] = _option((), "URL of a decode worker; may be repeated")
    engine: tuple[str, ...] = _option((), "URL of an engine that serves whole requests; may be repeated")
    dialect: str = _option("vllm", "how the workers of --prefill and --decode are asked", DIALECTS)
    workers_file: str = _option("", "YAML file with workers; it is read again when it changes")
    coordinator_ca_file: str = _option("", "PEM file with the CAs of the coordinator's certificate; empty: no TLS")
    coordinator_cert_file: str = _option(
        "", "PEM file with the certificate to show to the coordinator, in place of the token"
    )
    coordinator_key_file: str = _option("", "PEM file with its key; empty: it is in coordinator_cert_file")
    token_file: str = _option("", "file with the cluster token; empty means the default place")
    api_key_file: str = _option(
        "", "file with the API keys that clients may use: one a line, or YAML with limits; empty asks for none"
    )
    kubernetes_selector: str = _option(
        "", "label selector of the EndpointSlices that name workers; empty: Kubernetes is not asked"
    )
    kubernetes_api: str = _option("", "https:// URL of Kubernetes' API server; empty: as a pod is told")
    kubernetes_namespace: str = _option("", "namespace of the EndpointSlices; empty: the pod's own")
    kubernetes_token_file: str = _option("", "file with the token for the API server; empty: the pod's own")
    kubernetes_ca_file: str = _option("", "file with the API server's CA; empty: the pod's own")
    admin_key_file: str = _option(
        "", "file with the keys that open the admin routes, one a line; empty: they are open on loopback only"
    )
    local_prefill: str = _option(
        "on", "on: a decode worker may compute the prompt itself; off: answer 503 instead", LOCAL_PREFILL
    )
    policy: str = _option(
        "least-loaded",
        "how workers are chosen: seconds weighs prefixes, queues and transfers by times that it learns",
        POLICIES,
    )
    part_prefixes: bool = _option(
        False, "holders of different API keys share no prefix in the router's eyes; for engines that salt by tenant"
    )
    min_remote_prefill_tokens: int = _option(
        -1, "prompts shorter than this are computed where they are decoded; -1: as --policy finds it cheaper"
    )
    on_prefill_failure: str = _option(
        "leave", "leave: the decode worker recomputes by itself; redispatch: start again elsewhere", PREFILL_FAILURE
    )
    max_inflight: int = _option(1024, "requests served at once, from when their body is there; more are answered 503")
    max_answer_bytes: int = _option(64 << 20, "longest answer of a worker, or longest event of a streamed one")
    attempts_max: int = _option(3, "how often one request is tried in all")
    retry_share: float = _option(0.2, "retries that each request earns; the budget of all retries together")
    retry_floor_per_s: float = _option(5.0, "retries that each second earns, however few requests there are")
    recompute_per_s: float = _option(
        1.0, "prompts a second that one decode worker may compute itself because the prefill worker was lost"
    )
    request_timeout_s: float = _option(
        600.0, "longest time from a request's arrival until its answer begins, and of every silence after that"
    )
    total_timeout_s: float = _option(0.0, "longest time from a request's arrival to its answer's last byte; 0: none")
    connect_timeout_s: float = _option(2.0, "longest time until a worker takes a connection")
    send_timeout_s: float = _option(30.0, "longest time until a worker has taken a request's bytes")
    first_byte_timeout_s: float = _option(
        600.0, "longest time from a request's last byte to its answer's first, its wait in the worker's queue included"
    )
    token_timeout_s: float = _option(
        60.0,
        "silence of a stream after which it is given up, unless its worker answers others or counts more tokens",
    )
    keepalive_s: float = _option(
        0.0, "longest silence towards the client of a stream: a comment is sent then, before its answer too; 0: none"
    )
    failures_to_eject: int = _option(3, "failed requests in a row after which a worker is ejected")
    eject_base_s: float = _option(0.25, "how long an ejected worker is left alone before it is probed, the first time")
    eject_cap_s: float = _option(5.0, "how long an ejected worker is left alone before it is probed, at most")
    slow_start_s: float = _option(10.0, "how long a worker that came back gets less than its share")
    probe_s: float = _option(1.0, "how often workers are probed that no coordinator watches")
    shutdown_grace_s: float = _option(25.0, "how long requests in flight may go on after a stop was asked for")
    forward_authorization: bool = _option(
        False, "pass the client's Authorization header on to the workers; otherwise it ends here"
    )
    forward_header: tuple[str, ...] = _option((), "names of clients' headers that go on to the workers")
    pass_through: tuple[str, ...] = _option(
        (),
        "PATH=POOL: requests for PATH, or below it where it ends with /, go to one worker of POOL as they are; POOL is "
        "prefill, decode, engine, or a model's name; may be repeated",
    )
    allow_http_host: tuple[str, ...] = _option(
        (), "hosts that requests are sent to, as addresses, networks or names; empty: what the coordinator let in"
    )
    tls_cert_file: str = _option("", "PEM file with the certificate, and those that signed it; empty: no TLS")
    tls_key_file: str = _option("", "PEM file with the certificate's key; empty: it is in tls_cert_file")
    tls_client_ca_file: str = _option("", "PEM file with the CAs of clients' certificates; empty asks for none")
    worker_ca_file: str = _option("", "PEM file with the CAs of https:// workers; empty: the system's")
    worker_cert_file: str = _option("", "PEM file with the certificate to show to https:// workers; empty: none")
    worker_key_file: str = _option("", "PEM file with that certificate's key; empty: it is in worker_cert_file")
    worker_names: str = _option(
        "hosts",
        "hosts: the certificate of an https:// worker names its address; identities: its agent, as kvxfer://...",
        WORKER_NAMES,
    )
    worker_api_key_file: str = _option(
        "", "file with the API key that workers ask for, shown to all of them; empty: they are shown none of ours"
    )
    leg_key_file: str = _option(
        "", "file with keys, of which the first is shown to workers for which the coordinator hands out none"
    )
    cors_origin: tuple[str, ...] = _option(
        (), "origin whose pages may read answers, as https://app.example.com, or *; may be repeated"
    )
    cors_credentials: bool = _option(False, "let those pages send credentials; not with *")
    insecure: bool = _option(False, "listen beyond loopback without TLS")
    accounts: bool = _option(True, "tell a client that asks (x-kvxfer-account: 1) where its request's time went")
    otlp_endpoint: str = _option(
        "", "http:// or https:// URL of an OpenTelemetry collector; empty: as OTEL_ variables say, or no spans"
    )
    otlp_share: float = _option(1.0, "share of the requests that are traced, of those whose client does not say it")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be 0 to 65535, not {self.port}")
        check_positive("workers", self.workers, maximum=PROCESSES_MAX)
        if self.coordinator:
            check_addresses("coordinator", self.coordinator)
        check_coordinator_files(self.coordinator_ca_file, self.coordinator_cert_file, self.coordinator_key_file)
        if self.local_prefill not in LOCAL_PREFILL:
            raise ConfigError(f"local_prefill must be one of {', '.join(LOCAL_PREFILL)}, not {self.local_prefill!r}")
        if self.on_prefill_failure not in PREFILL_FAILURE:
            raise ConfigError(
                f"on_prefill_failure must be one of {', '.join(PREFILL_FAILURE)}, not {self.on_prefill_failure!r}"
            )
        if self.worker_names not in WORKER_NAMES:
            raise ConfigError(f"worker_names must be one of {', '.join(WORKER_NAMES)}, not {self.worker_names!r}")
        if self.worker_names == "identities" and not (self.worker_ca_file and self.worker_cert_file):
            raise ConfigError("worker_names identities needs worker_ca_file and worker_cert_file")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if self.min_remote_prefill_tokens < -1:
            raise ConfigError(f"min_remote_prefill_tokens must be -1 or more, not {self.min_remote_prefill_tokens}")
        for name in (
            *("request_timeout_s", "send_timeout_s", "first_byte_timeout_s", "token_timeout_s"),
            *("eject_base_s", "eject_cap_s", "slow_start_s", "probe_s"),
        ):
            check_positive(name, getattr(self, name), maximum=86400.0)
        if not 0 <= self.total_timeout_s <= 86400.0 * 7:
            raise ConfigError(f"total_timeout_s must be 0 to {86400 * 7}, not {self.total_timeout_s}")
        if not 0 <= self.keepalive_s <= 3600.0:
            raise ConfigError(f"keepalive_s must be 0 to 3600, not {self.keepalive_s}")
        check_positive("connect_timeout_s", self.connect_timeout_s, maximum=30.0)
        check_positive("shutdown_grace_s", self.shutdown_grace_s, maximum=3600.0)
        check_positive("max_inflight", self.max_inflight, maximum=1 << 20)
        check_positive("failures_to_eject", self.failures_to_eject, maximum=1000)
        check_positive("attempts_max", self.attempts_max, maximum=100)
        check_positive("max_answer_bytes", self.max_answer_bytes, maximum=1 << 30)
        if self.eject_base_s > self.eject_cap_s:
            raise ConfigError(f"eject_base_s {self.eject_base_s} must not exceed eject_cap_s {self.eject_cap_s}")
        for name in ("retry_share", "retry_floor_per_s", "recompute_per_s"):
            if not 0 <= getattr(self, name) <= 1e6:
                raise ConfigError(f"{name} must be 0 to 1e6, not {getattr(self, name)}")
        if not 0 <= self.otlp_share <= 1:
            raise ConfigError(f"otlp_share must be 0 to 1, not {self.otlp_share}")
        HostList("allow_http_host", self.allow_http_host)
        check_passed(self.forward_header)
        read_rules(self.pass_through)
        Cors(self.cors_origin, allows_credentials=self.cors_credentials)
        for name, needed in (
            *(("tls_key_file", "tls_cert_file"), ("tls_client_ca_file", "tls_cert_file")),
            ("worker_key_file", "worker_cert_file"),
        ):
            if getattr(self, name) and not getattr(self, needed):
                raise ConfigError(f"{name} needs {needed}")
        if not self.insecure and not self.tls_cert_file and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host!r} is not loopback and there is no TLS: give tls_cert_file, or pass --insecure"
            )

    @property
    def names_a_source(self) -> bool:
        """Whether anything says which workers there are."""
        named = (self.coordinator, self.prefill, self.decode, self.engine, self.workers_file, self.kubernetes_selector)
        return any(named)

    @property
    def allows_local_prefill(self) -> bool:
        return self.local_prefill == "on"
