"""How a decode engine reaches the KV at a prefill engine: in this process directly, elsewhere over that engine's HTTP.

Decides which engine an address names. It must never know which dialect named it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Protocol

import msgspec

from kvxfer.config import is_loopback
from kvxfer.errors import KvxferError, PeerGoneError, RefusedError, from_code
from kvxfer.mock_engine.holds import KvHolds
from kvxfer.mock_engine.legs import KvSource

CLAIM_PATH = "/mock/kv/claim"
RELEASE_PATH = "/mock/kv/release"
ANSWER_BYTES_MAX = 1 << 20


class HoldingEngine(Protocol):
    """An engine of this process, as far as readers need it."""

    engine_id: str
    holds: KvHolds


@dataclasses.dataclass(frozen=True)
class KvClaim:
    """KV that a reader may use until it releases it."""

    key: str
    engine: HoldingEngine | None
    address: str


class KvClaims:
    """All engines of this process by their addresses and ids; and the way to others."""

    def __init__(self, *, dials_anywhere: bool) -> None:
        self._dials_anywhere = dials_anywhere
        self._by_port: dict[int, HoldingEngine] = {}
        self._by_id: dict[str, HoldingEngine] = {}
        self._releases: set[asyncio.Task[None]] = set()

    def add(self, engine: HoldingEngine, *ports: int) -> None:
        """``engine`` is reached at ``ports`` of this machine."""
        self._by_id[engine.engine_id] = engine
        self._by_port.update(dict.fromkeys(ports, engine))

    def engine_at(self, source: KvSource) -> HoldingEngine | None:
        """The engine of this process that ``source`` names, if it is one."""
        host, _, port = source.address.rpartition(":")
        if port.isdigit() and is_loopback(host):
            return self._by_port.get(int(port))
        return self._by_id.get(source.engine_id) if not source.address else None

    async def claim(self, key: str, source: KvSource, wait_s: float) -> KvClaim:
        """Raises GrantGoneError, DeadlineExceededError, PeerGoneError or RefusedError where there is no KV."""
        engine = self.engine_at(source)
        if engine is not None:
            if source.engine_id and source.engine_id != engine.engine_id and key.startswith("nixl:"):
                raise RefusedError(f"engine {source.engine_id} is no longer at {source.address}")
            await engine.holds.claim(key, wait_s, source.block_ids)
            return KvClaim(key, engine, source.address)
        if not source.address:
            raise RefusedError("the request names no prefill engine that is known here")
        body = {"key": key, "wait_s": wait_s, "engine_id": source.engine_id, "block_ids": source.block_ids}
        await self._post(source.address, CLAIM_PATH, body, wait_s + 5)
        return KvClaim(key, None, source.address)

    def release(self, claim: KvClaim) -> None:
        """The KV is needed no longer."""
        if claim.engine is not None:
            claim.engine.holds.release(claim.key)
            return
        task = asyncio.get_running_loop().create_task(self._release(claim))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, claim: KvClaim) -> None:
        try:
            await self._post(claim.address, RELEASE_PATH, {"key": claim.key}, 10)
        except KvxferError:
            return  # its lease ends it

    async def _post(self, address: str, path: str, body: dict[str, object], timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        if not port.isdigit() or not (self._dials_anywhere or is_loopback(host)):
            raise RefusedError(f"{address!r:.100} is not an address that may be dialled")
        content = msgspec.json.encode(body)
        head = f"POST {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                try:
                    writer.write(head.encode() + content)
                    answer = await reader.read(ANSWER_BYTES_MAX)
                    while more := await reader.read(ANSWER_BYTES_MAX):
                        answer += more
                finally:
                    writer.close()
        except (OSError, TimeoutError) as error:
            raise PeerGoneError(f"the prefill engine at {address} cannot be reached: {error}") from None
        first, _, text = answer.partition(b"\r\n\r\n")
        if first.startswith(b"HTTP/1.1 200 "):
            return
        try:
            said = msgspec.json.decode(text)["error"]
            raise from_code(str(said["code"]), str(said["message"]))
        except (msgspec.DecodeError, KeyError, TypeError):
            raise PeerGoneError(f"the prefill engine at {address} gave no answer") from None
