"""Whether prefill + decode answers as one process does: greedy tokens, prompt by prompt, on a model of your choice.

Starts the whole service (one prefill worker, one decode worker, router) and a single process on the same model, sends
both the same prompts of 1 to 2,000 random tokens, first one at a time and then eight at once, and compares token ids.
Where two answers part, the top-2 gap of the reference at that token is computed with transformers: below 1e-3 in fp32
the two are equally right, and it is counted as excused. Exit code 1 for anything else.

    benchmarks/equality.py [--model smollm2-135m-instruct] [--answer 64] [--lane mapped] [--chunk-tokens 128]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pathlib
import random
import sys
import tempfile
from typing import Any

import httpx
import torch

from kvxfer.cli.stack import worker_spec
from kvxfer.cli.supervise import ChildSpec, Supervisor
from kvxfer.engine import LoadedModel, resolve
from kvxfer.rpc import load_or_create_token

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 257, 400, 511, 777, 1000, 1500, 2000)
EXCUSED_GAP = 1e-3
START_S = 120.0


async def complete(client: httpx.AsyncClient, model: str, prompt: list[int], answer: int) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json={**body, "return_token_ids": True})
    response.raise_for_status()
    return dict(response.json())


@torch.inference_mode()
def gap(model: LoadedModel, tokens: list[int]) -> float:
    """The distance of the two best logits after ``tokens``."""
    best = model.module(torch.tensor([tokens])).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


async def run(args: argparse.Namespace, token_file: str) -> int:
    path = resolve(args.model)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    token = f"--token-file={token_file}"
    async with Supervisor() as supervisor:
        coordinator = await supervisor.start(
            ChildSpec("coordinator", ["coordinator", "--port=0", token]), timeout_s=START_S
        )
        flags = {"token_file": token_file, "coordinator": coordinator.address, "lanes": args.lane}
        chunk = {"chunk_tokens": args.chunk_tokens, "max_batch_tokens": max(512, args.chunk_tokens)}
        await supervisor.start(worker_spec("prefill-0", "prefill", path, threads, **flags, **chunk), timeout_s=START_S)
        await supervisor.start(worker_spec("decode-0", "decode", path, threads, **flags), timeout_s=START_S)
        words = ["router", "--port=0", f"--coordinator={coordinator.address}", token]
        router = await supervisor.start(ChildSpec("router", words), timeout_s=START_S)
        single = await supervisor.start(worker_spec("single", "both", path, threads), timeout_s=START_S)
        async with (
            httpx.AsyncClient(base_url=router.http_url, trust_env=False, timeout=600.0) as ours,
            httpx.AsyncClient(base_url=single.http_url, trust_env=False, timeout=600.0) as reference,
        ):
            name = (await ours.get("/v1/models")).json()["data"][0]["id"]
            random_tokens = [random.Random(length).choices(range(1000, 40000), k=length) for length in LENGTHS]
            expected = [await complete(reference, name, prompt, args.answer) for prompt in random_tokens]
            alone = [await complete(ours, name, prompt, args.answer) for prompt in random_tokens]
            failures = judge("one at a time", path, random_tokens, expected, alone)
            bound = asyncio.Semaphore(8)

            async def at_once(prompt: list[int]) -> dict[str, Any]:
                async with bound:
                    return await complete(ours, name, prompt, args.answer)

            together = await asyncio.gather(*(at_once(prompt) for prompt in random_tokens))
            failures += judge("eight at once, cached", path, random_tokens, expected, together)
    return 1 if failures else 0


def judge(
    what: str,
    path: pathlib.Path,
    prompts: list[list[int]],
    expected: list[dict[str, Any]],
    got: list[dict[str, Any]],
) -> int:
    """Compare the answers and say what was found; how many are wrong."""
    excused, remote, wrong = 0, 0, 0
    for prompt, reference, answer in zip(prompts, expected, got, strict=True):
        remote += answer["kvxfer"]["prefill"] == "remote"
        right, ours = reference["choices"][0]["token_ids"], answer["choices"][0]["token_ids"]
        if right == ours:
            continue
        at = next(i for i, pair in enumerate(zip(right, ours, strict=True)) if pair[0] != pair[1])
        distance = gap(LoadedModel.load(path), prompt + right[:at])
        print(f"  prompt of {len(prompt)} tokens parts at token {at}: top-2 gap {distance:.2e}", flush=True)
        if distance < EXCUSED_GAP:
            excused += 1
        else:
            wrong += 1
    tokens = len(expected[0]["choices"][0]["token_ids"])
    print(
        f"{what}: {len(prompts)} prompts x {tokens} tokens, {remote} with remote prefill: "
        f"{len(prompts) - wrong - excused} identical, {excused} excused, {wrong} wrong",
        flush=True,
    )
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--lane", default="mapped")
    parser.add_argument("--chunk-tokens", type=int, default=128)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        token_file = os.path.join(directory, "token")
        load_or_create_token(token_file)
        sys.exit(asyncio.run(run(args, token_file)))


if __name__ == "__main__":
    main()
