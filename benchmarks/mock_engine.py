"""What the mock engine costs: CPU seconds for 1,000 streamed requests, and how many requests/s it answers.

A run starts one process with one engine and asks it over keep-alive connections. The client is a process of its own,
is built on httptools, and says its own CPU time too: if it is busier than the engine, the requests/s are its limit.

    python benchmarks/mock_engine.py [--seconds 4] [--clients 64] [--only fixed]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import resource
import subprocess
import sys
import time
from typing import Any, cast

import httptools
import uvloop

TOKENS = 32
PROMPTS = 64
STEPS = ("--step-ms", "5", "--prefill-token-us", "0.5", "--decode-sequence-us", "5", "--max-num-seqs", "1024")
"""So fast that the process, not the model, is what limits."""
CASES: dict[str, tuple[str, ...]] = {
    "fixed, 10 ms a token": ("--itl-ms", "10"),
    "fixed, unpaced": ("--itl-ms", "0"),
    "steps": ("--pace", "steps", *STEPS),
    "steps, no prefix cache": ("--pace", "steps", *STEPS, "--no-prefix-caching"),
}


class Client(asyncio.Protocol):
    """One connection that asks again as soon as it was answered."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._events = 0
        self._parser = httptools.HttpResponseParser(self)
        self._begun_s = self._first_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        self._events, self._first_s, self._begun_s = 0, 0.0, time.perf_counter()
        self._transport.write(self._run.next_request())

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._first_s = self._first_s or time.perf_counter()
        self._events += body.count(b"data: ")

    def on_message_complete(self) -> None:
        assert self._parser.get_status_code() == 200
        assert self._events == TOKENS + 1, self._events
        self._parser = httptools.HttpResponseParser(self)
        if self._run.answered(self._first_s - self._begun_s):
            self._ask()
        else:
            self._transport.close()
            self._run.ended()


class Run:
    """All connections of one case; ``warm_s`` are not counted."""

    def __init__(self, clients: int, seconds: float, warm_s: float, pid: int, prompt_bytes: int) -> None:
        self._open = clients
        self._warm_until_s = time.perf_counter() + warm_s
        self._until_s = self._warm_until_s + seconds
        self._pid = pid
        self._requests = [_request(number, prompt_bytes) for number in range(PROMPTS)]
        self._number = 0
        self._counted: list[float] = []
        self._begin: tuple[float, float, float] | None = None
        self._end: tuple[float, float, float] | None = None
        self.done = asyncio.get_running_loop().create_future()

    def next_request(self) -> bytes:
        self._number += 1
        return self._requests[self._number % PROMPTS]

    def answered(self, ttft_s: float) -> bool:
        now = time.perf_counter()
        if now < self._warm_until_s:
            return True
        if self._begin is None:
            self._begin = self._now()
        if now < self._until_s:
            self._counted.append(ttft_s)
            return True
        if self._end is None:
            self._end = self._now()
        return False

    def ended(self) -> None:
        self._open -= 1
        if not self._open:
            self.done.set_result(None)

    def _now(self) -> tuple[float, float, float]:
        own = resource.getrusage(resource.RUSAGE_SELF)
        return time.perf_counter(), _cpu_s(self._pid), own.ru_utime + own.ru_stime

    def result(self) -> dict[str, float]:
        assert self._begin is not None
        assert self._end is not None
        took, engine_s, client_s = (end - begin for begin, end in zip(self._begin, self._end, strict=True))
        count, times = len(self._counted), sorted(self._counted)
        return {
            "requests": count,
            "requests_per_s": round(count / took, 1),
            "engine_cpu_s_per_1000": round(engine_s / count * 1000, 3),
            "client_cpu_s_per_1000": round(client_s / count * 1000, 3),
            "requests_per_s_a_core": round(count / engine_s, 1),
            "ttft_p50_ms": round(times[count // 2] * 1e3, 2),
            "ttft_p99_ms": round(times[count * 99 // 100] * 1e3, 2),
        }


def _request(number: int, prompt_bytes: int) -> bytes:
    prompt = (f"prompt {number} " + "of a document that is long enough " * (prompt_bytes // 34 + 1))[:prompt_bytes]
    body = json.dumps({"model": "mock", "prompt": prompt, "max_tokens": TOKENS, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: mock\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    )
    return head.encode() + b"\r\n\r\n" + body


def _cpu_s(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _measure(args: argparse.Namespace, flags: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvxfer.cli", "mock-engine", "--record", "0", "--log-level", "warning", *flags]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        ready = json.loads(await process.stdout.readline())
        run = Run(args.clients, args.seconds, 1.0, process.pid, args.prompt_bytes)
        host, _, port = ready["address"].rpartition(":")
        loop = asyncio.get_running_loop()
        for _ in range(args.clients):
            await loop.create_connection(lambda: Client(run), host, int(port))
        await run.done
        return run.result()
    finally:
        process.terminate()
        await process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--prompt-bytes", type=int, default=2000)
    parser.add_argument("--only", default="", help="cases whose name begins so")
    args = parser.parse_args()
    for name, flags in CASES.items():
        if name.startswith(args.only):
            print(json.dumps({"case": name, "clients": args.clients, **uvloop.run(_measure(args, flags))}), flush=True)


if __name__ == "__main__":
    main()
