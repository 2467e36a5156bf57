"""Engines that find each other by a coordinator: no card travels."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

from kvxfer.coordinator.options import CoordinatorOptions
from kvxfer.coordinator.server import serve
from kvxfer.types import Role

from .cores import Copy, Rank, begin, check, idle, options, running


@contextlib.contextmanager
def coordinator(token_file: pathlib.Path) -> Iterator[str]:
    """Its address; it runs on a thread of its own."""
    ready: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    settings = CoordinatorOptions(port=0, token_file=str(token_file), stop_grace_s=0.2)
    work = serve(settings, on_ready=ready.set_result, stop=stop)
    thread = threading.Thread(target=loop.run_until_complete, args=(work,))
    thread.start()
    try:
        yield str(ready.result(20)["address"])
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def test_ranks_find_each_other_by_a_coordinator(tmp_path: pathlib.Path) -> None:
    token_file = pathlib.Path(options(tmp_path).token_file)
    with coordinator(token_file) as address:
        chosen = options(tmp_path, coordinator=address)
        p, d = Rank("p", Role.PREFILL, chosen), Rank("d", Role.DECODE, chosen)
        with running(p, d):
            assert p.core.card() == ""
            p.write(p.kv, (7, 8), 1)
            p.write(p.aux, (0,), 1)
            p.sources.accept(5)
            begin(p, d, 5, (1, 2), 0)
            p.sources.send(5, 0, (7, 8), is_last=True, aux_row=0)
            d.wait("done", 5)
            p.wait("sent", 5)
            check(p, d, Copy(((7, 8), (1, 2)), ((0,), (0,))))
            idle(p, d)
