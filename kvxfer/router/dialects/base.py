"""What every dialect answers: what goes to P and to D, in which order, and what their answers mean.

Decides which fields no client may set, and how an engine's object is read. A dialect is pure: bytes in, bytes out; it
must never know sockets, the fleet, or how often a request is tried. docs/dialects.md shows how to write one.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any, Protocol

from kvxfer.errors import ProtocolError
from kvxfer.openai import scanner
from kvxfer.openai.scanner import Kind, Scan
from kvxfer.openai.transfer_params import LEG_BYTES_MAX, PARAM
from kvxfer.router.apis.routes import RESPONSES_API
from kvxfer.router.inbound import Headers, Inbound, number_in
from kvxfer.types import TransferId

CLIENT_FIELDS: frozenset[str] = frozenset(
    {
        *(PARAM, "ec_transfer_params", "kv_hints"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),
        *("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"),
        *("http_worker_ipc", "encoder_urls", "need_wait_for_mm_inputs", "num_items_assigned"),
    }
)
"""Fields by which a router or an engine's own processes tell an engine where KV is and which part of it works: removed
from every client's body, in every leg. vLLM: entrypoints/openai/*/protocol.py; SGLang: managers/io_struct.py."""
_WITHOUT: dict[str, bytes | None] = dict.fromkeys(sorted(CLIENT_FIELDS))
OF_RESPONSES: dict[str, bytes | None] = {"request_id": None}
"""Removed from a client's Responses: vLLM and SGLang keep the answer under that id, also over another client's."""
XARGS = "vllm_xargs"
_XARGS_FIELDS = scanner.Fields([PARAM, "ec_transfer_params"])
"""vLLM puts transfer parameters beside these (``extra_args``), so that a client could set them there."""

HANDOVER_BYTES_MAX = 1 << 20
"""Longest parameters that P hands to D: block numbers of a prompt of 100,000 tokens take some 50 KB."""
RANK_HEADER = b"x-data-parallel-rank"
_ANSWER_FIELDS = scanner.Fields(["usage", "timings", "meta_info", PARAM])
_REMOTE_CACHED = scanner.Fields(["remote_prefill_cached_tokens"])
_PREFILL_TIMINGS = {"queue_s": "prefill_queue_s", "prefill_s": "prefill_s", "ended_unix_s": "prefill_ended_unix_s"}
_SMALL_BYTES_MAX = 1 << 16
COUNT_MAX = 1 << 40
"""Of tokens; more is none."""

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

Changes = dict[str, bytes | None]
"""New values of members of a body, as JSON; None: without it."""


class HandoverError(ProtocolError):
    """P answered, and not what D needs to fetch the prompt's KV: D would compute it again and say nothing."""

    code = "handover"
    retryable = True


class Order(enum.Enum):
    """When the legs are sent."""

    TOGETHER = "together"
    """Both at once: D waits for P inside the engines."""
    PREFILL_FIRST = "prefill_first"
    """D's leg is made of P's answer."""
    ALONE = "alone"
    """There is one leg."""


class LegWorker(Protocol):
    """What a dialect looks at of an engine behind one address."""

    @property
    def bootstrap_port(self) -> int | None: ...

    @property
    def dp_rank(self) -> int | None:
        """Which of the engines behind its address it is; None where it is the only one."""

    @property
    def ranks(self) -> int:
        """How many agents its engine has."""

    @property
    def stages(self) -> str:
        """Where the pipeline stages of its engine end (``WorkerInfo.stages``)."""

    @property
    def agent_id(self) -> str: ...

    @property
    def url(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Pair:
    """The workers of one attempt, and its names."""

    prefill: LegWorker | None
    decode: LegWorker
    transfer_id: TransferId
    attempt: int = 1
    room: int = 0
    """63 random bits."""
    timeout_s: float | None = None
    prefill_engine_id: str | None = None
    """What P's engine calls itself, for a dialect whose D must know (``discovery_url``)."""

    @property
    def source(self) -> LegWorker:
        """P, of a pair that has one."""
        assert self.prefill is not None
        return self.prefill


@dataclasses.dataclass(frozen=True)
class LegRequest:
    """One half of a request: where it goes at its worker, and with what. ``body`` is in pieces, most of them views of
    the client's own bytes."""

    path: str
    body: list[bytes | memoryview]
    headers: Headers

    def content(self) -> bytes:
        return b"".join(self.body)


@dataclasses.dataclass(frozen=True)
class Handover:
    """What P's answer says D needs: one JSON object, opaque to the router."""

    params: bytes


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """P's part is done: its own words of it. None, or empty, where it does not say."""

    cached_tokens: int | None = None
    """Prompt tokens that P's prefix cache held."""
    timings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prompt_tokens: int | None = None

    def account(self) -> dict[str, Any]:
        """P's timings and cache hits under the names they have in the account of the whole request."""
        account: dict[str, Any] = {}
        if self.cached_tokens is not None:
            account["prefill_cached_tokens"] = self.cached_tokens
        return account | {new: self.timings[old] for old, new in _PREFILL_TIMINGS.items() if old in self.timings}


class PairDialect(Protocol):
    """One kind of engine and connector. Stateless: one object serves every request."""

    name: str
    order: Order
    keeps_prefill: bool
    """Whether a finished prefill can serve another D, so that the prompt is not computed again where D failed."""
    clips_answers: bool
    """Whether the engine ends an answer where its context ends, whatever was asked for."""
    recovers: bool
    """Whether a D whose P was lost notices it and computes the prompt, so that the router may leave it to D."""
    computes_alone: bool
    """Whether a D computes a prompt itself when it is asked to (``alone_leg``)."""

    def refuses_split(self, inbound: Inbound) -> str | None:
        """The field for which P and D together would not answer as one engine does, so that D must do it alone. None:
        the request may be split."""

    def prefill_leg(self, inbound: Inbound, pair: Pair) -> LegRequest: ...

    def handover(self, answer: bytes) -> Handover:
        """What P's answer says D needs (PREFILL_FIRST). Raises HandoverError where it does not say it."""

    def decode_leg(self, inbound: Inbound, pair: Pair, handover: Handover | None) -> LegRequest: ...

    def alone_leg(self, inbound: Inbound, worker: LegWorker) -> LegRequest:
        """The whole request at one engine."""

    def forgo_leg(self, inbound: Inbound, pair: Pair, handover: Handover | None) -> LegRequest | None:
        """What reaches D when the client left after P had finished, so that P's blocks are given back; None where P's
        blocks need no such help. D's answer is of no use: it may be dropped as soon as its head came."""

    def prefilled(self, answer: bytes) -> Prefilled:
        """What P says of its part. Never fails: what cannot be read was not said."""

    def discovery_url(self, worker: LegWorker) -> str | None:
        """What must be fetched from a P before its first pair; None where nothing must be known of it."""

    def engine_id(self, worker: LegWorker, answer: bytes) -> str:
        """``Pair.prefill_engine_id``, of what ``discovery_url`` answered. Raises HandoverError."""


class DialectBase:
    """What most dialects have in common: the client's body at the client's path, and nothing to hand over."""

    name = ""
    order = Order.TOGETHER
    keeps_prefill = False
    clips_answers = False
    recovers = False
    computes_alone = True

    def refuses_split(self, inbound: Inbound) -> str | None:
        """One transfer stands for one sequence."""
        return inbound.several

    def handover(self, answer: bytes) -> Handover:
        raise HandoverError(f"a {self.name} prefill worker hands nothing over")

    def alone_leg(self, inbound: Inbound, worker: LegWorker) -> LegRequest:
        return leg(inbound, {}, rank_header(worker))

    def forgo_leg(self, inbound: Inbound, pair: Pair, handover: Handover | None) -> LegRequest | None:
        return None

    def prefilled(self, answer: bytes) -> Prefilled:
        return read_prefilled(answer)

    def discovery_url(self, worker: LegWorker) -> str | None:
        return None

    def engine_id(self, worker: LegWorker, answer: bytes) -> str:
        raise HandoverError(f"a {self.name} prefill worker need not say its name")

    def __repr__(self) -> str:
        return f"<dialect {self.name}>"


def leg(inbound: Inbound, changes: Mapping[str, bytes | None], more_headers: Headers = ()) -> LegRequest:
    """The client's body with ``changes``, and without what no client may set."""
    own = OF_RESPONSES if inbound.api is RESPONSES_API else {}
    every: Changes = {**_WITHOUT, **own, **_clean_xargs(inbound), **changes}
    return LegRequest(inbound.path, scanner.replace(inbound.scan, every), (*inbound.leg_headers, *more_headers))


def _clean_xargs(inbound: Inbound) -> Changes:
    if inbound.scan.kind(XARGS) is not Kind.OBJECT:
        return {}
    try:
        scan = _XARGS_FIELDS.scan(bytes(scanner.raw(inbound.scan, XARGS) or b""))
    except ValueError:  # more members than are looked at
        return {XARGS: None}
    if all(scan.kind(name) is None for name in _XARGS_FIELDS.names):
        return {}
    return {XARGS: b"".join(scanner.replace(scan, dict.fromkeys(_XARGS_FIELDS.names)))}


def rank_header(worker: LegWorker) -> Headers:
    """vLLM's header that names the engine behind an address that several share."""
    return () if worker.dp_rank is None else ((RANK_HEADER, str(worker.dp_rank).encode("ascii")),)


def encoded(value: Any) -> bytes:
    """Compact JSON in ASCII."""
    return _encode(value).encode("ascii")


def read_prefilled(answer: bytes) -> Prefilled:
    """Usage, timings and transfer parameters of an answer: of kvxfer's engine, vLLM or SGLang."""
    try:
        scan = _ANSWER_FIELDS.scan(answer)
    except ValueError:
        return Prefilled()
    usage = _small_object(scan, "usage")
    details = usage.get("prompt_tokens_details")
    input_details, meta = usage.get("input_tokens_details"), _small_object(scan, "meta_info")
    cached = _first_count(
        usage.get("cached_tokens"),
        details.get("cached_tokens") if isinstance(details, dict) else None,
        input_details.get("cached_tokens") if isinstance(input_details, dict) else None,
        usage.get("cache_read_input_tokens"),
        _remote_cached(scan),
        meta.get("cached_tokens"),
    )
    tokens = _first_count(usage.get("prompt_tokens"), usage.get("input_tokens"), meta.get("prompt_tokens"))
    if tokens is not None and "prompt_tokens" not in usage:  # Anthropic's counts what was not cached
        parts = (usage.get("cache_read_input_tokens"), usage.get("cache_creation_input_tokens"))
        tokens += sum(_first_count(part) or 0 for part in parts)
    return Prefilled(cached, _small_object(scan, "timings"), tokens)


def _first_count(*said: Any) -> int | None:
    """The first that is a count."""
    return next((count for count in said if type(count) is int and 0 <= count <= COUNT_MAX), None)


def _small_object(scan: Scan, name: str) -> dict[str, Any]:
    span = scan.span(name)
    if span is None or scan.kind(name) is not Kind.OBJECT or span[1] - span[0] > _SMALL_BYTES_MAX:
        return {}
    value = json.loads(scan.body[span[0] : span[1]])
    return value if isinstance(value, dict) else {}


def _remote_cached(scan: Scan) -> int | float | None:
    if scan.kind(PARAM) is not Kind.OBJECT:
        return None
    return number_in(_REMOTE_CACHED.scan(bytes(scanner.raw(scan, PARAM) or b"")), "remote_prefill_cached_tokens")


__all__ = [
    "CLIENT_FIELDS",
    "LEG_BYTES_MAX",
    "Changes",
    "DialectBase",
    "Handover",
    "HandoverError",
    "LegRequest",
    "LegWorker",
    "Order",
    "Pair",
    "PairDialect",
    "Prefilled",
    "encoded",
    "leg",
    "rank_header",
    "read_prefilled",
]
