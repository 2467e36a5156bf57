"""Time the JSON scanner beside ``json.loads`` and, if it is installed, orjson, on bodies as clients send them.

    python benchmarks/json_scan.py [--runs 15]

Prints the best of the runs in microseconds, and the scanner's GB/s. Each run of the scanner also reads the model and
puts ``kv_transfer_params`` in; the parsers parse, and do not write the body again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import time
from collections.abc import Callable

from kvxfer.openai import scanner

FIELDS = scanner.Fields(
    ["model", "stream", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "kv_transfer_params"]
)
PARAMS = b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null}'


def scan_and_replace(body: bytes) -> object:
    scan = FIELDS.scan(body)
    assert scan.scalar("model") == "tiny"
    return scanner.replace(scan, {"kv_transfer_params": PARAMS, "stream": None})


def prompt(text: str, size: int) -> bytes:
    return json.dumps(
        {"model": "tiny", "max_tokens": 32, "stream": True, "prompt": text * (size // len(text.encode()))},
        ensure_ascii=False,
        separators=(",", ":"),
    ).encode()


def token_ids(size: int, separator: str) -> bytes:
    draw = random.Random(0)
    ids = [draw.randrange(128_000) for _ in range(size // 6)]
    return f'{{"model":"tiny","max_tokens":32,"prompt":[{separator.join(map(str, ids))}]}}'.encode()


def parts(size: int) -> bytes:
    part = b'{"type":"text","text":"a"}'
    content = b",".join([part] * (size // len(part)))
    return b'{"model":"tiny","messages":[{"role":"user","content":[' + content + b"]}]}"


def bodies() -> dict[str, bytes]:
    english, lines = "the quick brown fox jumps over the lazy dog ", "    return self.blocks[at:end]\n"
    return {
        "prompt, 2 KB": prompt(english, 2 << 10),
        "prompt, 64 KB": prompt(english, 64 << 10),
        "prompt of code, 64 KB": prompt(lines, 64 << 10),
        "prompt in Chinese, 64 KB": prompt("预填充与解码分离。", 64 << 10),
        "prompt in Russian, 64 KB": prompt("передача кэша между процессами ", 64 << 10),
        "token ids, 64 KB": token_ids(64 << 10, ","),
        "prompt, 16 MB": prompt(english, 16 << 20),
        "token ids, 16 MB": token_ids(16 << 20, ", "),
        "text parts, 16 MB": parts(16 << 20),
    }


def best(call: Callable[[bytes], object], body: bytes, runs: int) -> float:
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        call(body)
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    others: dict[str, Callable[[bytes], object]] = {"json.loads": json.loads}
    try:
        others["orjson"] = importlib.import_module("orjson").loads
    except ImportError:
        print("orjson is not installed")
    print(f"{'body':26}{'bytes':>10}{'scan, us':>12}{'GB/s':>8}" + "".join(f"{name + ', us':>16}" for name in others))
    for name, body in bodies().items():
        ours = best(scan_and_replace, body, runs)
        theirs = "".join(f"{best(call, body, runs) * 1e6:16.1f}" for call in others.values())
        print(f"{name:26}{len(body):10}{ours * 1e6:12.1f}{len(body) / ours / 1e9:8.2f}{theirs}", flush=True)


if __name__ == "__main__":
    main()
