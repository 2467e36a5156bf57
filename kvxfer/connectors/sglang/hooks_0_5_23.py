"""Hooks into methods of SGLang 0.5.23's scheduler, for what its plug-in classes do not offer. Decides which methods are
hooked; the manager decides what a hook does.

Only a process that has a manager is hooked. SGLang logs a hook that it cannot apply, and continues without it.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvxfer.connectors.sglang.manager_view import ManagerView
from kvxfer.connectors.sglang.observability_0_5_23 import traceparent_of

log = logging.getLogger("kvxfer.sglang")

MANAGERS: weakref.WeakSet[ManagerView] = weakref.WeakSet()
"""The managers of this process."""

_held: weakref.WeakSet[Any] = weakref.WeakSet()
"""The scheduler of this process, while its front keeps prompts to itself."""

_installed: set[str] = set()
"""Targets of hooks that are registered. SGLang would run a hook twice if it were registered twice."""


def install() -> None:
    """Register and apply all hooks. Callable twice."""
    for target, hook, kind in HOOKS:
        if target not in _installed:
            _installed.add(target)
            HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()


def leave_after(run: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """Runs around the scheduler's loop, which ends when SGLang shuts down or by an exception. Managers leave before
    anything else happens. SGLang then frees memory that peers may be reading, and reports to its main process, which
    kills this one."""
    try:
        return run(*arguments, **more)
    finally:
        for manager in list(MANAGERS):
            try:
                manager.leave()
            except Exception:
                log.exception("peers could not be told that the engine ends")


def look_again(queue: Any, addr_to_reqs: Any, *_: Any, **__: Any) -> None:
    """Runs before decode's queue checks which prefill engines are known. SGLang checks each engine once a second; this
    makes it check an engine at once whose answer has come."""
    manager = queue.kv_manager
    if manager in MANAGERS:
        for address in addr_to_reqs:
            if manager.engines.has_answered(address):
                queue._ensure_last_attempt_time.pop(address, None)


def note_request(queue: Any, request: Any, *_: Any, **__: Any) -> None:
    """Runs before a queue makes a request's sender or receiver. SGLang does not pass the request to either, so the
    manager keeps its traceparent for them."""
    manager = queue.kv_manager
    if manager in MANAGERS:
        manager.traceparent = traceparent_of(request)


def take_in(process: Callable[..., Any], scheduler: Any, requests: list[Any]) -> Any:
    """Runs around the handling of what has reached the scheduler. A control request, such as a change of weights, is
    handled at once, however long it takes. A pause of mode ``abort`` comes from our plugin in SGLang's front, which
    keeps new prompts back until it is over; SGLang's schedulers do not know that mode."""
    kept = []
    for request in requests:
        if isinstance(request, PauseGenerationReqInput) and request.mode == "abort":
            _held.add(scheduler)
            continue
        if isinstance(request, ContinueGenerationReqInput):
            _held.discard(scheduler)
        kept.append(request)
    with contextlib.ExitStack() as calls:
        for manager in _prefill_managers() if kept else ():
            calls.enter_context(manager.core.pulses.call())
        return process(scheduler, kept)


def come_round(_: Any, scheduler: Any, *__: Any, **___: Any) -> None:
    """Runs after the scheduler took in what had reached it: once in each turn of each of its loops."""
    is_paused = scheduler._engine_paused or scheduler in _held
    for manager in _prefill_managers():
        manager.core.come_round(is_paused=is_paused)


def _prefill_managers() -> list[ManagerView]:
    return [manager for manager in MANAGERS if manager.prefill_side is not None]


HOOKS: tuple[tuple[str, Callable[..., Any], Any], ...] = (
    ("sglang.srt.managers.scheduler.Scheduler.run_event_loop", leave_after, HookType.AROUND),
    ("sglang.srt.managers.scheduler.Scheduler.process_input_requests", take_in, HookType.AROUND),
    ("sglang.srt.managers.scheduler.Scheduler.ingest_requests", come_round, HookType.AFTER),
    ("sglang.srt.disaggregation.decode.DecodePreallocQueue._ensure_prefill_info", look_again, HookType.BEFORE),
    (
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue",
        note_request,
        HookType.BEFORE,
    ),
    ("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender", note_request, HookType.BEFORE),
)
