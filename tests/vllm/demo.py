"""What docs/vllm.md begins with, done: a coordinator, two engines of vLLM, kvxfer's router, one prompt.

usage: python -m tests.vllm.demo [--model DIRECTORY] [--tokens 1500] [--verbose]

A process that is not ready yet is waited for as long as it does something. Where one fails it is named, and the logs of
all of them stay.

Without a model, a tiny one with random weights. Shows what was moved, and whether the answer is the one that the decode
engine gives alone.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import sys
import time
from typing import Any

import httpx

from kvxfer.engine.tiny import make_tiny_model
from tests.support import demos
from tests.support.vllm.servers import NAME, serving


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
    parser = argparse.ArgumentParser("demo-vllm", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=demos.model_directory, help="directory of a model that vLLM can serve")
    parser.add_argument("--tokens", type=demos.count(1, 2000), default=1500, help="length of the prompt")
    parser.add_argument("--verbose", action="store_true", help="show what the processes logged")
    options = parser.parse_args()
    draw = random.Random(7)
    ids = [draw.randrange(3, 1000) for _ in range(options.tokens)]

    async def work(directory: pathlib.Path) -> bool:
        model = options.model or make_tiny_model(
            directory / "tiny", layers=4, hidden=256, vocab=1024, max_position_embeddings=4096, seed=1234
        )
        return await show(directory, model, ids)

    return demos.run("demo-vllm", work, is_verbose=options.verbose)


if __name__ == "__main__":
    sys.exit(main())
