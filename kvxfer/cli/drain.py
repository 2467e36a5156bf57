"""``kvxfer drain WORKER``: have a router give a worker no new requests, and wait until what runs there has ended.

Decides what is asked of the router's admin routes and what is printed; which worker takes the requests instead is the
router's business.
"""

from __future__ import annotations

import argparse
import http.client
import json
import pathlib
import time
import urllib.parse
from typing import Any

from kvxfer.errors import ConfigError, DeadlineExceededError, TransportError, UsageError
from kvxfer.protocol.http_url import HttpUrl

POLL_S = 0.2
ANSWER_S = 10.0
ANSWER_BYTES_MAX = 16 << 20


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("worker", metavar="WORKER", help="the worker's id, as GET /workers lists it")
    parser.add_argument("--router", required=True, metavar="URL", help="the router's http:// URL")
    parser.add_argument("--admin-key-file", default="", metavar="FILE", help="file with an admin key in a line")
    parser.add_argument("--undo", action="store_true", help="give the worker new requests again")
    parser.add_argument(
        "--wait", type=float, default=300.0, metavar="SECONDS", help="longest time to wait for what runs (default: 300)"
    )


def run(args: argparse.Namespace) -> int:
    if not args.wait >= 0:
        raise UsageError(f"--wait must be 0 or more seconds, not {args.wait:g}")
    admin = _Admin(args.router, args.admin_key_file)
    path = f"/workers/{urllib.parse.quote(args.worker, safe='')}/drain?on={'false' if args.undo else 'true'}"
    admin.ask("POST", path)
    if args.undo:
        print(f"{args.worker} gets new requests again", flush=True)
        return 0
    deadline = time.monotonic() + args.wait
    while True:
        left = _inflight(admin, args.worker)
        if not left:
            print(f"{args.worker} is drained: it gets no new requests, and none runs there", flush=True)
            return 0
        if time.monotonic() >= deadline:
            raise DeadlineExceededError(
                f"{left} requests still run at {args.worker} after {args.wait:g} s; it gets no new ones"
            )
        time.sleep(POLL_S)


def _inflight(admin: _Admin, worker: str) -> int:
    for entry in admin.ask("GET", "/workers")["data"]:
        if entry["agent_id"] == worker:
            return sum(entry["inflight"].values())
    return 0


class _Admin:
    """The admin routes of one router."""

    def __init__(self, url: str, key_file: str) -> None:
        self._url = HttpUrl.parse("router", url)
        self._headers: dict[str, str] = {}
        if key_file:
            try:
                lines = [line.strip() for line in pathlib.Path(key_file).read_text(encoding="utf-8").splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
                raise ConfigError(f"cannot read the admin key from {key_file}: {reason}") from None
            key = next((line for line in lines if line and not line.startswith("#")), "")
            if not key:
                raise ConfigError(f"{key_file} holds no admin key")
            if key.startswith(("keys:", "defaults:", "---", "{")):
                raise ConfigError(f"{key_file} describes keys; a file with one of them alone, in a line, is wanted")
            if not (key.isascii() and key.isprintable()):
                raise ConfigError(f"{key_file} holds a key that no header can carry")
            self._headers["authorization"] = f"Bearer {key}"

    def ask(self, method: str, path: str) -> Any:
        """The answer as an object. Raises UsageError for what the router refuses, TransportError where it is away."""
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.host, self._url.port, timeout=ANSWER_S)
        try:
            connection.request(method, path, headers=self._headers)
            response = connection.getresponse()
            content = response.read(ANSWER_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            raise TransportError(f"the router at {self._url.host}:{self._url.port} does not answer: {error}") from None
        finally:
            connection.close()
        try:
            body = json.loads(content)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise TransportError(
                f"{self._url.host}:{self._url.port} answered {response.status}, and not as a router does"
            )
        if response.status >= 400:
            message = body.get("error", {}).get("message", f"refused with status {response.status}")
            raise UsageError(f"the router refused: {message}")
        return body
