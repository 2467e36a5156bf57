"""A coordinator on a thread of its own."""

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


@contextlib.contextmanager
def coordinator(token_file: pathlib.Path, **options: Any) -> Iterator[str]:
    """Its address; it runs on a thread of its own, with ``options`` beside the token file."""
    ready: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    settings = CoordinatorOptions(port=0, token_file=str(token_file), stop_grace_s=0.2, **options)
    work = serve(settings, on_ready=ready.set_result, stop=stop)
    thread = threading.Thread(target=loop.run_until_complete, args=(work,))
    thread.start()
    try:
        yield str(ready.result(20)["address"])
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
