"""Where workers stand: two at one place are one engine.

Decides when two addresses, with or without a rank, are the same place. It must never know which of two counts.
"""

from __future__ import annotations

import functools
from typing import Generic, TypeVar

from kvxfer.errors import InvalidArgumentError
from kvxfer.protocol.http_url import HttpUrl
from kvxfer.router.fleet.worker import Worker, WorkerSource

Known = TypeVar("Known")


class Places(Generic[Known]):
    """Those that are taken, and what is known of each. A worker without a rank is all ranks of its address, and so is
    one of the coordinator's."""

    def __init__(self) -> None:
        self._known: dict[str, dict[int | None, Known]] = {}

    def find(self, worker: Worker) -> Known | None:
        """What is known of a worker that stands there; None where no one does, and for a worker without an address."""
        there = self._known.get(_origin(worker.url))
        rank = _rank(worker)
        if not there:
            return None
        return next(iter(there.values())) if rank is None else there.get(rank, there.get(None))

    def take(self, worker: Worker, known: Known) -> None:
        if worker.url:
            self._known.setdefault(_origin(worker.url), {})[_rank(worker)] = known


def _rank(worker: Worker) -> int | None:
    return None if worker.source == WorkerSource.COORDINATOR else worker.dp_rank


@functools.lru_cache(maxsize=16384)
def _origin(text: str) -> str:
    """An address, whichever way it is written."""
    try:
        url = HttpUrl.parse("http_url", text)
    except InvalidArgumentError:
        return text
    return f"{url.scheme}://{url.host}:{url.port}"
