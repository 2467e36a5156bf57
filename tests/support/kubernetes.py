"""A fake Kubernetes API server: it lists and watches EndpointSlices, over real sockets, and forgets old versions."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

PATH = "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"


def endpoint(address: str, pod: str | None = "pod", *, uid: str = "", **more: Any) -> dict[str, Any]:
    """A ready endpoint."""
    target = {} if pod is None else {"targetRef": {"kind": "Pod", "name": pod, **({"uid": uid} if uid else {})}}
    return {"addresses": [address], "conditions": {"ready": True}, **target, **more}


def endpoint_slice(
    name: str, role: str | None, *endpoints: dict[str, Any], labels: dict[str, str] | None = None, ports: Any = ...
) -> dict[str, Any]:
    named = {} if role is None else {"kvxfer.io/role": role}
    return {
        "metadata": {"name": name, "labels": {**named, **(labels or {})}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000}] if ports is ... else ports,
        "endpoints": list(endpoints),
    }


class FakeKubernetes:
    """Slices by name; each change has a version, and is sent to those that watch."""

    def __init__(self) -> None:
        self.version = 100
        self.oldest = 0
        """A watch from before is answered 410."""
        self.slices: dict[str, dict[str, Any]] = {}
        self.events: list[tuple[int, dict[str, Any]]] = []
        self.requests: list[tuple[dict[str, str], dict[str, str]]] = []
        """(query, headers) of each."""
        self.status = 0
        """Answered to everything while it is set."""
        self.token = ""
        """Asked for where it is set."""
        self.page_slices = 2
        self.port = 0
        self._changed = asyncio.Condition()
        self._writers: set[asyncio.StreamWriter] = set()
        self._generation = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def watches(self) -> list[dict[str, str]]:
        return [query for query, _ in self.requests if "watch" in query]

    @property
    def lists(self) -> int:
        return sum("watch" not in query and "continue" not in query for query, _ in self.requests)

    async def say(self, event: Any) -> None:
        """Any event, once: a later list is newer."""
        self.version += 1
        await self.send(event)

    async def put(self, value: dict[str, Any]) -> None:
        kind = "MODIFIED" if value["metadata"]["name"] in self.slices else "ADDED"
        self.version += 1
        value = {**value, "metadata": {**value["metadata"], "resourceVersion": str(self.version)}}
        self.slices[value["metadata"]["name"]] = value
        await self.send({"type": kind, "object": value})

    async def delete(self, name: str) -> None:
        self.version += 1
        value = self.slices.pop(name)
        metadata = {**value["metadata"], "resourceVersion": str(self.version)}
        await self.send({"type": "DELETED", "object": {**value, "metadata": metadata}})

    async def bookmark(self) -> None:
        self.version += 5
        metadata = {"resourceVersion": str(self.version)}
        await self.send({"type": "BOOKMARK", "object": {"kind": "EndpointSlice", "metadata": metadata}})

    async def send(self, event: dict[str, Any]) -> None:
        async with self._changed:
            self.events.append((self.version, event))
            self._changed.notify_all()

    async def end_watches(self) -> None:
        """As a server does after ``timeoutSeconds``: with a whole last chunk."""
        async with self._changed:
            self._generation += 1
            self._changed.notify_all()

    def cut(self) -> None:
        """Every connection, at once."""
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                target = urlsplit(head[0].split(" ")[1])
                query = {name: values[0] for name, values in parse_qs(target.query).items()}
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                self.requests.append((query, headers))
                if self.status or (self.token and headers.get("authorization") != f"bearer {self.token}".lower()):
                    self._answer(writer, self.status or 401, {"kind": "Status", "message": "scripted"})
                elif target.path != PATH:
                    self._answer(writer, 404, {"kind": "Status", "message": "no such path"})
                elif "watch" in query:
                    await self._watch(writer, query)
                else:
                    self._answer(writer, 200, self._page(query))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _page(self, query: dict[str, str]) -> dict[str, Any]:
        at = int(query.get("continue", "0"))
        items = list(self.slices.values())
        metadata = {"resourceVersion": str(self.version)}
        if at + self.page_slices < len(items):
            metadata["continue"] = str(at + self.page_slices)
        return {"kind": "EndpointSliceList", "metadata": metadata, "items": items[at : at + self.page_slices]}

    async def _watch(self, writer: asyncio.StreamWriter, query: dict[str, str]) -> None:
        since = int(query["resourceVersion"])
        if since < self.oldest:
            self._answer(writer, 410, {"kind": "Status", "code": 410, "message": "too old resource version"})
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        sent, generation = 0, self._generation
        while generation == self._generation:
            for version, event in self.events[sent:]:
                if version > since:
                    self._chunk(writer, json.dumps(event).encode() + b"\n")
            sent = len(self.events)
            await writer.drain()
            async with self._changed:
                if sent == len(self.events) and generation == self._generation:
                    await self._changed.wait()
        writer.write(b"0\r\n\r\n")

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """In two, as the wire may cut it anywhere."""
        for part in (data[:2], data[2:]):
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))

    def _answer(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        writer.write(b"HTTP/1.1 %d Said\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))


@contextlib.asynccontextmanager
async def fake_kubernetes() -> AsyncIterator[FakeKubernetes]:
    fake = FakeKubernetes()
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()
        await fake.end_watches()
        fake.cut()
        await server.wait_closed()
