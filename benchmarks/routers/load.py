"""The client of benchmarks/router.py, a process of its own: it asks one router, checks every answer and prints figures.

    python -m routers.load '{"mode": "closed", "port": 8000, ...}'      in benchmarks/; the fields are those of Job

One JSON object comes back on stdout, with this process's own CPU time. It decides how requests are sent, timed and
checked. It imports nothing of kvxfer and must never know which router it asks.

- ``closed``: ``clients`` connections that ask again as soon as they were answered, until ``requests`` were answered.
- ``unloaded``: one request at a time, once to prefill and decode by hand and once through the router, in turns.
- ``hold``: ``requests`` streams are open at once; what the router's memory was before, and is then.

A wrong answer ends the process: exit code 1, the reason as its last line on stderr.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import re
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

import httptools
import uvloop

from routers import proc

HOST = "127.0.0.1"
TEXT = re.compile(rb'"text": ?"((?:[^"\\]|\\.)*)"')
FIRST = b'"text"'
DONE = b"data: [DONE]"
DISTINCT = 64
"""Prompts; each has an answer of its own."""
OPENED_AT_ONCE = 32
SETTLE_S = 1.0
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa")


@dataclasses.dataclass(frozen=True)
class Job:
    """What is asked of one process of this program."""

    mode: str
    port: int
    """The router's."""
    pid: int
    """The router's: it and all its children are counted."""
    engines_pid: int
    dialect: str
    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    requests: int
    clients: int = 1
    prompt_bytes: int = 2048
    tokens: int = 32
    spread_s: float = 0.0
    """The first requests of all clients are spread over this time, so that they do not come in waves."""
    timeout_s: float = 120.0


class WrongAnswer(Exception):
    """An answer is not what the engines themselves answer."""


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    first_s: float
    """From the request until the first event with text."""


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[Answer] | None = None
        self._first: asyncio.Future[None] | None = None
        self.is_answering = self._is_open = False

    @classmethod
    async def open(cls, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, HOST, port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._is_open = True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_answering = self._is_open = False
        self._fail(ConnectionError(f"the connection was closed before the answer's end: {error or 'EOF'}"))

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        self._begin(request)
        self._answer = asyncio.get_running_loop().create_future()
        return self._answer

    def ask_for_first(self, request: bytes) -> asyncio.Future[None]:
        """Ready at the first event with text; the answer goes on meanwhile."""
        self._begin(request)
        self._first = asyncio.get_running_loop().create_future()
        return self._first

    def _begin(self, request: bytes) -> None:
        if not self._is_open:
            raise ConnectionError("the connection was closed between two requests")
        self.is_answering = True
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._first_s = 0.0
        self._begun_s = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"no HTTP: {error}"))

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        if not self._first_s and FIRST in body:
            self._first_s = time.perf_counter() - self._begun_s
            if self._first is not None and not self._first.done():
                self._first.set_result(None)

    def on_message_complete(self) -> None:
        self.is_answering = False
        if self._answer is None or self._answer.done():
            return self._fail(ConnectionError(f"the answer ended early: {b''.join(self._parts)[:300]!r}"))
        self._answer.set_result(Answer(self._parser.get_status_code(), b"".join(self._parts), self._first_s))

    def _fail(self, error: Exception) -> None:
        for waiting in (self._answer, self._first):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)


def prompts(count: int, nbytes: int) -> list[str]:
    """The same in every process; the first words of each differ."""
    found = []
    for number in range(count):
        rng, text = random.Random(number), f"document {number}"
        while len(text) < nbytes:
            text += " " + rng.choice(WORDS)
        found.append(text[:nbytes])
    return found


def request_bytes(port: int, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}:{port}\r\ncontent-type: application/json\r\n"
    return head.encode() + b"accept: */*\r\ncontent-length: %d\r\n\r\n" % len(content) + content


def text_of(body: bytes) -> str:
    """The text of a streamed completion. Raises ValueError, KeyError, IndexError for other things."""
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ") and line.strip() != DONE]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def check(answer: Answer, tokens: int, expected: bytes | None) -> bytes:
    """The texts of a streamed answer, as they are escaped in it. Raises WrongAnswer."""
    body = answer.body
    if answer.status != 200:
        raise WrongAnswer(f"status {answer.status}: {body[:300]!r}")
    if not body.rstrip().endswith(DONE):
        raise WrongAnswer(f"the stream's end is {body[-120:]!r}, not [DONE]")
    if (count := body.count(b"data: ")) != tokens + 1:
        raise WrongAnswer(f"{count} events for {tokens} tokens and [DONE]")
    texts = TEXT.findall(body)
    found = b"".join(texts)
    if expected is None or (len(texts) == tokens and found == expected):
        return found
    try:
        text = text_of(body)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise WrongAnswer(f"an event is no completion: {error!r}") from None
    if text != json.loads(b'"' + expected + b'"'):
        raise WrongAnswer(f"the text is {text[:120]!r}, the engines answer {expected[:120]!r}")
    return found


class ByHand:
    """Prefill and decode by hand, as a router of the dialect would, over one connection to each."""

    def __init__(self, dialect: str, ports: tuple[int, int], prefill: Connection, decode: Connection) -> None:
        self._dialect, self._ports = dialect, ports
        self._prefill, self._decode = prefill, decode

    @classmethod
    async def open(cls, job: Job, place: int) -> ByHand:
        """To the pair of engines whose turn ``place`` is."""
        prefill, decode = (ports[place % len(ports)] for ports in (job.prefill, job.decode))
        return cls(job.dialect, (prefill, decode), await Connection.open(prefill), await Connection.open(decode))

    async def ask(self, body: dict[str, Any]) -> Answer:
        """``first_s`` counts from the begin of the prefill."""
        return await (self._in_turn(body) if self._dialect == "vllm" else self._at_once(body))

    async def _in_turn(self, body: dict[str, Any]) -> Answer:
        begun_s = time.perf_counter()
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        leg = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
        prefilled = await self._prefill.ask(request_bytes(self._ports[0], leg))
        if prefilled.status != 200:
            raise WrongAnswer(f"prefill by hand: status {prefilled.status}: {prefilled.body[:300]!r}")
        params = json.loads(prefilled.body)["kv_transfer_params"]
        before_s = time.perf_counter() - begun_s
        answer = await self._decode.ask(request_bytes(self._ports[1], {**body, "kv_transfer_params": params}))
        return dataclasses.replace(answer, first_s=answer.first_s + before_s)

    async def _at_once(self, body: dict[str, Any]) -> Answer:
        room = {"bootstrap_host": HOST, "bootstrap_port": self._ports[0], "bootstrap_room": random.getrandbits(62) + 1}
        legs = [request_bytes(port, {**body, **room}) for port in self._ports]
        prefilled = self._prefill.ask(legs[0])
        answer = await self._decode.ask(legs[1])
        await prefilled
        return answer

    def close(self) -> None:
        self._prefill.transport.close()
        self._decode.transport.close()


class Load:
    """One job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        distinct = min(DISTINCT, max(job.requests, job.clients))
        fields = {"model": "mock", "max_tokens": job.tokens, "temperature": 0, "stream": True}
        self.bodies = [{**fields, "prompt": prompt} for prompt in prompts(distinct, job.prompt_bytes)]
        self.requests = [request_bytes(job.port, body) for body in self.bodies]
        self.asked = 0
        """Of the engines, by way of the router and by hand."""

    async def learn(self) -> list[bytes]:
        """What the engines themselves answer to each prompt."""

        async def one(place: int) -> bytes:
            hand = await ByHand.open(self.job, place)
            try:
                return check(await hand.ask(self.bodies[place]), self.job.tokens, None)
            finally:
                hand.close()

        self.asked += len(self.bodies)
        return await asyncio.gather(*(one(place) for place in range(len(self.bodies))))

    async def closed(self) -> dict[str, Any]:
        job = self.job
        expected = await self.learn()
        connections = [await Connection.open(job.port) for _ in range(job.clients)]
        first: list[float] = []
        ended: list[float] = []

        async def client(connection: Connection, places: Iterator[int], delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            for place in places:
                place %= len(self.requests)
                answer = await connection.ask(self.requests[place])
                check(answer, job.tokens, expected[place])
                first.append(answer.first_s)
                ended.append(time.perf_counter())
                self.asked += 1

        await asyncio.gather(*(client(one, iter([number]), 0.0) for number, one in enumerate(connections)))
        first.clear()
        ended.clear()
        places, delay_s = iter(range(job.requests)), job.spread_s / job.clients
        begun = self.cpu_s()
        await asyncio.gather(*(client(one, places, number * delay_s) for number, one in enumerate(connections)))
        cpu_s = [end - begin for begin, end in zip(begun, self.cpu_s(), strict=True)]
        router, engines, own = (round(each / job.requests * 1000, 4) for each in cpu_s)
        first.sort()
        # Without the first and the last answer of each client, while not all of them were at work.
        middle = job.requests - 2 * job.clients
        took_s = ended[-1 - job.clients] - ended[job.clients - 1]
        return {
            "cpu_s_per_1000": router,
            "requests_per_s": round(middle / took_s, 2),
            "ttft_p50_ms": round(first[len(first) // 2] * 1e3, 3),
            "ttft_p99_ms": round(first[len(first) * 99 // 100] * 1e3, 3),
            "engines_cpu_s_per_1000": engines,
            "client_cpu_s_per_1000": own,
        }

    def cpu_s(self) -> tuple[float, float, float]:
        """Of the router's processes, the engines' and this one."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        return proc.cpu_s(self.job.pid), proc.cpu_s(self.job.engines_pid), own.ru_utime + own.ru_stime

    async def unloaded(self) -> dict[str, Any]:
        job = self.job
        hand, connection = await ByHand.open(job, 0), await Connection.open(job.port)
        direct: list[float] = []
        routed: list[float] = []
        warm = min(len(self.bodies), job.requests)
        for number in range(warm + job.requests):
            place = number % len(self.bodies)
            answer = await hand.ask(self.bodies[place])
            expected = check(answer, job.tokens, None)
            direct.append(answer.first_s)
            answer = await connection.ask(self.requests[place])
            check(answer, job.tokens, expected)
            routed.append(answer.first_s)
            self.asked += 2
        direct_ms, routed_ms = (sorted(each[warm:])[job.requests // 2] * 1e3 for each in (direct, routed))
        return {
            "added_ttft_ms": round(routed_ms - direct_ms, 4),
            "direct_ttft_ms": round(direct_ms, 4),
            "routed_ttft_ms": round(routed_ms, 4),
        }

    async def hold(self) -> dict[str, Any]:
        """Each warm-up request has one token, which does not wait for the pace."""
        job = self.job
        short = request_bytes(job.port, {**self.bodies[0], "max_tokens": 1})
        warm = [await Connection.open(job.port) for _ in range(min(OPENED_AT_ONCE, job.requests))]
        for answer in await asyncio.gather(*(connection.ask(short) for connection in warm)):
            check(answer, 1, None)
        self.asked += len(warm)
        for connection in warm:
            connection.transport.close()
        await asyncio.sleep(SETTLE_S)
        before = proc.memory(job.pid)
        streams: list[Connection] = []
        places = itertools.cycle(range(len(self.requests)))

        async def some(count: int) -> None:
            for _ in range(count):
                connection = await Connection.open(job.port)
                streams.append(connection)
                self.asked += 1
                await connection.ask_for_first(self.requests[next(places)])

        shares = [len(range(at, job.requests, OPENED_AT_ONCE)) for at in range(OPENED_AT_ONCE)]
        await asyncio.gather(*(some(count) for count in shares))
        await asyncio.sleep(SETTLE_S)
        if (count := sum(connection.is_answering for connection in streams)) != job.requests:
            raise WrongAnswer(f"{count} of {job.requests} streams are still open")
        after = proc.memory(job.pid)
        for connection in streams:
            connection.transport.abort()
        return {
            "stream_kib": round((after.anonymous - before.anonymous) / job.requests, 2),
            "stream_rss_kib": round((after.rss - before.rss) / job.requests, 2),
            "warm_rss_mib": round(before.rss / 1024, 2),
            "open_rss_mib": round(after.rss / 1024, 2),
        }

    async def run(self) -> dict[str, Any]:
        mode = {"closed": self.closed, "unloaded": self.unloaded, "hold": self.hold}[self.job.mode]
        async with asyncio.timeout(self.job.timeout_s):
            return {**await mode(), "asked": self.asked}


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    try:
        found = uvloop.run(Load(job).run())
    except TimeoutError:
        raise SystemExit(f"not all was answered within {job.timeout_s:g} s") from None
    except (WrongAnswer, OSError) as error:
        raise SystemExit(f"{error}") from None
    print(json.dumps(found))


if __name__ == "__main__":
    main()
