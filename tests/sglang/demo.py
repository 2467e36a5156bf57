"""What docs/sglang.md begins with, done: a prefill and a decode server of SGLang on CPUs, its router, a few prompts.

usage: python -m tests.sglang.demo [--model DIRECTORY] [--tokens 1500] [--verbose]

A process that is not ready yet is waited for as long as it does something. Where one fails it is named, and the logs of
all of them stay.

Without a model, a tiny one with random weights. Shows what was moved, and whether the answers are those of one server
that does both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import os
import pathlib
import random
import re
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from kvxfer.errors import KvxferError
from kvxfer.rpc.token import load_or_create_token
from tests.support import demos
from tests.support.local_http import answers, free_ports
from tests.support.sglang import launch
from tests.support.started import Started, told

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON = pathlib.Path(os.environ.get("SGLANG_VENV") or ROOT / "build" / "sglang-venv") / "bin" / "python"
"""SGLang's own; ``SGLANG_VENV`` names another virtual environment."""
ANSWER_S = 120.0
NEW_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Urls:
    """Where each of them serves HTTP."""

    prefill: str
    decode: str
    one: str
    router: str


@contextlib.asynccontextmanager
async def serving(directory: pathlib.Path, model: pathlib.Path) -> AsyncIterator[Urls]:
    """All of them, ready; their logs lie in ``directory``. Leaving it ends them and what they started. Raises
    KvxferError, naming the process, where one does not become ready, or ends before this is left."""
    token = directory / "cluster-token"
    load_or_create_token(token)
    environment = {
        **os.environ,
        **launch.ENVIRONMENT,
        "PYTHONPATH": launch.python_path(os.environ.get("PYTHONPATH", "")),
        "KVXFER_SGLANG_TOKEN_FILE": str(token),
        "TMPDIR": str(directory),  # where SGLang leaves its sockets
    }
    started: list[Started] = []
    begun_s = time.monotonic()

    def start(name: str, command: list[str]) -> Started:
        started.append(Started(name, command, directory, environment))
        return started[-1]

    prefill, decode, one, router, bootstrap, metrics = free_ports(6)
    urls = Urls(*(f"http://127.0.0.1:{port}" for port in (prefill, decode, one, router)))
    command = functools.partial(launch.server, str(PYTHON), str(model), bootstrap=bootstrap)
    try:
        async with httpx.AsyncClient(trust_env=False) as client:

            async def ready(process: Started, url: str, path: str) -> None:
                await process.wait(functools.partial(answers, client, url + path))
                print(f"  {process.name:<8}ready after {time.monotonic() - begun_s:.1f} s  ({url})", flush=True)

            servers = [
                (start("prefill", command(prefill, role="prefill")), urls.prefill),
                (start("decode", command(decode, role="decode")), urls.decode),
                (start("one", command(one, "--disable-radix-cache")), urls.one),
            ]
            for server, url in servers:
                await ready(server, url, "/v1/models")
            words = launch.router(str(PYTHON), router, metrics, urls.prefill, bootstrap, urls.decode)
            await ready(start("router", words), urls.router, "/readiness")
        try:
            yield urls
        except httpx.HTTPError as error:
            raise KvxferError(blame(error, started)) from None
    finally:
        try:
            await asyncio.gather(*(asyncio.to_thread(process.end) for process in reversed(started)))
        finally:
            for process in started:  # interrupted once more: without their leave
                process.kill()


def blame(error: httpx.HTTPError, started: list[Started]) -> str:
    """Which process ended, if one did; else what became of the request."""
    for process in started:
        code = process.process.poll()
        if code is not None:
            return told(process.name, f"ended with code {code} after it was ready", process.log)
    return f"no answer: {type(error).__name__} {error}"


async def ask(url: str, ids: list[int]) -> tuple[list[int], float]:
    """The tokens of the answer, and the seconds that it took."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    begun_s = time.perf_counter()
    async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_S) as client:
        answer = await client.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": sampling})
    if answer.status_code != 200:
        raise KvxferError(f"{url} answered with status {answer.status_code}: {answer.text:.1000}")
    value: Any = answer.json()
    return [int(token) for token in value["output_ids"]], time.perf_counter() - begun_s


async def moved(url: str) -> str:
    """What the figures of decode say that it received."""
    async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_S) as client:
        text = (await client.get(f"{url}/metrics", follow_redirects=True)).text

    def total(name: str, *labels: str) -> float:
        lines = re.findall(rf"^sglang:kvxfer_{name}_total{{([^}}]*)}} (\S+)$", text, re.MULTILINE)
        return sum(float(value) for found, value in lines if all(label in found for label in labels))

    by_lane = {
        lane: total("loads", f'lane="{lane}"', 'outcome="committed"')
        for lane in sorted(set(re.findall(r'lane="(\w+)"', text)))
    }
    by = ", ".join(f"{count:.0f} by {lane}" for lane, count in by_lane.items() if count)
    return f"{total('bytes'):.0f} bytes, {total('early_bytes'):.0f} of them while the prompt was still computed ({by})"


async def show(directory: pathlib.Path, model: pathlib.Path | None, tokens: int) -> bool:
    print(
        "Starting SGLang on CPUs: a prefill and a decode server, one that does both, and then its router.", flush=True
    )
    model = model or await asyncio.to_thread(launch.make_tiny_llama, directory / "tiny")
    draw = random.Random(7)
    is_same = True
    async with serving(directory, model) as urls:
        for length in sorted({1, 1 + tokens // 7, tokens}):
            ids = [draw.randrange(3, 400) for _ in range(length)]
            found, seconds = await ask(urls.router, ids)
            wanted, alone_seconds = await ask(urls.one, ids)
            is_same = is_same and found == wanted
            print(f"\nA prompt of {length} token{'s' * (length > 1)} through the router, {seconds:.2f} s: {found}")
            print(f"One server that does both, {alone_seconds:.2f} s: {wanted}", flush=True)
        print(f"\nMoved: {await moved(urls.decode)}.")
    print("Token for token the same." if is_same else "NOT the same.")
    return is_same


def main() -> int:
    parser = argparse.ArgumentParser("demo-sglang", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=demos.model_directory, help="directory of a model that SGLang can serve")
    parser.add_argument("--tokens", type=demos.count(1, 4000), default=1500, help="length of the longest prompt")
    parser.add_argument("--verbose", action="store_true", help="show what the processes logged")
    options = parser.parse_args()
    work = functools.partial(show, model=options.model, tokens=options.tokens)
    return demos.run("demo-sglang", work, is_verbose=options.verbose)


if __name__ == "__main__":
    sys.exit(main())
