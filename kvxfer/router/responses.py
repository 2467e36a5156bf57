"""Which worker keeps which Response (`/v1/responses`): an engine remembers what it answered, and no other one knows it.

Decides what is remembered of an answer, and what a request that names an earlier Response is told where its worker is
not known. A Response is found only by the holder of the API key that made it. What is remembered is bounded: the last
KEPT_MAX of each process, as two numbers each, in memory that all processes of one router share. It must never know a
socket, nor what a Response says.

::

    row of a process   | how many | key 0  place 0 | key 1  place 1 | ...

A key is a digest of the id and of whose it is; a place is a digest of the worker's incarnation. One process alone
writes a row, a key last, so that a reader takes no Response's place for another's. A digest is no proof: the engine is
asked for the id itself, so that two ids of one key would cost an answer of 404.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvxfer.openai import scanner
from kvxfer.openai.errors import RequestError
from kvxfer.openai.scanner import Kind, Scan
from kvxfer.router.apis.routes import RESPONSES_API
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.inbound import Inbound
from kvxfer.router.pass_rules import PassRule
from kvxfer.types import AgentRef

KEPT_MAX = 32768
"""Responses that each process remembers; the oldest one is forgotten first."""
HEADER = 8
"""Cells before the first pair: one cache line, of which the first is used."""
ROW_CELLS = HEADER + 2 * KEPT_MAX
PREVIOUS = "previous_response_id"
MARKS = (b"response.created", b"response.queued")
"""One of these is in the first event of a streamed Response, which has its id."""
NOT_FOUND = "response_not_found"
PATH = re.compile(r"/v1/responses/([A-Za-z0-9_][A-Za-z0-9_.:-]{0,255})(/cancel|/input_items)?")
"""Of what is asked of one Response; an id of another form is not remembered."""
METHODS = {"": ("GET", "DELETE"), "/cancel": ("POST",), "/input_items": ("GET",)}
"""By what stands behind the id."""
RULE = PassRule("/v1/responses/", "")

_FIELDS = scanner.Fields(["id", "response", "type"])

Cells = npt.NDArray[np.int64]


class KeptResponses:
    """``rows`` is the memory of all processes that share it, and ``row`` the one that this process writes."""

    def __init__(self, rows: Cells | None = None, row: int = 0) -> None:
        self._rows: Cells = np.zeros((1, ROW_CELLS), dtype=np.int64) if rows is None else rows
        self._own = self._rows[row]

    def note(self, response_id: str, owner: bytes, ref: AgentRef) -> None:
        """``ref`` keeps it from now on."""
        if PATH.fullmatch(f"/v1/responses/{response_id}") is None:
            return
        own, count = self._own, int(self._own[0])
        at = HEADER + 2 * (count % KEPT_MAX)
        own[at] = 0
        own[at + 1] = _place(ref)
        own[at] = _key(response_id, owner)
        own[0] = count + 1

    def find(self, response_id: str, owner: bytes, known: Iterable[AgentRef]) -> AgentRef | None:
        """The worker that keeps it; None where no process remembers it. Raises RequestError where that worker is gone:
        it is none of ``known``."""
        rows, ats = np.nonzero(self._rows[:, HEADER::2] == _key(response_id, owner))
        if not len(rows):
            return None
        places = {
            int(self._rows[row, HEADER + 1 + 2 * at]) for row, at in zip(rows.tolist(), ats.tolist(), strict=True)
        }
        found = next((ref for ref in known if _place(ref) in places), None)
        if found is None:
            raise RequestError(
                f"the worker that kept the response {response_id!r} is gone, and the response with it",
                status=404,
                error_code=NOT_FOUND,
            )
        return found

    def __repr__(self) -> str:
        return f"KeptResponses(noted={int(self._own[0])})"


def keeper_of(
    response_id: str, owner: bytes, kept: KeptResponses, workers: Workers, *, param: str = "response_id"
) -> AgentRef:
    """The worker that keeps it. Where one worker alone generates text, and no API keys tell clients apart, that is the
    one, also for what this router does not remember. Raises RequestError for one that is not known, or is gone."""
    found = kept.find(response_id, owner, (entry.worker.ref for entry in workers.entries()))
    if found is not None:
        return found
    able = [one.member.ref for one in workers.candidates() if one.member.info.role.can_decode]
    if len(able) == 1 and not owner:
        return able[0]
    raise RequestError(
        f"{param}: this router knows of no worker that keeps the response {response_id!a:.300}. It was not stored "
        f"(store), it belongs to another API key, it is older than the last {KEPT_MAX} of a process of this router, or "
        "it is from before this router started or of another router",
        param=param,
        status=404,
        error_code=NOT_FOUND,
    )


def is_stored(inbound: Inbound) -> bool:
    """Whether the engine may keep the answer: OpenAI's default is that it does."""
    return inbound.api is RESPONSES_API and inbound.scan.kind("store") is not Kind.FALSE


class ResponseSeen:
    """What one answer says of its id, and to whom it belongs."""

    __slots__ = ("_kept", "_noted", "_owner")

    def __init__(self, kept: KeptResponses, owner: bytes) -> None:
        self._kept = kept
        self._owner = owner
        self._noted: AgentRef | None = None

    def note(self, content: bytes, ref: AgentRef) -> None:
        """Look at a whole answer of ``ref``, or at the data of an event. The first id of a worker counts."""
        if self._noted != ref and (name := id_said(content)):
            self._noted = ref
            self._kept.note(name, self._owner, ref)

    def begins(self, event: bytes, ref: AgentRef) -> bool:
        """Whether it is the event with which a Response of ``ref`` begins, which is noted: nothing else is in it."""
        if not any(mark in event for mark in MARKS):
            return False
        self.note(event, ref)
        return self._noted == ref


def id_said(content: bytes) -> str:
    """The id of a Response, or of the one within an event; empty where there is none."""
    try:
        scan = _FIELDS.scan(content)
        if scan.kind("response") is Kind.OBJECT:
            scan = _FIELDS.scan(bytes(scanner.raw(scan, "response") or b""))
    except ValueError:
        return ""
    return _text(scan, "id")


def previous(inbound: Inbound) -> str:
    """The Response that a request goes on from; empty where there is none. Raises RequestError where it is no text."""
    if inbound.api is not RESPONSES_API:
        return ""
    if inbound.scan.kind(PREVIOUS) not in (None, Kind.NULL, Kind.STRING):
        raise RequestError(f"{PREVIOUS}: must be text, the id of a response", param=PREVIOUS)
    return _text(inbound.scan, PREVIOUS)


def _text(scan: Scan, name: str) -> str:
    value = scan.scalar(name) if scan.kind(name) is Kind.STRING else None
    return value if isinstance(value, str) else ""


@functools.lru_cache(maxsize=4096)
def _place(ref: AgentRef) -> int:
    return _digest(f"{ref.agent_id} {ref.incarnation.number} {ref.incarnation.boot_nonce.hex()}".encode())


def _key(response_id: str, owner: bytes) -> int:
    return _digest(len(owner).to_bytes(4, "big") + owner + response_id.encode("utf-8", "surrogatepass"))


def _digest(data: bytes) -> int:
    """Never 0, which is an empty cell."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True) or 1
