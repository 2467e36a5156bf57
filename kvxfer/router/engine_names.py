"""What P's engine calls itself, for dialects whose D must be told: asked once an incarnation, and kept.

Decides when to ask again: after a failure, and for a worker that is new. It must never know what the name is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

from kvxfer.router.dialects import Dialect, HandoverError
from kvxfer.router.fleet.worker import Worker
from kvxfer.router.upstream import UpstreamDeadlines, UpstreamError, UpstreamPool
from kvxfer.types import AgentRef

ANSWER_BYTES_MAX = 1 << 20
KEPT_MAX = 4096
FRESH_S = 10.0
"""How long a name is believed: an engine that was replaced on the same address has another one."""
_DEADLINES = UpstreamDeadlines(
    queue_s=2.0, connect_s=2.0, send_s=2.0, first_byte_s=2.0, between_chunks_s=2.0, whole_s=3.0
)


class EngineNames:
    """On one event loop."""

    def __init__(self, make_pool: Callable[..., UpstreamPool] = UpstreamPool) -> None:
        self._make_pool = make_pool
        self._names: dict[AgentRef, tuple[str, float]] = {}
        self._asking: dict[AgentRef, asyncio.Task[str]] = {}

    async def engine_id(self, worker: Worker, url: str, dialect: Dialect) -> str:
        """The engine's name. Raises HandoverError where it cannot be had."""
        known = self._names.get(worker.ref)
        if known is not None and asyncio.get_running_loop().time() < known[1]:
            return known[0]
        task = self._asking.get(worker.ref)
        if task is None:
            task = self._asking[worker.ref] = asyncio.create_task(self._ask(worker, url, dialect))
            task.add_done_callback(lambda _: self._asking.pop(worker.ref, None))
        return await asyncio.shield(task)

    async def _ask(self, worker: Worker, url: str, dialect: Dialect) -> str:
        split = urlsplit(url)
        pool = self._make_pool(f"{split.scheme}://{split.netloc}")
        try:
            response = await pool.request("GET", split.path, (), (), _DEADLINES)
            async with response:
                answer = await response.read(ANSWER_BYTES_MAX)
                if response.status != 200:
                    raise HandoverError(f"the bootstrap server of {worker.agent_id} answers {response.status}")
        except UpstreamError as error:
            raise HandoverError(f"the bootstrap server of {worker.agent_id} does not answer ({error.phase})") from None
        finally:
            await pool.close()
        name = dialect.engine_id(worker, answer)
        while len(self._names) >= KEPT_MAX:
            del self._names[next(iter(self._names))]
        self._names[worker.ref] = (name, asyncio.get_running_loop().time() + FRESH_S)
        return name
