"""One leg of a request: the HTTP exchange with one worker, given up at once when it is dropped.

Turns every way in which an exchange can end into an answer or a LegFailed; it must never decide whether to try again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import AsyncIterator, Callable

from kvxfer.errors import KvxferError, NoWorkerError
from kvxfer.openai.scanner import Fields, Kind
from kvxfer.openai.transfer_params import Part
from kvxfer.policy.backoff import Backoff
from kvxfer.router import failure
from kvxfer.router.core import RouterCore
from kvxfer.router.dialects import Leg, Pair
from kvxfer.router.failure import Failure, LegFailed
from kvxfer.router.fleet.worker import Worker
from kvxfer.router.upstream import (
    Patience,
    UpstreamDeadlines,
    UpstreamError,
    UpstreamPool,
    UpstreamResponse,
    UpstreamTooLargeError,
    UpstreamUnprocessedError,
)
from kvxfer.router.worker_key import Headers

log = logging.getLogger("kvxfer.router")

ERROR_BYTES_MAX = 1 << 20
UNPROCESSED_MAX = 8
"""Kept connections that turn out to be closed, one after the other, before the leg fails."""
FORGO_S = 20.0
"""How long a decode worker is given to take a request that only gives P's blocks back."""
FORGO_BACKOFF = Backoff(base_s=0.05, cap_s=1.0)
_NO_FIELDS = Fields([])
_BLANKS = b" \t\r\n"
_ONE_FIELD = Fields(["a"])


@contextlib.asynccontextmanager
async def calling(
    core: RouterCore,
    worker: Worker,
    leg: Leg,
    deadlines: UpstreamDeadlines,
    what: str,
    late: Callable[[bytes], None] | None = None,
    patience: Patience | None = None,
) -> AsyncIterator[UpstreamResponse]:
    """The worker's 200, whose body the block reads. Raises LegFailed for anything else, and NoWorkerError where the
    worker is not known. ``patience`` is asked where the body is silent. ``late`` gets the whole answer where the leg
    was given up and it came all the same."""
    headers = (*leg.headers, *core.leg_headers(worker))
    response = await _send(core.workers.pool(worker.ref), leg, headers, deadlines, what, late, patience)
    async with response:
        if response.status != 200:
            raise LegFailed(failure.from_answer(what, response.status, await _error_content(response)))
        yield response


def log_failed(request_id: str, pair: Pair, part: Part, worker: Worker, ended: Failure) -> None:
    """One line for a leg that failed."""
    log.log(
        logging.INFO if ended.is_final or ended.is_of_size else logging.WARNING,
        "leg failed",
        extra={
            "request_id": request_id,
            "transfer_id": str(pair.transfer_id),
            "attempt": pair.attempt,
            "part": part.value,
            "agent_id": worker.agent_id,
            "kind": ended.kind.value,
            "code": ended.code,
        },
    )


async def read(response: UpstreamResponse, bytes_max: int, what: str) -> bytes:
    """The whole body, of at most ``bytes_max``. Raises LegFailed."""
    try:
        return await response.read(bytes_max)
    except UpstreamTooLargeError:
        failed = failure.too_long if what == Part.DECODE else failure.malformed  # P's is short whatever is asked for
        raise LegFailed(failed(what, f"longer than {bytes_max} bytes")) from None
    except UpstreamError as error:
        raise LegFailed(failure.from_upstream(what, error)) from None


def kind_of(response: UpstreamResponse) -> bytes:
    """The answer's content type, in lower case; empty where it says none."""
    for name, value in response.headers:
        if name.lower() == b"content-type":
            return value.lower()
    return b""


def is_object(content: bytes) -> bool:
    """Whether ``content`` is a JSON object."""
    try:
        _NO_FIELDS.scan(content)
    except KvxferError:
        return False
    return True


def is_array(content: bytes) -> bool:
    """Whether ``content`` is a JSON array."""
    try:
        scan = _ONE_FIELD.scan(b'{"a":%b}' % content)
    except KvxferError:
        return False
    span = scan.span("a")
    return scan.kind("a") is Kind.ARRAY and span is not None and span[1] - span[0] == len(content.strip(_BLANKS))


def forgo(core: RouterCore, worker: Worker, leg: Leg) -> None:
    """Send ``leg`` in the background until ``worker`` takes it, and drop it when its answer begins."""

    async def reach() -> None:
        try:
            async with asyncio.timeout(FORGO_S):
                for failures in itertools.count(1):
                    try:
                        async with calling(core, worker, leg, core.whole_deadlines, "decode"):
                            break
                    except LegFailed as failed:
                        if failed.failure.is_final:
                            raise
                        await asyncio.sleep(FORGO_BACKOFF.delay_s(failures, random=random.random()))
        except (LegFailed, NoWorkerError, TimeoutError):
            log.warning("a finished prefill could not be given back", extra={"agent_id": worker.agent_id})
        core.metrics.forgone()

    core.background(reach())


async def _send(
    pool: UpstreamPool,
    leg: Leg,
    headers: Headers,
    deadlines: UpstreamDeadlines,
    what: str,
    late: Callable[[bytes], None] | None,
    patience: Patience | None,
) -> UpstreamResponse:
    tries = UNPROCESSED_MAX
    while True:
        try:
            return await pool.request("POST", leg.path, headers, leg.body, deadlines, late=late, patience=patience)
        except UpstreamUnprocessedError as error:
            tries -= 1
            if not tries:
                raise LegFailed(failure.from_upstream(what, error)) from None
        except UpstreamError as error:
            raise LegFailed(failure.from_upstream(what, error)) from None


async def _error_content(response: UpstreamResponse) -> bytes:
    try:
        return await response.read(ERROR_BYTES_MAX)
    except UpstreamError:
        return b""
