"""Where the time of each request went: the client's own times, joined with the router's or the engine's account.

Decides which account tells what, and to which phase each second belongs. Pure: it must never know who sent the request,
nor how a phase is drawn. The phases of a request add up to its time from due to the last content, whatever an account
says: what it says beyond that is cut, and what it does not explain is shown as such. docs/load-test.md has definitions.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvxfer.load.record import MeasuredRequest

SECONDS_MAX = 1e6
"""What is longer is no time of a request."""
PHASES = ("late", "queue", "prefill", "transfer", "gap", "decode", "unexplained")
"""In the order in which they happen; ``unexplained`` may lie anywhere."""
PhaseSpan = tuple[str, float, float, str | None]
"""Phase, begin and end in seconds after the beginning of the run, worker."""
_ROUTER_TIMES = ("placed_s", "decode_sent_s", "ended_s")
_TRANSFER_PARTS = ("plan", "wire", "confirm")


@dataclasses.dataclass(frozen=True)
class RequestPhases:
    """Seconds; none is negative, and they add up to the request's time from due to the last content."""

    late_s: float
    """Due to sent: the generator's own fault."""
    queue_s: float
    """In the router until P was asked, attempts that failed included, and in P's queue. Without a P: in D's."""
    prefill_s: float
    """P's work, and its answer to the router. Where ``is_queue_told`` is False, P's queue too."""
    transfer_s: float
    """What D says of its transfer, as far as it lies after P's end: what prefill does not hide."""
    gap_s: float
    """P's end to the first token, by the router's clock, without ``transfer_s``: D's queue, its first step, and the
    transfer where ``is_transfer_told`` is False."""
    decode_s: float
    """First content to the last."""
    unexplained_s: float
    """The rest: what the client saw and no account tells, such as the way there and back."""
    prefill_worker: str | None = None
    decode_worker: str | None = None
    attempts: int = 1
    due_s: float = 0.0
    first_unexplained_s: float = 0.0
    """What of ``unexplained_s`` lies before the first content."""
    is_queue_told: bool = False
    is_transfer_told: bool = False

    @property
    def total_s(self) -> float:
        return math.fsum(getattr(self, f"{name}_s") for name in PHASES)

    def spans(self) -> list[PhaseSpan]:
        """One after the other, for a timeline; phases without a length are left out."""
        computes = self.prefill_worker or self.decode_worker
        steps = (
            ("late", self.late_s, None),
            ("queue", self.queue_s, computes),
            ("prefill", self.prefill_s, computes),
            ("transfer", self.transfer_s, self.decode_worker),
            ("gap", self.gap_s, self.decode_worker),
            ("unexplained", self.first_unexplained_s, None),
            ("decode", self.decode_s, self.decode_worker),
            ("unexplained", max(0.0, self.unexplained_s - self.first_unexplained_s), None),
        )
        made: list[PhaseSpan] = []
        at_s = self.due_s
        for name, length_s, worker in steps:
            if length_s > 0:
                made.append((name, at_s, at_s + length_s, worker))
                at_s += length_s
        return made


@dataclasses.dataclass
class ToldPhases:
    """What an account says, cut to nothing yet."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    gap_s: float = 0.0
    whole_decode_s: float = 0.0
    """Of an answer in one piece: all tokens after the first, before the client got any."""
    decode_s: float | None = None
    """Of a stream: first content to the end."""
    is_queue_told: bool = False
    is_transfer_told: bool = False


def phases_of(record: MeasuredRequest) -> RequestPhases | None:
    """None where the request was not answered whole, or no account tells a time."""
    account = _account(record.account)
    if account is None or not record.is_good or record.last_s is None or record.first_s is None:
        return None
    due_s, begun_s = record.due_s, record.due_s if record.acted_s is None else record.acted_s
    if not all(map(math.isfinite, (due_s, begun_s, record.first_s, record.last_s))) or record.last_s < due_s:
        return None
    is_stream = record.last_s > record.first_s
    told = _by_router(account) if _is_of_router(account) else _by_engine(account, is_stream=is_stream)
    if told is None:
        return None
    whole_s = record.last_s - due_s
    late_s = min(max(0.0, begun_s - due_s), whole_s)
    first_s = min(max(0.0, record.first_s - begun_s), whole_s - late_s)
    after_first_s = whole_s - late_s - first_s
    left_s = first_s
    parts: list[float] = []
    for wanted_s in (told.queue_s, told.prefill_s, told.transfer_s, told.gap_s, told.whole_decode_s):
        parts.append(min(max(0.0, wanted_s), left_s))
        left_s -= parts[-1]
    queue_s, prefill_s, transfer_s, gap_s, whole_decode_s = parts
    decode_s = after_first_s if told.decode_s is None else min(told.decode_s, after_first_s)
    return RequestPhases(
        late_s=late_s,
        queue_s=queue_s,
        prefill_s=prefill_s,
        transfer_s=transfer_s,
        gap_s=gap_s,
        decode_s=whole_decode_s + decode_s,
        unexplained_s=left_s + (after_first_s - decode_s),
        prefill_worker=_text(account.get("prefill_agent")),
        decode_worker=_text(account.get("decode_agent")),
        attempts=_attempts(account),
        due_s=due_s,
        first_unexplained_s=0.0 if whole_decode_s else left_s,
        is_queue_told=told.is_queue_told,
        is_transfer_told=told.is_transfer_told,
    )


def _account(given: Any) -> Mapping[str, Any] | None:
    """The account itself, where it came inside an answer's object."""
    if not isinstance(given, dict):
        return None
    params = given.get("kv_transfer_params")
    for inner in (given.get("kvxfer"), params.get("kvxfer") if isinstance(params, dict) else None):
        if isinstance(inner, dict) and not _is_of_router(given):
            return inner
    return given


def _is_of_router(account: Mapping[str, Any]) -> bool:
    return any(_seconds(account.get(name)) is not None for name in _ROUTER_TIMES)


def _by_router(account: Mapping[str, Any]) -> ToldPhases | None:
    """Of the router's account: its own times say how long each step was, the engines' words how to split it."""
    first_s, ended_s = _seconds(account.get("first_s")), _seconds(account.get("ended_s"))
    end_s = ended_s if first_s is None else first_s
    if end_s is None:
        return None
    told = ToldPhases(decode_s=None if first_s is None or ended_s is None else max(0.0, ended_s - first_s))
    prefill, decode = _object(account.get("prefill")), _object(account.get("decode"))
    placed_s = _seconds(account.get("placed_s")) or 0.0
    asked_s = _seconds(account.get("prefill_sent_s"))
    prefilled_s = _seconds(account.get("prefill_ended_s"))
    is_stream = first_s is not None
    if asked_s is None or _text(account.get("prefill_agent")) is None:
        asked_s = min(_seconds(account.get("decode_sent_s")) or placed_s, end_s)
        _split_local(told, asked_s, end_s - asked_s, decode, is_stream=is_stream)
        return told
    asked_s = min(asked_s, end_s)
    prefilled_s = end_s if prefilled_s is None else min(max(prefilled_s, asked_s), end_s)
    queue_s = _seconds(prefill.get("queue_s"))
    told.is_queue_told = queue_s is not None
    waited_s = min(queue_s or 0.0, prefilled_s - asked_s)
    told.queue_s, told.prefill_s = asked_s + waited_s, prefilled_s - asked_s - waited_s
    window_s = end_s - prefilled_s
    transfer_s = _exposed_transfer(decode)
    told.is_transfer_told = transfer_s is not None
    told.transfer_s = min(transfer_s or 0.0, window_s)
    window_s -= told.transfer_s
    if not is_stream:
        told.whole_decode_s = min(window_s, _after_first(decode, window_s))
        window_s -= told.whole_decode_s
    if decode.get("prefill") == "local":  # D computed the prompt after all
        told.prefill_s += window_s
    else:
        told.gap_s = window_s
    return told


def _split_local(
    told: ToldPhases, asked_s: float, window_s: float, decode: Mapping[str, Any], *, is_stream: bool
) -> None:
    """One engine did it all: from when it was asked to its first token, or to its whole answer."""
    queue_s = _seconds(decode.get("queue_s"))
    told.is_queue_told = queue_s is not None
    waited_s = min(queue_s or 0.0, window_s)
    told.queue_s = asked_s + waited_s
    window_s -= waited_s
    if not is_stream:
        told.whole_decode_s = min(window_s, _after_first(decode, window_s))
        window_s -= told.whole_decode_s
    told.prefill_s = window_s


def _by_engine(account: Mapping[str, Any], *, is_stream: bool) -> ToldPhases | None:
    """Of the engine's own account, with what an older router added to it; there are no times of a router."""
    seconds = _object(account.get("seconds"))
    is_local = account.get("prefill") == "local"
    queue_s = _seconds(account.get("queue_s" if is_local else "prefill_queue_s"))
    prefill_s = _seconds(account.get("prefill_s"))
    first_s, total_s = _seconds(account.get("ttft_s")), _seconds(account.get("total_s"))
    transfer_s = None if is_local else _exposed_transfer(account)
    if all(value is None for value in (queue_s, prefill_s, first_s, total_s, transfer_s)):
        return None
    if prefill_s is None:
        awaited_s = first_s if is_local else _seconds(seconds.get("queue"))
        prefill_s = max(0.0, (awaited_s or 0.0) - (queue_s or 0.0))
    told = ToldPhases(queue_s or 0.0, prefill_s, transfer_s or 0.0)
    told.is_queue_told, told.is_transfer_told = queue_s is not None, transfer_s is not None
    if first_s is not None:
        told.gap_s = max(0.0, first_s - told.queue_s - told.prefill_s - told.transfer_s)
        after_first_s = _after_first(account, 0.0)
        told.decode_s, told.whole_decode_s = (after_first_s or None, 0.0) if is_stream else (0.0, after_first_s)
    return told


def _exposed_transfer(decode: Mapping[str, Any]) -> float | None:
    """Seconds of D's transfer that prefill did not hide: of kvxfer's engine by part, without the share of the bytes
    that had come before P's end; of vLLM's connector as one number. None where D does not say."""
    parts = _object(decode.get("seconds"))
    told = {name: _seconds(parts.get(name)) for name in _TRANSFER_PARTS}
    if all(value is None for value in told.values()):
        told["wire"] = _seconds(decode.get("wire_seconds"))
        if told["wire"] is None:
            return None
    moved = _seconds(decode.get("bytes_moved"), math.inf) or _seconds(decode.get("bytes"), math.inf)
    early = _seconds(decode.get("bytes_before_prefill_end"), math.inf) or _seconds(decode.get("early_bytes"), math.inf)
    late_share = max(0.0, 1.0 - early / moved) if moved and early else 1.0
    return (told["plan"] or 0.0) + (told["wire"] or 0.0) * late_share + (told["confirm"] or 0.0)


def _after_first(decode: Mapping[str, Any], otherwise: float) -> float:
    """How long D took for all tokens after the first."""
    first_s, total_s = _seconds(decode.get("ttft_s")), _seconds(decode.get("total_s"))
    return otherwise if first_s is None or total_s is None else max(0.0, total_s - first_s)


def _object(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, dict) else {}


def _seconds(value: Any, most: float = SECONDS_MAX) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < most and value < 1e300 else None


def _text(value: Any) -> str | None:
    return value[:256] if isinstance(value, str) and value else None


def _attempts(account: Mapping[str, Any]) -> int:
    for name in ("attempts", "attempt"):
        value = account.get(name)
        if type(value) is int and 1 <= value < 1 << 31:
            return value
    return 1


def join_log(records: Iterable[MeasuredRequest], lines: Iterable[str | bytes]) -> int:
    """Give each record the account that the router's log (``--log-style json``) has of its request id; the last line of
    an id counts, and lines of another kind are passed over. Returns how many records got one."""
    accounts: dict[str, dict[str, Any]] = {}
    for line in lines:
        text = line.decode("utf-8", "replace") if isinstance(line, bytes) else line
        if '"account"' not in text:
            continue
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not isinstance(values, dict) or not isinstance(values.get("account"), dict):
            continue
        request_id = values.get("request_id")
        if isinstance(request_id, str):
            accounts[request_id] = values["account"]
    joined = 0
    for record in records:
        account = accounts.get(record.request_id)
        if account is not None:
            record.account = account
            joined += 1
    return joined
