"""A child for the supervisor's tests: lives and dies as its first argument says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time

from kvxfer.cli import lifetime


async def serve(parent: int) -> None:
    stop = asyncio.Event()
    lifetime.stop_on_signals(stop)
    lifetime.watch_parent(parent, stop)
    print("noise that is not JSON", flush=True)
    print(json.dumps({"event": "ready", "address": "127.0.0.1:1", "pid": os.getpid()}), flush=True)
    print("serving", file=sys.stderr, flush=True)
    await stop.wait()
    print("stopped well", file=sys.stderr, flush=True)


def main() -> int:
    mode = sys.argv[1]
    parent = int(sys.argv[-1].partition("=")[2])
    lifetime.die_with_parent(parent)
    if mode == "config":
        print("kvxfer: port 1 is taken", file=sys.stderr)
        return 2
    if mode == "crash":
        print("Traceback: something", file=sys.stderr)
        return 3
    if mode == "talkative":
        for stream in (sys.stderr, sys.stdout):
            print("x" * (3 << 20), file=stream, flush=True)
    if mode == "silent":
        time.sleep(60)
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("loading", file=sys.stderr, flush=True)
        time.sleep(60)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(json.dumps({"event": "ready"}), flush=True)
        time.sleep(60)
    asyncio.run(serve(parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
