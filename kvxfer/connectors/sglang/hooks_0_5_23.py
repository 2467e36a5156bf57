"""Hooks into SGLang 0.5.23's scheduler, beside the classes that it asks for. Decides where; the manager decides what
happens there.

Only a process that has a manager is hooked. SGLang logs a hook that could not be applied, and goes on without it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvxfer.connectors.sglang.manager_view import ManagerView
from kvxfer.connectors.sglang.observability_0_5_23 import traceparent_of

log = logging.getLogger("kvxfer.sglang")

MANAGERS: weakref.WeakSet[ManagerView] = weakref.WeakSet()
"""Of this process."""

_installed: set[str] = set()
"""SGLang would call one that is registered twice twice."""


def install() -> None:
    """Callable twice."""
    for target, hook, kind in HOOKS:
        if target not in _installed:
            _installed.add(target)
            HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()


def leave_after(run: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """Around the scheduler's loop, which ends when SGLang shuts down, and by an exception: what SGLang does after it
    is too late. It tells its main process, which kills this one, and gives memory back that peers may be reading."""
    try:
        return run(*arguments, **more)
    finally:
        for manager in list(MANAGERS):
            try:
                manager.leave()
            except Exception:
                log.exception("peers could not be told that the engine ends")


def look_again(queue: Any, addr_to_reqs: Any, *_: Any, **__: Any) -> None:
    """Before decode's queue looks which prefill engines are known: SGLang looks at each once a second, and an answer
    that is there is taken at once."""
    manager = queue.kv_manager
    if manager in MANAGERS:
        for address in addr_to_reqs:
            if manager.engines.has_answered(address):
                queue._ensure_last_attempt_time.pop(address, None)


def note_request(queue: Any, request: Any, *_: Any, **__: Any) -> None:
    """Before a queue makes a request's sender or receiver, which SGLang does not tell of the request."""
    manager = queue.kv_manager
    if manager in MANAGERS:
        manager.traceparent = traceparent_of(request)


HOOKS: tuple[tuple[str, Callable[..., Any], Any], ...] = (
    ("sglang.srt.managers.scheduler.Scheduler.run_event_loop", leave_after, HookType.AROUND),
    ("sglang.srt.disaggregation.decode.DecodePreallocQueue._ensure_prefill_info", look_again, HookType.BEFORE),
    (
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue",
        note_request,
        HookType.BEFORE,
    ),
    ("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender", note_request, HookType.BEFORE),
)
