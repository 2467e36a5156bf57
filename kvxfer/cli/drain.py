"""``kvxfer drain WORKER``: have routers give a worker no new requests, and wait until what runs there has ended.

Decides what is asked of the routers' admin routes and what is printed; which worker takes the requests instead is the
routers' business. A router that restarts forgets the order, so each is told again for as long as this waits.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import http.client
import json
import pathlib
import sys
import time
import urllib.parse
from typing import Any

from kvxfer.errors import ConfigError, DeadlineExceededError, KvxferError, TransportError, UsageError
from kvxfer.protocol.http_url import HttpUrl

POLL_S = 0.2
ANSWER_S = 10.0
ANSWER_BYTES_MAX = 16 << 20
AWAY_S = 10.0
"""How long all routers may be away, each of which may be restarting, before there is nothing to wait for."""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("worker", metavar="WORKER", help="the worker's id, as GET /workers lists it")
    parser.add_argument(
        "--router",
        required=True,
        action="append",
        metavar="URL",
        help="a router's http:// URL; repeat it for each router",
    )
    parser.add_argument("--admin-key-file", default="", metavar="FILE", help="file with an admin key in a line")
    parser.add_argument("--undo", action="store_true", help="give the worker new requests again")
    parser.add_argument(
        "--wait", type=float, default=300.0, metavar="SECONDS", help="longest time to wait for what runs (default: 300)"
    )


def run(args: argparse.Namespace) -> int:
    if not args.wait >= 0:
        raise UsageError(f"--wait must be 0 or more seconds, not {args.wait:g}")
    routers = [_Admin(url, args.admin_key_file) for url in dict.fromkeys(args.router)]
    if args.undo:
        for router in routers:
            router.set_drained(args.worker, False)
        print(f"{args.worker} gets new requests again", flush=True)
        return 0
    with concurrent.futures.ThreadPoolExecutor(len(routers)) as threads:
        _wait_drained(args.worker, routers, args.wait, threads)
    print(f"{args.worker} is drained: it gets no new requests, and none runs there", flush=True)
    return 0


def _wait_drained(
    worker: str, routers: list[_Admin], wait_s: float, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    """Return once no router that answers has a request at the worker.

    Raises what the routers say if none takes the order; TransportError if all are away for AWAY_S after that; and
    DeadlineExceededError.
    """
    deadline = time.monotonic() + wait_s
    is_taken = False
    said: dict[str, str] = {}
    heard_s = time.monotonic()
    while True:
        answers = list(threads.map(lambda router: router.drain(worker), routers))
        errors = [answer.error for answer in answers if answer.error is not None]
        is_taken = is_taken or len(errors) < len(answers)
        if not is_taken:
            raise errors[0]
        for answer in answers:
            if answer.error is not None and said.get(answer.url) != str(answer.error):
                print(
                    f"{answer.error}; it is asked again while others have requests there", file=sys.stderr, flush=True
                )
            said[answer.url] = str(answer.error or "")
        left = sum(answer.left for answer in answers)
        now_s = time.monotonic()
        if all(isinstance(answer.error, TransportError) for answer in answers):
            if now_s - heard_s >= AWAY_S:
                raise errors[0]
        elif left == 0:
            return
        else:
            heard_s = now_s
        if now_s >= deadline:
            raise DeadlineExceededError(
                f"{left} requests still run at {worker} after {wait_s:g} s; it gets no new ones"
            )
        time.sleep(POLL_S)


@dataclasses.dataclass(frozen=True)
class _DrainAnswer:
    """What became of the order at one router: how many of its requests the worker has, or why it was not taken."""

    url: str
    left: int
    error: KvxferError | None = None


class _Admin:
    """The admin routes of one router."""

    def __init__(self, url: str, key_file: str) -> None:
        self.url = url
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

    def set_drained(self, worker: str, on: bool) -> None:
        """Raises as :meth:`ask`."""
        path = f"/workers/{urllib.parse.quote(worker, safe='')}/drain?on={'true' if on else 'false'}"
        self.ask("POST", path)

    def drain(self, worker: str) -> _DrainAnswer:
        """Give the order, again if it was given, and say what runs."""
        try:
            self.set_drained(worker, True)
            listed = self.ask("GET", "/workers")["data"]
        except KvxferError as error:
            return _DrainAnswer(self.url, 0, error)
        return _DrainAnswer(self.url, sum(sum(one["inflight"].values()) for one in listed if one["agent_id"] == worker))

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
