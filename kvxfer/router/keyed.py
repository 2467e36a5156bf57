"""One request of the holder of an API key, within the holder's limits: what it may use, and what it cost at the end.

Decides what a request is expected to cost in tokens, and which models it may ask for. The limits themselves are
`policy.keylimits`'; it must never know a key.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from kvxfer.errors import NoWorkerError
from kvxfer.openai.errors import RequestError
from kvxfer.openai.scanner import Kind
from kvxfer.policy.disagg import estimate_tokens
from kvxfer.policy.keylimits import KeyLimits, KeyMeter, KeyPass, KeyRefusal, LimitKind, SharedMeter
from kvxfer.router.apis.api import ADAPTER
from kvxfer.router.inbound import Inbound, number_in
from kvxfer.router.keyfile import UNNAMED, KeyEntry
from kvxfer.router.record import RequestRecord
from kvxfer.router.usage import UsageSeen

RATE_LIMITED = 429
FORBIDDEN = 403
RETRY_AFTER_MAX_S = 3600
BEAM_SEARCH = "use_beam_search"
EXPECTED_MAX = 1 << 40
"""Of one request's tokens. Much larger numbers would take the smaller ones of a bucket with them."""
EVENT_BYTES = 200
"""Of a streamed answer, about, for each token: an event with its frame."""

_SAYS = {
    LimitKind.REQUESTS: "requests_per_minute {bound:g} is used up",
    LimitKind.TOKENS: "tokens_per_minute {bound:g} is used up, or this request would pass it",
    LimitKind.INFLIGHT: "max_inflight {bound:g} requests are being served already",
}


class RateLimitedError(RequestError):
    """A limit of the client's key: OpenAI's ``rate_limit_exceeded``. Waiting helps."""

    retryable = True

    def __init__(self, key_name: str, refusal: KeyRefusal) -> None:
        said = _SAYS[refusal.limit].format(bound=refusal.bound)
        super().__init__(f"rate limit of this API key: {said}", status=RATE_LIMITED, error_code="rate_limit_exceeded")
        self.kind = "tokens" if refusal.limit is LimitKind.TOKENS else "requests"
        self.key_name = key_name
        self.limit = refusal.limit
        self.retry_after_s: int = min(RETRY_AFTER_MAX_S, max(1, math.ceil(refusal.retry_after_s)))


def expected_tokens(inbound: Inbound) -> tuple[int, int | None]:
    """About how many tokens the prompts of a request have, and the bound of all its answers; None where the client
    gives none, or asks for a number of answers that is not read here (engines take ``"3"``, too)."""
    if not inbound.api.generates:
        return estimate_tokens(len(inbound.body)), 0
    prompt, _ = inbound.prompt_tokens()
    if inbound.token_limit is None:
        return prompt, None
    each = 1
    for name in inbound.api.many_fields:
        value = number_in(inbound.scan, name)
        if value is not None and value == value // 1:
            each = max(each, int(value))
        elif inbound.has(name) and name != BEAM_SEARCH:  # that one says only how
            return prompt, None
    if inbound.api.is_sampled_by_object and inbound.many_field is not None:
        return prompt, None
    return prompt, min(EXPECTED_MAX, inbound.token_limit[1] * each * (inbound.size.prompts or 1))


def _not_allowed(why: str, param: str | None) -> RequestError:
    return RequestError(why, param=param, status=FORBIDDEN, error_code="model_not_allowed")


class KeyHolder:
    """The holder of one or more keys. Belongs to one event loop."""

    def __init__(self, entry: KeyEntry, meter: KeyMeter, now: Callable[[], float]) -> None:
        self._entry = entry
        self._meter = meter
        self._now = now

    @staticmethod
    def identity_of(entry: KeyEntry) -> tuple[str, tuple[bytes, ...]]:
        """By which a holder is known again: its name, or its keys where it has none."""
        return entry.name, entry.digests if entry.name == UNNAMED else ()

    @property
    def identity(self) -> tuple[str, tuple[bytes, ...]]:
        return self.identity_of(self._entry)

    @property
    def name(self) -> str:
        return self._entry.name

    @property
    def models(self) -> frozenset[str] | None:
        """Those that it may ask for; None: all."""
        return self._entry.models

    @property
    def limits(self) -> KeyLimits:
        return self._entry.limits

    @property
    def inflight(self) -> int:
        return self._meter.inflight

    def may_use(self, model: str) -> bool:
        return self._entry.models is None or model in self._entry.models

    def adopt(self, entry: KeyEntry, now: float, shared: SharedMeter | None = None) -> None:
        """Other limits and models from now on."""
        self._entry = entry
        self._meter.adopt(entry.limits, now, shared)

    def leave(self) -> None:
        """It has no key any more."""
        self._meter.leave()

    def enter(self) -> KeyedRequest:
        """Begin a request. Raises RateLimitedError."""
        admitted = self._meter.enter(self._now())
        if isinstance(admitted, KeyRefusal):
            raise RateLimitedError(self.name, admitted)
        return KeyedRequest(self, admitted, self._now)

    def __repr__(self) -> str:
        return f"KeyHolder({self.name!r})"


class KeyedRequest:
    """Made by :meth:`KeyHolder.enter`; :meth:`end` must be called at its end, however it ends."""

    def __init__(
        self, holder: KeyHolder | None = None, taken: KeyPass | None = None, now: Callable[[], float] | None = None
    ) -> None:
        self._holder = holder
        self._pass = taken
        self._now = now
        self._prompt = 0
        self._bound: int | None = None
        self._unread = 0
        self.usage: UsageSeen | None = None
        """What the answer says of its tokens; None where they are not counted."""
        if holder is not None and holder.name != UNNAMED:
            self.usage = UsageSeen()

    @property
    def name(self) -> str:
        """The holder's; empty where no key was asked for."""
        return "" if self._holder is None else self._holder.name

    @property
    def owner(self) -> bytes:
        """By which requests of this holder are known, in every process of the router; empty where there is none."""
        if self._holder is None:
            return b""
        name, digests = self._holder.identity
        return b"\0".join((name.encode(), *digests))

    @property
    def models(self) -> frozenset[str] | None:
        """Those that may be asked for; None: all."""
        return None if self._holder is None else self._holder.models

    def admit(self, inbound: Inbound, models: tuple[str, ...]) -> Inbound:
        """The request, for a model that this key may use, once its tokens are taken. Where it names none and one of
        ``models`` is served, it is that one. Raises RequestError (400, 403, 404), NoWorkerError, RateLimitedError."""
        holder, taken = self._holder, self._pass
        if holder is None or taken is None or self._now is None:
            return inbound
        if holder.models is not None:
            inbound = self._with_model(inbound, holder, models)
            adapter = inbound.scan.scalar(ADAPTER) if inbound.scan.kind(ADAPTER) is Kind.STRING else None
            if inbound.has(ADAPTER) and not (isinstance(adapter, str) and holder.may_use(adapter)):
                raise _not_allowed(f"{ADAPTER}: this API key may use no adapter but those among its models", ADAPTER)
        self._prompt, self._bound = expected_tokens(inbound)
        refusal = taken.reserve(self._prompt + (self._bound or 0), self._now())
        if refusal is not None:
            raise RateLimitedError(holder.name, refusal)
        return inbound

    @staticmethod
    def _with_model(inbound: Inbound, holder: KeyHolder, models: tuple[str, ...]) -> Inbound:
        """As the dispatcher gives a request its model, among those that the holder may know of: the texts of its errors
        name no other, and no worker."""
        if inbound.model and not holder.may_use(inbound.model):
            raise _not_allowed(f"model: this API key may not use {inbound.model!r}", "model")
        if not models:
            raise NoWorkerError("no worker has said yet which model it serves")
        served = tuple(filter(holder.may_use, models))
        if not inbound.model:
            if len(served) != 1:
                here = ", ".join(served) or "no model"
                raise RequestError(f"model: must be given, as there is {here} for this API key", param="model")
            return dataclasses.replace(inbound, model=served[0])
        if inbound.model not in served:
            what = f"model: {inbound.model!r} is not served here"
            raise RequestError(what, param="model", status=404, error_code="model_not_found")
        return inbound

    def admit_unread(self, body_bytes: int, model: str) -> None:
        """Take the tokens of a request that is not looked into: about those of its body. ``model`` is the one that it
        goes to; empty where that is not known. Raises RequestError (403), RateLimitedError (429)."""
        holder, taken = self._holder, self._pass
        if holder is None or taken is None or self._now is None:
            return
        if holder.models is not None and not holder.may_use(model):
            raise _not_allowed("this API key is for some models only, and this path passes through to any", None)
        self._unread = estimate_tokens(body_bytes)
        refusal = taken.reserve(self._unread, self._now())
        if refusal is not None:
            raise RateLimitedError(holder.name, refusal)

    def end(self, record: RequestRecord | None = None, *, status: int = 0, answer_bytes: int = 0) -> float:
        """The request is over: give back what it did not cost. Returns the tokens that it cost; 0 at a second call."""
        taken, self._pass = self._pass, None
        if taken is None or self._now is None:
            return 0.0
        if record is None:
            taken.end(self._now(), 0.0)
            return 0.0
        tokens = self._cost(record, status, answer_bytes)
        taken.end(self._now(), tokens, is_counted=record.placement is not None or status < 500)
        return tokens

    def _cost(self, record: RequestRecord, status: int, answer_bytes: int) -> float:
        """What its answer says, otherwise what was expected; nothing where the client got an error instead."""
        if self._unread:
            return float(self._unread) if 0 < status < 400 else 0.0
        if record.placement is None or status >= 400:
            return 0.0
        seen = self.usage
        prompt = self._prompt if seen is None or seen.prompt is None else seen.prompt
        answer = self._bound if seen is None or seen.answer is None else seen.answer
        if answer is None:
            answer = answer_bytes // EVENT_BYTES if record.is_stream else estimate_tokens(answer_bytes)
        return float(prompt + answer)


UNKEYED = KeyedRequest()
"""Of a client that is asked for no key. It has no state, so all such requests share it."""
