"""The router's settings: every field is one flag of ``kvxfer router``, with its help, its unit and its bound."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvxfer.config import check_address, check_positive, is_loopback
from kvxfer.errors import ConfigError
from kvxfer.protocol.http_url import HostList
from kvxfer.serving.limits import ServingLimits

LOCAL_PREFILL = ("on", "off")
PREFILL_FAILURE = ("leave", "redispatch")


def _option(default: Any, text: str, choices: tuple[str, ...] = ()) -> Any:
    metadata = {"help": text, "choices": choices} if choices else {"help": text}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class RouterOptions(ServingLimits):
    """What ``kvxfer router`` is told; checked once, here."""

    host: str = _option("127.0.0.1", "address to listen on; anything but loopback needs --insecure")
    port: int = _option(0, "port to listen on; 0 takes a free one")
    coordinator: str = _option("", "host:port of the coordinator; must be given")
    token_file: str = _option("", "file with the cluster token; empty means the default place")
    api_key_file: str = _option("", "file with the API keys that clients may use, one a line; empty asks for none")
    local_prefill: str = _option(
        "on", "on: a decode worker may compute the prompt itself; off: answer 503 instead", LOCAL_PREFILL
    )
    min_remote_prefill_tokens: int = _option(0, "prompts shorter than this are computed where they are decoded")
    on_prefill_failure: str = _option(
        "leave", "leave: the decode worker recomputes by itself; redispatch: start again elsewhere", PREFILL_FAILURE
    )
    max_inflight: int = _option(1024, "requests served at once, from when their body is there; more are answered 503")
    max_answer_bytes: int = _option(64 << 20, "longest answer of a worker to a request without streaming")
    attempts_max: int = _option(3, "how often one request is tried in all")
    request_timeout_s: float = _option(600.0, "longest time for one request, from its arrival to its last byte")
    connect_timeout_s: float = _option(
        2.0, "longest time until a worker takes a connection; for its answer only --request-timeout-s counts"
    )
    aside_base_s: float = _option(1.0, "how long a worker that could not be reached is tried last, the first time")
    aside_cap_s: float = _option(15.0, "how long a worker that could not be reached is tried last, at most")
    shutdown_grace_s: float = _option(5.0, "how long requests in flight may go on after a stop was asked for")
    forward_authorization: bool = _option(
        False, "pass the client's Authorization header on to the workers; otherwise it ends here"
    )
    allow_http_host: tuple[str, ...] = _option(
        (), "hosts that requests are sent to, as addresses, networks or names; empty: what the coordinator let in"
    )
    insecure: bool = _option(False, "listen beyond loopback without TLS")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be 0 to 65535, not {self.port}")
        if self.coordinator:
            check_address("coordinator", self.coordinator)
        if self.local_prefill not in LOCAL_PREFILL:
            raise ConfigError(f"local_prefill must be one of {', '.join(LOCAL_PREFILL)}, not {self.local_prefill!r}")
        if self.on_prefill_failure not in PREFILL_FAILURE:
            raise ConfigError(
                f"on_prefill_failure must be one of {', '.join(PREFILL_FAILURE)}, not {self.on_prefill_failure!r}"
            )
        if self.min_remote_prefill_tokens < 0:
            raise ConfigError(f"min_remote_prefill_tokens must be 0 or more, not {self.min_remote_prefill_tokens}")
        for name in ("request_timeout_s", "aside_base_s", "aside_cap_s"):
            check_positive(name, getattr(self, name), maximum=86400.0)
        check_positive("connect_timeout_s", self.connect_timeout_s, maximum=30.0)
        check_positive("shutdown_grace_s", self.shutdown_grace_s, maximum=3600.0)
        check_positive("max_inflight", self.max_inflight, maximum=1 << 20)
        check_positive("attempts_max", self.attempts_max, maximum=100)
        check_positive("max_answer_bytes", self.max_answer_bytes, maximum=1 << 30)
        if self.aside_base_s > self.aside_cap_s:
            raise ConfigError(f"aside_base_s {self.aside_base_s} must not exceed aside_cap_s {self.aside_cap_s}")
        HostList("allow_http_host", self.allow_http_host)
        if not self.insecure and not is_loopback(self.host):
            raise ConfigError(f"host {self.host!r} is not loopback and there is no TLS: pass --insecure to allow it")

    @property
    def allows_local_prefill(self) -> bool:
        return self.local_prefill == "on"
