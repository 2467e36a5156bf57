"""A child for the supervisor's tests: runs and dies as its first argument says."""

from __future__ import annotations

import asyncio
import http.server
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from kvxfer.cli import lifetime


def answering(answers: Iterator[int | None]) -> str:
    """A URL where each request is answered with the next status; None ends the process."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = next(answers)
            if status is None:
                os._exit(3)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps({"reason": "no_worker", "message": f"none at {self.path}"}).encode())

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


ANSWERS: dict[str, Callable[[], Iterator[int | None]]] = {
    "slow": lambda: itertools.chain([503, 503], itertools.repeat(200)),
    "dying": lambda: itertools.chain([503], itertools.repeat(None)),
}


async def serve(parent: int, url: str = "") -> None:
    stop = asyncio.Event()
    lifetime.stop_on_signals(stop)
    lifetime.watch_parent(parent, stop)
    print("noise that is not JSON", flush=True)
    ready = {"event": "ready", "address": "127.0.0.1:1", "http_url": url, "pid": os.getpid()}
    print(json.dumps(ready), flush=True)
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
    asyncio.run(serve(parent, answering(ANSWERS[mode]()) if mode in ANSWERS else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
