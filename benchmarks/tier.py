"""What a tier gains: the time to the first token of a prompt that vLLM's own caches have dropped, computed anew, with
its KV from a directory, and with its KV from a `kvxfer tier` process.

Starts three engines of vLLM on the CPU of this machine, one thread each, in `build/vllm-venv` (`make test-vllm` makes
it): one without offloading, one with each store. Their caches and the primary tier hold one prompt and not two. Every
prompt is computed once by all of them, and again in turn, A B C A B C: the second time is reported, medians and the
range. A run in which an engine computes what it was to load, or answers other tokens, ends by name.

The copy between vLLM's cache and its primary tier is that of `tests/support/vllm/host_tiering.py`, because vLLM's own
needs an accelerator. Files are read from the page cache, unless `--cold` drops them from it before each turn.

    benchmarks/tier.py [--tokens 500,1000,2000] [--rounds 7] [--layers 8] [--hidden 512] [--cold] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from kvxfer.engine.tiny import make_tiny_model
from tests.support.vllm.engines import PYTHON
from tests.support.vllm.tiered import Driven, TierProcess, files, prompt

BLOCK_TOKENS, HEAD_BYTES, KV_HEADS = 32, 64 * 4, 2
COMPUTED, FILE, POOL = "computed", "file", "pool"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="500,1000,2000", help="lengths of prompts")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache before they are read")
    parser.add_argument("--json", type=pathlib.Path, help="write the rows there too")
    args = parser.parse_args()
    if not PYTHON.exists():
        sys.exit(f"{PYTHON} is not there: `make test-vllm` makes it")
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        model = make_tiny_model(
            directory / "model",
            layers=args.layers,
            hidden=args.hidden,
            heads=args.hidden // 64,
            kv_heads=KV_HEADS,
            vocab=1024,
            max_position_embeddings=8192,
        )
        time.sleep(2.0)  # so that no engine is taken to be older than the weights
        rows = [measure(directory / str(tokens), model, tokens, args) for tokens in map(int, args.tokens.split(","))]
    show(rows)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def measure(directory: pathlib.Path, model: pathlib.Path, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """One length of prompts."""
    directory.mkdir()
    row_bytes = BLOCK_TOKENS * args.layers * KV_HEADS * HEAD_BYTES * 2
    blocks = -(-tokens // BLOCK_TOKENS)
    capacity = (args.rounds + 1) * blocks * (row_bytes + 4096)
    llm = {
        "max_model_len": (blocks + 1) * BLOCK_TOKENS,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": blocks + 4,
        "max_num_seqs": 1,
    }
    service = TierProcess(directory, capacity=capacity)
    stores = {
        COMPUTED: {},
        FILE: {"store": "file", "path": str(directory / "kv"), "capacity_bytes": capacity},
        POOL: service.tier,
    }
    engines = {
        name: Driven(model, tier, directory / f"{name}.log", llm=llm, cpu_bytes=(blocks + 4) * row_bytes)
        for name, tier in stores.items()
    }
    try:
        for engine in engines.values():
            engine.wait_ready()
        engines[POOL].wait_attached()
        seeds = range(args.rounds + 1)
        first = {
            name: [engine.ask("generate", ids=prompt(seed, tokens), n=1) for seed in seeds]
            for name, engine in engines.items()
        }
        times: dict[str, list[float]] = {name: [] for name in engines}
        whole = (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        for seed in seeds:
            for name, engine in engines.items():
                if args.cold and name == FILE:
                    drop(directory / "kv")
                answer = engine.ask("generate", ids=prompt(seed, tokens), n=1)
                cached = 0 if name == COMPUTED else whole
                if answer["cached"] != cached:
                    sys.exit(f"{name}: {answer['cached']} of {tokens} tokens were not computed, not {cached}")
                if answer["tokens"] != first[COMPUTED][seed]["tokens"]:
                    sys.exit(f"{name}: the answer to prompt {seed} is another one")
                times[name].append(answer["ms"])
    finally:
        for engine in engines.values():
            engine.end()
        service.end()
    kept = {name: sorted(values[1:]) for name, values in times.items()}  # the first turn warms up
    return {"tokens": tokens, "kv_bytes": whole // BLOCK_TOKENS * row_bytes, "ms": kept}


def drop(path: pathlib.Path) -> None:
    """Take the store's files out of the page cache."""
    for file in files(path):
        opened = os.open(file, os.O_RDONLY)
        os.fsync(opened)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)


def show(rows: list[dict[str, Any]]) -> None:
    print("| tokens | KV | computed, ms | from files, ms | from the pool, ms | files | pool |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        medians = {name: statistics.median(values) for name, values in row["ms"].items()}
        cells = [f"{medians[name]:.0f} ({values[0]:.0f} to {values[-1]:.0f})" for name, values in row["ms"].items()]
        gains = [f"{medians[COMPUTED] / medians[name]:.1f}x" for name in (FILE, POOL)]
        print(f"| {row['tokens']} | {row['kv_bytes'] / 2**20:.1f} MiB | {' | '.join(cells + gains)} |")


if __name__ == "__main__":
    main()
