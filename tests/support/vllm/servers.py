"""The page docs/vllm.md begins with, as processes: a coordinator, ``vllm serve`` for a prefill and a decode engine, and
kvxfer's router. Knows their command lines only."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import ssl
from collections.abc import AsyncIterator, Sequence

import httpx

from kvxfer.trust.identity import CertRole
from tests.support.local_http import answers, free_ports
from tests.support.started import Started, kvxfer, ready
from tests.support.trust import ClusterAuthority
from tests.support.vllm.engines import CACHE, VLLM

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CACHE_ROOT": str(CACHE),
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "200",
}
SERVE = [
    *("--dtype", "float32", "--enforce-eager", "--seed", "0", "--max-model-len", "2048"),
    *("--num-gpu-blocks-override", "64", "--host", "127.0.0.1", "--no-enable-prefix-caching"),
]
NAME = "tiny"


@dataclasses.dataclass(frozen=True)
class Urls:
    """Where each of them serves HTTP."""

    prefill: str
    decode: str
    router: str
    directory: pathlib.Path
    verify: ssl.SSLContext | bool = True
    """What a client believes, and shows: the router's certificate."""


@dataclasses.dataclass(frozen=True)
class Trust:
    """What each process is told of certificates; without an authority nothing."""

    authority: ClusterAuthority | None = None

    def flags(self, role: CertRole, name: str, *prefixes: str, ca: str = "") -> list[str]:
        """Of one of kvxfer's commands: ``--PREFIX-cert-file`` and ``--PREFIX-key-file``, and ``--CA-ca-file``."""
        if self.authority is None:
            return []
        made = self.authority.issue(role, name)
        flags = [f"--{prefix}-cert-file={made.cert_file}" for prefix in prefixes]
        flags += [f"--{prefix}-key-file={made.key_file}" for prefix in prefixes]
        return [*flags, *(f"--{one}-ca-file={self.authority.ca_file}" for one in ca.split(",") if one)]

    def engine(self, role: CertRole, name: str) -> tuple[dict[str, object], list[str]]:
        """The connector's settings and the flags of an engine."""
        if self.authority is None:
            return {}, []
        made, ca = self.authority.issue(role, name), self.authority.ca_file
        files = {"ca_file": ca, "cert_file": str(made.cert_file), "key_file": str(made.key_file)}
        flags = ["--ssl-certfile", str(made.cert_file), "--ssl-keyfile", str(made.key_file), "--ssl-ca-certs", ca]
        settings: dict[str, object] = {f"coordinator_{name}": path for name, path in files.items()}
        return {**settings, "lanes": ["stream"]}, [*flags, "--ssl-cert-reqs", str(int(ssl.CERT_REQUIRED))]

    def verify(self) -> ssl.SSLContext | bool:
        if self.authority is None:
            return True
        made = self.authority.issue(CertRole.ROUTER, "client")
        context = ssl.create_default_context(cafile=self.authority.ca_file)
        context.load_cert_chain(made.cert_file, made.key_file)
        return context


@contextlib.asynccontextmanager
async def serving(
    directory: pathlib.Path,
    model: pathlib.Path,
    *,
    policy: str = "recompute",
    traces: str = "",
    options: Sequence[str] = (),
    prefill_options: Sequence[str] = (),
    router_options: Sequence[str] = (),
    authority: ClusterAuthority | None = None,
) -> AsyncIterator[Urls]:
    """All of them, ready; their logs lie in ``directory``. Leaving it ends them and what they started. ``policy``:
    vLLM's kv_load_failure_policy. ``traces``: an OTLP endpoint for the engines' spans. ``options`` of both engines.
    ``authority``: every process has a certificate of it and asks for one, and blocks move on encrypted streams only."""
    trust = Trust(authority)
    secured = {} if authority is None else {"KVXFER_ENCRYPT": "always"}
    token = f"--token-file={directory / 'cluster-token'}"
    started: list[Started] = []

    def start(name: str, command: list[str]) -> Started:
        started.append(Started(name, command, directory, {**os.environ, **SETTINGS, **secured}))
        return started[-1]

    try:
        own = trust.flags(CertRole.COORDINATOR, "c0", "tls", ca="tls-client")
        address = (await ready(start("coordinator", kvxfer("coordinator", token, *own))))["address"]
        ports = free_ports(2)
        urls = [f"http{'s' if authority else ''}://127.0.0.1:{port}" for port in ports]
        engines = []
        for name, role, port, url in zip("pd", ("producer", "consumer"), ports, urls, strict=True):
            settings, more = trust.engine(CertRole.PREFILL if name == "p" else CertRole.DECODE, name)
            transfer = {
                "kv_connector": "KvxferConnector",
                "kv_role": f"kv_{role}",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {
                    "coordinator": address,
                    "token_file": str(directory / "cluster-token"),
                    "agent_id": name,
                    "http_url": url,
                    **settings,
                },
            }
            command = [
                str(VLLM),
                "serve",
                str(model),
                "--served-model-name",
                NAME,
                *SERVE,
                "--port",
                str(port),
                "--kv-transfer-config",
                json.dumps(transfer),
                *more,
            ]
            if traces:
                command.append(f"--otlp-traces-endpoint={traces}")
            command += options
            command += prefill_options if name == "p" else ()
            engines.append(start(name, command))
        own = trust.flags(CertRole.ROUTER, "r0", "tls", "coordinator", "worker", ca="coordinator,worker")
        command = kvxfer("router", token, f"--coordinator={address}", "--local-prefill=off", *own, *router_options)
        router = await ready(start("router", command))
        verify = trust.verify()
        async with httpx.AsyncClient(trust_env=False, verify=verify) as client:
            for engine, url in zip(engines, urls, strict=True):
                await engine.wait(functools.partial(answers, client, f"{url}/health"))
        yield Urls(*urls, router["http_url"], directory, verify)
    finally:
        try:
            await asyncio.gather(*(asyncio.to_thread(process.end) for process in reversed(started)))
        finally:
            for process in started:  # interrupted once more: without their leave
                process.kill()
