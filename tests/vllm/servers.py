"""The page docs/vllm.md begins with, as processes: a coordinator, ``vllm serve`` for a prefill and a decode engine, and
kvxfer's router. Knows their command lines only."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence

import httpx
from engines import CACHE, PYTHON, START_S

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
STOP_S = 20.0


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
    prefill_options: Sequence[str] = (),
) -> AsyncIterator[Urls]:
    """All of them, ready; their logs lie in ``directory``. Leaving it ends them and what they started. ``policy``:
    vLLM's kv_load_failure_policy. ``traces``: an OTLP endpoint for the engines' spans."""
    token = f"--token-file={directory / 'cluster-token'}"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        coordinator = start(directory, processes, "coordinator", kvxfer("coordinator", token))
        address = (await first_line(coordinator))["address"]
        ports = free_ports(2)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
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
            command = [str(PYTHON.with_name("vllm")), "serve", str(model), "--served-model-name", NAME, *SERVE]
            command += ["--port", str(port), "--kv-transfer-config", json.dumps(transfer)]
            if traces:
                command.append(f"--otlp-traces-endpoint={traces}")
            command += prefill_options if name == "p" else ()
            start(directory, processes, name, command)
        options = (token, f"--coordinator={address}", "--local-prefill=off")
        router = start(directory, processes, "router", kvxfer("router", *options))
        found = Urls(*urls, (await first_line(router))["http_url"], directory)
        async with asyncio.timeout(START_S), httpx.AsyncClient(trust_env=False) as client:
            for url in urls:
                while not await is_ready(client, url):
                    for process in processes:
                        assert process.poll() is None, f"{process.args} ended; see its log in {directory}"
                    await asyncio.sleep(0.2)
        yield found
    finally:
        await asyncio.gather(*(asyncio.to_thread(end, process) for process in reversed(processes)))


def kvxfer(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvxfer.cli", *arguments, f"--exit-with-parent={os.getpid()}"]


def start(
    directory: pathlib.Path, processes: list[subprocess.Popen[bytes]], name: str, command: list[str]
) -> subprocess.Popen[bytes]:
    with (directory / f"{name}.log").open("wb") as log:
        environment = {**os.environ, **SETTINGS}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment, start_new_session=True)
    processes.append(process)
    return process


async def first_line(process: subprocess.Popen[bytes]) -> dict[str, str]:
    assert process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START_S)
    return dict(json.loads(line))


async def is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health")).status_code == 200
    except httpx.HTTPError:
        return False


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop it, and in the end all that it started."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
