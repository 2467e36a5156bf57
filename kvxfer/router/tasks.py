"""Ending tasks for certain: cancelled, and awaited even while the caller itself is being cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def finish(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end under a shield; a cancellation that came meanwhile is raised afterwards."""
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
    task.result()


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel every task that still runs and wait until all have ended; their results and errors are dropped."""
    running = {task for task in tasks if not task.done()}
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
    for task in tasks:
        if not task.cancelled():
            task.exception()
