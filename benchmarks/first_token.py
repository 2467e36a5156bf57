"""What a request gains from the transfer running beside the prefill: how much of the KV cache had moved when prefill
ended, and how long after that the first token came.

Starts the whole service on this machine (one prefill and one decode worker, each on its share of the cores), sends
prompts that share no prefix one after the other, and prints a row each and the medians. The bar for the first token is
1.5 decode steps + 20 ms after the end of prefill; the step is this very answer's mean time from token to token.

    benchmarks/first_token.py [--model NAME] [--tokens 1000] [--answer 16] [--rounds 9] [--lanes mapped,stream]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import random
import statistics
import tempfile
from typing import Any

import httpx

from kvxfer.cli.stack import ChildSpec, worker_spec
from kvxfer.cli.supervise import Supervisor
from kvxfer.engine import resolve
from kvxfer.rpc import load_or_create_token

VOCABULARY = range(1000, 40000)
START_S = 120.0


@dataclasses.dataclass(frozen=True)
class Row:
    early_share: float
    first_token_ms: float
    """After the end of prefill, by the clock of the one machine."""
    step_ms: float
    prefill_ms: float

    @property
    def bar_ms(self) -> float:
        return 1.5 * self.step_ms + 20.0


def row_of(body: dict[str, Any]) -> Row:
    account, tokens = body["kvxfer"], body["usage"]["completion_tokens"]
    if account["prefill"] != "remote":
        raise SystemExit(f"the prompt was not computed by the prefill worker: {account}")
    first_unix_s = account["ended_unix_s"] - account["total_s"] + account["ttft_s"]
    return Row(
        account["bytes_before_prefill_end"] / account["bytes_moved"],
        (first_unix_s - account["prefill_ended_unix_s"]) * 1e3,
        (account["total_s"] - account["ttft_s"]) / (tokens - 1) * 1e3,
        account["prefill_s"] * 1e3,
    )


async def measure(args: argparse.Namespace, lane: str, token_file: str) -> list[Row]:
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    model = resolve(args.model)
    shared: dict[str, Any] = {"token_file": token_file}
    async with Supervisor() as supervisor:
        coordinator = await supervisor.start(
            ChildSpec("coordinator", ["coordinator", "--port=0", f"--token-file={token_file}"]), timeout_s=START_S
        )
        shared["coordinator"] = coordinator.address
        workers = [
            worker_spec(f"{role}-0", role, model, threads, lanes=lane, **shared) for role in ("prefill", "decode")
        ]
        await asyncio.gather(*(supervisor.start(spec, timeout_s=START_S) for spec in workers))
        router = await supervisor.start(
            ChildSpec(
                "router",
                ["router", "--port=0", f"--coordinator={coordinator.address}", f"--token-file={token_file}"],
            ),
            timeout_s=START_S,
        )
        rows = []
        async with httpx.AsyncClient(base_url=router.http_url, trust_env=False, timeout=300.0) as client:
            name = (await client.get("/v1/models")).json()["data"][0]["id"]
            for seed in range(args.rounds + 1):
                prompt = random.Random(seed).choices(VOCABULARY, k=args.tokens)
                body = {
                    "model": name,
                    "prompt": prompt,
                    "max_tokens": args.answer,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                answer = await client.post("/v1/completions", json=body)
                answer.raise_for_status()
                if seed:  # the first one warms up
                    rows.append(row_of(answer.json()))
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--lanes", default="mapped,stream")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    print(f"cores={os.cpu_count()} kernel={platform.release()} model={args.model} prompt={args.tokens} tokens")
    print("lane     prefill    early   first token   bar (1.5 steps + 20 ms)   step")
    report = {}
    with tempfile.TemporaryDirectory() as directory:
        token_file = os.path.join(directory, "token")
        load_or_create_token(token_file)
        for lane in args.lanes.split(","):
            rows = asyncio.run(measure(args, lane, token_file))
            report[lane] = [dataclasses.asdict(row) for row in rows]
            middle = Row(*(statistics.median(column) for column in zip(*map(dataclasses.astuple, rows), strict=True)))
            for label, row in (*((lane, row) for row in rows), (f"{lane} median", middle)):
                print(
                    f"{label:14} {row.prefill_ms:7.0f} ms  {row.early_share:5.1%}  {row.first_token_ms:7.1f} ms"
                    f"  {row.bar_ms:7.1f} ms  {row.step_ms:6.1f} ms",
                    flush=True,
                )
            within = sum(row.first_token_ms <= row.bar_ms for row in rows)
            print(f"{lane}: first token within the bar in {within} of {len(rows)} rounds", flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
