"""KV events over ZMQ, as vLLM publishes them: which prefixes the engine's cache has from now on, or has no longer.

Decides the format on the wire: three frames (topic, number, batch), numbers without gaps, and a replay socket that
repeats the last batches. It must never know why a block was stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from kvxfer.errors import ConfigError
from kvxfer.forecast.paged_cache import CacheChange
from kvxfer.mock_engine.options import EventsFormat
from kvxfer.mock_engine.tokens import unpack_ids

REPLAYED_MAX = 10_000
"""Batches that can be replayed."""
QUEUED_MAX = 100_000
"""Batches that wait for one subscriber."""
MEDIUM = "GPU"
END = (-1).to_bytes(8, "big", signed=True)
"""The number that ends a replay."""


class KvEvents:
    """The publisher of one engine."""

    def __init__(
        self, host: str, port: int, replay_port: int, topic: str, block_tokens: int, form: EventsFormat, blocks: int
    ) -> None:
        self._block_tokens = block_tokens
        self._is_array = form is EventsFormat.ARRAY
        self._topic = topic.encode()
        self._number = 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=REPLAYED_MAX)
        self._tokens: OrderedDict[int, bytes] = OrderedDict()
        """The token ids of blocks that are, or may soon be, in the cache."""
        self._tokens_max = 4 * blocks
        self._context = zmq.Context()
        self._publisher = self._bound(zmq.PUB, host, port)
        self._replay = self._bound(zmq.ROUTER, host, replay_port) if replay_port else None
        self._loop = asyncio.get_running_loop()
        if self._replay is not None:
            self._loop.add_reader(self._replay.getsockopt(zmq.FD), self._on_replay)

    def know(self, keys: Sequence[int], packed: bytes) -> None:
        """The blocks of ``keys`` have these token ids."""
        size = 4 * self._block_tokens
        for index, key in enumerate(keys):
            self._tokens[key] = packed[index * size : (index + 1) * size]
            self._tokens.move_to_end(key)
        while len(self._tokens) > self._tokens_max:
            self._tokens.popitem(last=False)

    def publish(self, changes: Sequence[CacheChange]) -> None:
        """One batch for ``changes``."""
        events: list[Any] = []
        stored: list[CacheChange] = []
        removed: list[int] = []
        for change in changes:
            if stored and not (change.is_stored and change.parent == stored[-1].key):
                events.append(self._stored(stored))
                stored = []
            if removed and change.is_stored:
                events.append(self._event("BlockRemoved", block_hashes=removed, medium=MEDIUM))
                removed = []
            if change.is_stored:
                stored.append(change)
            else:
                removed.append(change.key)
        if stored:
            events.append(self._stored(stored))
        if removed:
            events.append(self._event("BlockRemoved", block_hashes=removed, medium=MEDIUM))
        self._send(events)

    def cleared(self) -> None:
        """The whole cache was emptied."""
        self._send([self._event("AllBlocksCleared")])

    def close(self) -> None:
        if self._replay is not None:
            self._loop.remove_reader(self._replay.getsockopt(zmq.FD))
            self._replay.close(linger=0)
        self._publisher.close(linger=0)
        self._context.term()

    def _bound(self, kind: int, host: str, port: int) -> Any:
        made = self._context.socket(kind)
        made.set_hwm(QUEUED_MAX)
        try:
            made.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            made.close(linger=0)
            self._context.term()
            raise ConfigError(f"KV events cannot be published at {host}:{port}: {error}") from None
        return made

    def _stored(self, changes: Sequence[CacheChange]) -> Any:
        tokens = b"".join([self._tokens.get(change.key, b"") for change in changes])
        return self._event(
            "BlockStored",
            block_hashes=[change.key for change in changes],
            parent_block_hash=changes[0].parent,
            token_ids=unpack_ids(tokens),
            block_size=self._block_tokens,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
        )

    def _event(self, name: str, **members: Any) -> Any:
        return [name, *members.values()] if self._is_array else {"type": name, **members}

    def _send(self, events: list[Any]) -> None:
        batch: Any = {"ts": time.time(), "events": events, "data_parallel_rank": 0}
        payload = msgspec.msgpack.encode(list(batch.values()) if self._is_array else batch)
        number = self._number.to_bytes(8, "big")
        self._number += 1
        self._sent.append((number, payload))
        self._publisher.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    def _on_replay(self) -> None:
        """ZMQ's descriptor tells only of changes: read until nothing is left."""
        assert self._replay is not None
        while self._replay.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            with contextlib.suppress(zmq.ZMQError):
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
                if len(frames) == 3 and len(frames[2]) == 8:
                    self._repeat(frames[0], frames[2])

    def _repeat(self, client: bytes, first: bytes) -> None:
        assert self._replay is not None
        for number, payload in self._sent:
            if number >= first:
                self._replay.send_multipart((client, b"", number, payload), zmq.NOBLOCK)
        self._replay.send_multipart((client, b"", END, b""), zmq.NOBLOCK)
