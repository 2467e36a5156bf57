"""What docs/vllm.md begins with, done: a coordinator, two engines of vLLM, kvxfer's router, one prompt.

usage: demo.py [--model DIRECTORY] [--tokens 1500] [--verbose]

A process that is not ready yet is waited for as long as it does something. Where one fails it is named, and the logs of
all of them stay.

Without a model, a tiny one with random weights. Shows what was moved, and whether the answer is the one that the decode
engine gives alone.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx
from servers import NAME, serving

from kvxfer.engine.tiny import make_tiny_model
from kvxfer.errors import KvxferError

T = TypeVar("T")


async def ask(url: str, ids: list[int]) -> tuple[dict[str, Any], float]:
    body = {"model": NAME, "prompt": ids, "max_tokens": 16, "temperature": 0, "return_token_ids": True}
    begun_s = time.perf_counter()
    async with httpx.AsyncClient(trust_env=False, timeout=300.0) as client:
        answer = (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()
    return answer.json(), time.perf_counter() - begun_s


async def show(directory: pathlib.Path, model: pathlib.Path, ids: list[int]) -> bool:
    print("Starting a coordinator, a prefill and a decode engine of vLLM, and kvxfer's router.", flush=True)
    async with serving(directory, model) as urls:
        print(f"  prefill {urls.prefill}\n  decode  {urls.decode}\n  router  {urls.router}", flush=True)
        answer, seconds = await ask(urls.router, ids)
        alone, alone_seconds = await ask(urls.decode, ids)
    report = answer["kv_transfer_params"]["kvxfer"]
    tokens, wanted = (found["choices"][0]["token_ids"] for found in (answer, alone))
    print(f"\nA prompt of {len(ids)} tokens through the router, {seconds:.2f} s: {tokens}")
    print(f"The decode engine alone, {alone_seconds:.2f} s: {wanted}")
    print(
        f"Moved: {report['bytes']} bytes of {report['blocks']} blocks in {report['parts']} parts by {report['lane']}, "
        f"{report['early_bytes']} of them while the prompt was still computed."
    )
    is_same = tokens == wanted and report["code"] == ""
    print("Token for token the same." if is_same else f"NOT the same: {report['code']} {report['text']}")
    return is_same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=pathlib.Path, help="directory of a model that vLLM can serve")
    parser.add_argument("--tokens", type=int, default=1500, help="length of the prompt")
    parser.add_argument("--verbose", action="store_true", help="show what the processes logged")
    options = parser.parse_args()
    draw = random.Random(7)
    ids = [draw.randrange(3, 1000) for _ in range(options.tokens)]
    directory = pathlib.Path(tempfile.mkdtemp(prefix="kvxfer-demo-vllm-"))
    model = options.model or make_tiny_model(
        directory / "tiny", layers=4, hidden=256, vocab=1024, max_position_embeddings=4096, seed=1234
    )
    code = 1
    try:
        code = 0 if asyncio.run(until_told_to_end(show(directory, model, ids))) else 1
    except KvxferError as error:
        print(f"demo-vllm: {error}", file=sys.stderr)
    except httpx.HTTPError as error:
        print(f"demo-vllm: no answer: {type(error).__name__} {error}", file=sys.stderr)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("demo-vllm: interrupted; all processes are ended", file=sys.stderr)
        code = 130
    for log in sorted(directory.glob("*.log")) if options.verbose else ():
        print(f"--- {log.name}\n{log.read_text(errors='replace')}", file=sys.stderr)
    if code == 1:
        print(f"The logs of all processes are kept in {directory}", file=sys.stderr)
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return code


async def until_told_to_end(work: Coroutine[Any, Any, T]) -> T:
    """SIGTERM ends it as Ctrl-C does: with all that it started."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


if __name__ == "__main__":
    sys.exit(main())
