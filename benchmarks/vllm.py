"""Disaggregated prefill inside real vLLM: KvxferConnector beside vLLM's own NixlConnector and beside one engine that
does everything, on the same prompts, turn by turn in one run.

Starts three engines on the CPU of this machine in `build/vllm-venv`, and two more for NixlConnector where NVIDIA's
wheels are in `build/nixl-wheel` and `build/nixl-name` (`make test-vllm` makes all of them). Measured alike:

- KV present: at the decode engine, from the request to when vLLM's scheduler is told that its KV is there;
- prefill: the prefill leg's own time at its engine;
- wire: what the connector itself says of its transfers: kvxfer the time in which blocks were read, and the confirm,
  added up over parts (by stream and unix without the waits for frames); NIXL from post to completion;
- TTFT: at the client, from sending the first leg to the decode engine's first token;
- exposed: TTFT less prefill: what disaggregation adds to the time of the first token;
- descriptors: what is named to the peer: for kvxfer numbers of blocks, which stand for all layers; for NIXL one for
  each block and layer (of K and of V where they lie apart);
- bytes: by each connector's own count; needed: what the next token depends on (of sliding windows the blocks of the
  last window - 1 tokens), by vLLM's own block sizes;
- differ: answers that were not the monolithic engine's. Of kvxfer one ends the run.

With `--kind` the model is a tiny random one of that kind of layers (gemma3: sliding windows), as tests make them.

    benchmarks/vllm.py [--model tiny | --kind gemma3] [--tokens 500,1500,1900] [--rounds 7] [--batch 512] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from kvxfer.engine.model_store import resolve
from kvxfer.engine.tiny import make_tiny_model
from tests.support.vllm.engines import PYTHON, Cluster, Engine, both_legs
from tests.support.vllm.hybrid import needed, stock_settings, token_ids
from tests.support.vllm.hybrid_models import KINDS, HybridKind, make_hybrid_model
from tests.support.vllm.stock import WHEELS

ANSWER = 4
FIELDS = ("ttft_ms", "prefill_ms", "present_ms", "wire_ms", "exposed_ms", "descriptors", "bytes", "early_bytes")
RATIOS = ("present_ms", "exposed_ms")
KIND_TOKENS = (300, 600, 900)


@dataclasses.dataclass(frozen=True)
class Row:
    contender: str
    tokens: int
    ttft_ms: float
    prefill_ms: float
    present_ms: float | None
    wire_ms: float | None
    descriptors: int | None
    bytes: int | None
    early_bytes: int | None
    differs: bool = False

    @property
    def exposed_ms(self) -> float:
        return self.ttft_ms - self.prefill_ms


async def first_token(engine: Engine, request_id: str, begun_s: float) -> float:
    """Milliseconds from ``begun_s`` to the request's first token."""
    await engine.wait_first(request_id)
    return (time.perf_counter() - begun_s) * 1e3


async def measure(cluster: Cluster, contender: str, ids: list[int], kind: HybridKind | None) -> tuple[Row, list[int]]:
    """One request, and the tokens of its answer. In bfloat16 the monolithic engine computes the prompt's last token
    apart, as a decode engine does: else vLLM rounds otherwise."""
    begun_s = time.perf_counter()
    if contender == "monolithic":
        engine = cluster["mono"]
        request_id = engine.add(ids, ANSWER, apart=kind is not None and kind.dtype != "float32")
        ttft_ms = await first_token(engine, request_id, begun_s)
        answer = await engine.wait(request_id)
        return Row(contender, len(ids), ttft_ms, answer["first_ms"], *[None] * 5), answer.tokens
    prefill, decode = (cluster["pn"], cluster["dn"]) if contender == "nixl" else (cluster["p"], cluster["d"])
    if kind is not None:
        decode.poison()  # it has nothing else to do, and no answer is right by what lay there
    moved = await decode.ask("moved")
    begun_s = time.perf_counter()
    if contender == "kvxfer, both legs at once":
        legs = both_legs(prefill, decode)
        computing = prefill.add(ids, 1, legs[0])
        request_id = decode.add(ids, ANSWER, legs[1])
        ttft_ms = await first_token(decode, request_id, begun_s)
        first = await prefill.wait(computing)
    else:
        first = await prefill.generate(ids, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        request_id = decode.add(ids, ANSWER, first["kv"])
        ttft_ms = await first_token(decode, request_id, begun_s)
    answer = await decode.wait(request_id)
    report = answer.report
    if report.get("code"):
        raise SystemExit(f"{contender}: the load failed: {report}")
    now = await decode.ask("moved")
    wire_s = report["wire_seconds"] if report else now["seconds"] - moved["seconds"]
    row = Row(
        contender,
        len(ids),
        ttft_ms,
        first["ms"],
        answer["loaded_ms"],
        wire_s * 1e3,
        report["blocks"] if report else now["descriptors"] - moved["descriptors"],
        report["bytes"] if report else now["bytes"] - moved["bytes"],
        report.get("early_bytes") if report else 0,
    )
    return row, answer.tokens


async def start(cluster: Cluster, batch: int, kind: HybridKind | None, *, has_nixl: bool) -> None:
    shared = {"enable_prefix_caching": False, "max_num_batched_tokens": batch, **({} if kind is None else kind.engine)}
    off = {"record_digests": False}
    await cluster.start("mono", None, **shared)
    await cluster.start("p", "kv_producer", extra=off, **shared)
    await cluster.start("d", "kv_consumer", extra=off, **shared)
    for name, role in (("pn", "kv_producer"), ("dn", "kv_consumer")) if has_nixl else ():
        transfer, environment = stock_settings("NixlConnector", role)
        await cluster.start(name, None, transfer=transfer, environment=environment, **shared)
    for engine in cluster.engines.values():
        await engine.wait_ready()
    if has_nixl and not (where := str(await cluster["dn"].ask("nixl"))).startswith(tuple(map(str, WHEELS))):
        raise SystemExit(f"NixlConnector took {where} for NIXL")


async def needed_bytes(cluster: Cluster, tokens: int) -> int:
    """What an engine lacks that computes the last token of such a prompt itself, and has nothing else of it."""
    told = await cluster["d"].ask("groups")
    total = 0
    for (kind, _, block_tokens, window), block_bytes in zip(told["groups"], told["block_bytes"], strict=True):
        count = 1 if kind == "MambaSpec" else len(needed(kind, tokens - 1, 0, block_tokens, window))
        total += count * block_bytes
    return total


@contextlib.contextmanager
def alone(cluster: Cluster, contender: str) -> Iterator[None]:
    """Stop the engines of NixlConnector while another has its turn: each of them keeps a core busy when it is idle."""
    stopped = [cluster[name] for name in ("pn", "dn") if name in cluster.engines and contender != "nixl"]
    for engine in stopped:
        engine.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for engine in stopped:
            engine.signal(signal.SIGCONT)


async def run(args: argparse.Namespace, *, has_nixl: bool) -> list[dict[str, Any]]:
    contenders = ["monolithic", *(["nixl"] if has_nixl else []), "kvxfer", "kvxfer, both legs at once"]
    draw = random.Random(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        kind = KINDS.get(args.kind)
        model = (
            make_hybrid_model(kind, directory / "model")
            if kind is not None
            else make_tiny_model(
                directory / "tiny", layers=4, hidden=256, vocab=1024, max_position_embeddings=4096, seed=1234
            )
            if args.model == "tiny"
            else resolve(args.model)
        )
        async with Cluster(directory, model) as cluster:
            await start(cluster, args.batch, kind, has_nixl=has_nixl)
            needs = {tokens: await needed_bytes(cluster, tokens) for tokens in args.tokens}
            for turn in range(args.rounds + 1):
                for tokens in args.tokens:
                    ids = [draw.randrange(3, 1000) for _ in range(tokens)] if kind is None else token_ids(tokens, turn)
                    wanted = None
                    for contender in contenders:
                        with alone(cluster, contender):
                            await asyncio.sleep(0.05)  # until the others are idle
                            row, answer = await measure(cluster, contender, ids, kind)
                            await asyncio.sleep(0.05)  # until blocks are given back
                        wanted = wanted or answer
                        differs = answer != wanted and (kind is None or kind.is_repeatable)
                        if differs and contender != "nixl":
                            raise SystemExit(f"{contender} answers {answer}, one engine {wanted}")
                        if turn:  # the first meets cold caches and makes connections
                            rows.append(dataclasses.replace(row, differs=differs))
            entries = summary(rows, needs)
            print(table(entries), flush=True)
    return entries


def summary(rows: list[Row], needs: dict[int, int]) -> list[dict[str, Any]]:
    """Medians by contender and prompt length; ratios are medians of the turns' ratios to NixlConnector, and those with
    ``of_medians`` ratios of medians. ``needs``: bytes by prompt length."""
    found: list[dict[str, Any]] = []
    names = list(dict.fromkeys(row.contender for row in sorted(rows, key=lambda row: row.contender)))
    for tokens in sorted({row.tokens for row in rows}):
        nixl = [row for row in rows if (row.contender, row.tokens) == ("nixl", tokens)]
        for name in names:
            mine = [row for row in rows if (row.contender, row.tokens) == (name, tokens)]
            entry: dict[str, Any] = {"tokens": tokens, "contender": name, "count": len(mine)}
            for field in FIELDS:
                values = [value for row in mine if (value := getattr(row, field)) is not None]
                entry[field] = statistics.median(values) if values else None
            entry["differ"] = sum(row.differs for row in mine)
            entry["needed"] = needs[tokens]
            for field in RATIOS:
                pairs = [(getattr(a, field), getattr(b, field)) for a, b in zip(mine, nixl, strict=False)]
                ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
                entry[f"{field}_ratio"] = statistics.median(ratios) if ratios and name.startswith("kvxfer") else None
                theirs = [value for row in nixl if (value := getattr(row, field))]
                has_both = theirs and entry[field] and name.startswith("kvxfer")
                entry[f"{field}_of_medians"] = entry[field] / statistics.median(theirs) if has_both else None
            found.append(entry)
    return found


def table(entries: list[dict[str, Any]]) -> str:
    columns = ["tokens", "contender", *FIELDS, "needed", "differ"]
    columns += [f"{field}_{how}" for field in RATIOS for how in ("ratio", "of_medians")]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for entry in entries:
        cells = [entry[column] for column in columns]
        shown = ["" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="or what `kvxfer demo --model` takes: smollm2-135m-instruct")
    parser.add_argument("--kind", choices=list(KINDS), help="in place of --model: a tiny model of that kind of layers")
    parser.add_argument(
        "--tokens",
        default=None,
        help="default 500,1500,1900; with --kind 300,600,900",
        type=lambda text: [int(part) for part in text.split(",")],
    )
    parser.add_argument("--rounds", default=7, type=int)
    parser.add_argument("--batch", default=512, type=int, help="max_num_batched_tokens of all engines")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    args.tokens = args.tokens or list(KIND_TOKENS if args.kind else (500, 1500, 1900))
    path = {"PYTHONPATH": os.pathsep.join(map(str, WHEELS))}
    probe = [str(PYTHON), "-c", "import nixl_cu12, nixl._api"]
    has_nixl = subprocess.run(probe, env={**os.environ, **path}, capture_output=True, check=False).returncode == 0
    entries = asyncio.run(run(args, has_nixl=has_nixl))
    if args.json is not None:
        args.json.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
