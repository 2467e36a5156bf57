"""Disaggregated prefill inside real vLLM: KvxferConnector beside vLLM's own NixlConnector and beside one engine that
does everything, on the same prompts, turn by turn in one run.

Starts three engines on the CPU of this machine in `build/vllm-venv` (`make test-vllm` makes it), and two more for
NixlConnector where `nixl` is installed there (`pip install nixl-cu12`, then `pip install --no-deps nixl`). Measured
alike:

- KV present: at the decode engine, from the request to when vLLM's scheduler is told that its KV is there;
- prefill: the prefill leg's own time at its engine;
- wire: what the connector itself says of its transfers: kvxfer the time in which blocks were read, and the confirm,
  added up over parts (by stream and unix without the waits for frames); NIXL from post to completion;
- TTFT: at the client, from sending the first leg to the decode engine's first token;
- exposed: TTFT less prefill: what disaggregation adds to the time of the first token;
- descriptors: what is named to the peer: for kvxfer numbers of blocks, which stand for all layers; for NIXL one for
  each block and layer (of K and of V where they lie apart).

    benchmarks/vllm.py [--model tiny] [--tokens 500,1500,1900] [--rounds 7] [--batch 512] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import pathlib
import random
import signal
import socket
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

ANSWER = 4
FIELDS = ("ttft_ms", "prefill_ms", "present_ms", "wire_ms", "exposed_ms", "descriptors", "bytes", "early_bytes")


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

    @property
    def exposed_ms(self) -> float:
        return self.ttft_ms - self.prefill_ms


async def first_token(engine: Engine, request_id: str, begun_s: float) -> float:
    """Milliseconds from ``begun_s`` to the request's first token."""
    await engine.wait_first(request_id)
    return (time.perf_counter() - begun_s) * 1e3


async def measure(cluster: Cluster, contender: str, ids: list[int]) -> tuple[Row, list[int]]:
    """One request, and the tokens of its answer."""
    begun_s = time.perf_counter()
    if contender == "monolithic":
        engine = cluster["mono"]
        request_id = engine.add(ids, ANSWER)
        ttft_ms = await first_token(engine, request_id, begun_s)
        answer = await engine.wait(request_id)
        return Row(contender, len(ids), ttft_ms, answer["first_ms"], *[None] * 5), answer.tokens
    prefill, decode = (cluster["pn"], cluster["dn"]) if contender == "nixl" else (cluster["p"], cluster["d"])
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


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


async def start(cluster: Cluster, batch: int, *, has_nixl: bool) -> None:
    shared = {"enable_prefix_caching": False, "max_num_batched_tokens": batch}
    off = {"record_digests": False}
    await cluster.start("mono", None, **shared)
    await cluster.start("p", "kv_producer", extra=off, **shared)
    await cluster.start("d", "kv_consumer", extra=off, **shared)
    for name, role in (("pn", "kv_producer"), ("dn", "kv_consumer")) if has_nixl else ():
        transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": free_port()}
        await cluster.start(name, None, transfer=transfer, environment=environment, **shared)
    for engine in cluster.engines.values():
        await engine.wait_ready()


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
        model = (
            make_tiny_model(
                directory / "tiny", layers=4, hidden=256, vocab=1024, max_position_embeddings=4096, seed=1234
            )
            if args.model == "tiny"
            else resolve(args.model)
        )
        async with Cluster(directory, model) as cluster:
            await start(cluster, args.batch, has_nixl=has_nixl)
            for turn in range(args.rounds + 1):
                for tokens in args.tokens:
                    ids = [draw.randrange(3, 1000) for _ in range(tokens)]
                    wanted = None
                    for contender in draw.sample(contenders, len(contenders)):
                        with alone(cluster, contender):
                            await asyncio.sleep(0.05)  # until the others are idle
                            row, answer = await measure(cluster, contender, ids)
                            await asyncio.sleep(0.05)  # until blocks are given back
                        if answer != (wanted := wanted or answer):
                            raise SystemExit(f"{contender} answers {answer}, another {wanted}")
                        if turn:  # the first meets cold caches and makes connections
                            rows.append(row)
            entries = summary(rows)
            print(table(entries), flush=True)
    return entries


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """Medians by contender and prompt length; ratios are medians of the turns' ratios to NixlConnector."""
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
            for field in ("present_ms", "exposed_ms"):
                pairs = [(getattr(a, field), getattr(b, field)) for a, b in zip(mine, nixl, strict=False)]
                ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
                entry[f"{field}_ratio"] = statistics.median(ratios) if ratios and name.startswith("kvxfer") else None
            found.append(entry)
    return found


def table(entries: list[dict[str, Any]]) -> str:
    columns = ["tokens", "contender", *FIELDS, "present_ms_ratio", "exposed_ms_ratio"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for entry in entries:
        cells = [entry[column] for column in columns]
        shown = ["" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="or what `kvxfer demo --model` takes: smollm2-135m-instruct")
    parser.add_argument("--tokens", default="500,1500,1900", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--rounds", default=7, type=int)
    parser.add_argument("--batch", default=512, type=int, help="max_num_batched_tokens of all engines")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    probe = subprocess.run([str(PYTHON), "-c", "import nixl._api"], capture_output=True, check=False)
    entries = asyncio.run(run(args, has_nixl=probe.returncode == 0))
    if args.json is not None:
        args.json.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
