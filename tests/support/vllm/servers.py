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
from collections.abc import AsyncIterator, Sequence

import httpx

from tests.support.local_http import answers, free_ports
from tests.support.started import Started, kvxfer, ready
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


@contextlib.asynccontextmanager
async def serving(
    directory: pathlib.Path,
    model: pathlib.Path,
    *,
    policy: str = "recompute",
    traces: str = "",
    options: Sequence[str] = (),
    prefill_options: Sequence[str] = (),
) -> AsyncIterator[Urls]:
    """All of them, ready; their logs lie in ``directory``. Leaving it ends them and what they started. ``policy``:
    vLLM's kv_load_failure_policy. ``traces``: an OTLP endpoint for the engines' spans. ``options`` of both engines."""
    token = f"--token-file={directory / 'cluster-token'}"
    started: list[Started] = []

    def start(name: str, command: list[str]) -> Started:
        started.append(Started(name, command, directory, {**os.environ, **SETTINGS}))
        return started[-1]

    try:
        address = (await ready(start("coordinator", kvxfer("coordinator", token))))["address"]
        ports = free_ports(2)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        engines = []
        for name, role, port, url in zip("pd", ("producer", "consumer"), ports, urls, strict=True):
            transfer = {
                "kv_connector": "KvxferConnector",
                "kv_role": f"kv_{role}",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {
                    "coordinator": address,
                    "token_file": str(directory / "cluster-token"),
                    "agent_id": name,
                    "http_url": url,
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
            ]
            if traces:
                command.append(f"--otlp-traces-endpoint={traces}")
            command += options
            command += prefill_options if name == "p" else ()
            engines.append(start(name, command))
        router = await ready(
            start("router", kvxfer("router", token, f"--coordinator={address}", "--local-prefill=off"))
        )
        async with httpx.AsyncClient(trust_env=False) as client:
            for engine, url in zip(engines, urls, strict=True):
                await engine.wait(functools.partial(answers, client, f"{url}/health"))
        yield Urls(*urls, router["http_url"], directory)
    finally:
        try:
            await asyncio.gather(*(asyncio.to_thread(process.end) for process in reversed(started)))
        finally:
            for process in started:  # interrupted once more: without their leave
                process.kill()
