"""The lanes that can be tried here, and a test of all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvxfer.transport import ucx
from tests.support.kernel import has_zero_copy_on_unix

ONE_SIDED = ["mapped", "cma"]
STREAMS = ["unix", "stream"]
HAS_UCX = bool(ucx.find_library().path)
ZERO_COPY_LANES = STREAMS if has_zero_copy_on_unix() else ["stream"]
"""These lanes send large blocks zero-copy."""
LANES = [*ONE_SIDED, *STREAMS, *(["ucx"] if HAS_UCX else [])]

Case = TypeVar("Case")
Made = TypeVar("Made")


def at_once(body: Callable[[Case], Made], cases: Mapping[str, Case]) -> dict[str, Made]:
    """``body`` of every case, each on a thread of its own: bounds are waited for once, not once for each.

    Raises every case's failure, with the case's name.
    """
    with ThreadPoolExecutor(len(cases)) as threads:
        running = {name: threads.submit(body, case) for name, case in cases.items()}
    failures = []
    for name, made in running.items():
        if (failure := made.exception()) is not None:
            failure.add_note(f"on {name}")
            failures.append(failure)
    if failures:
        raise BaseExceptionGroup("some lanes failed", failures)
    return {name: made.result() for name, made in running.items()}


def on_all_lanes(body: Callable[[Case], None]) -> Callable[[Mapping[str, Case]], None]:
    """A test that takes ``fixtures``, one for each lane."""

    def test(fixtures: Mapping[str, Case]) -> None:
        at_once(body, fixtures)

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test
