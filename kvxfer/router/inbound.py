"""A client's request as the router carries it: looked at once, never changed, the same for every attempt.

Decides what is no request: a body that is no JSON object, without a model or a prompt, or with a ``stream`` that is no
boolean. ``null`` means that a field is not there. Every other field is the engine's business, and stays bytes. It must
never know how an engine is asked.
"""

from __future__ import annotations

import dataclasses
import json

from kvxfer.errors import InvalidArgumentError, InvalidJsonError
from kvxfer.openai import scanner
from kvxfer.openai.errors import RequestError
from kvxfer.openai.scanner import Kind, Scan
from kvxfer.policy.capacity import Need
from kvxfer.policy.disagg import estimate_tokens
from kvxfer.router.apis import prompts
from kvxfer.router.apis.api import NESTED, Api
from kvxfer.router.apis.prompts import PromptSize

Headers = tuple[tuple[bytes, bytes], ...]

INTEGER_MAX = (1 << 31) - 1
MODEL_CHARS_MAX = 256
NUMBER_BYTES_MAX = 20
"""A longer number is no count that any engine takes."""
SAMPLING_PARAMS = "sampling_params"
SAMPLING_LIST_BYTES_MAX = 64 << 10
_MANY_NESTED = ("n", "beam_width")
_SHOWN_CHARS = 80
_TRACEPARENT = b"traceparent"
_NO_PROMPT = PromptSize(0)


@dataclasses.dataclass(frozen=True)
class Inbound:
    """``scan`` holds the client's own body as it came; every leg gets ``leg_headers``. ``model`` is empty where the
    route need not name one. ``stream``: whether the answer is to be one; a route that generates nothing has none."""

    api: Api
    scan: Scan
    model: str
    stream: bool
    prompt_field: str
    """The field of the body that holds the prompt; empty where the router does not look for one."""
    size: PromptSize
    many_field: str | None
    """The field that asks for several answers to one prompt, such as ``n``; None where there is to be one."""
    token_limit: tuple[str, int] | None
    """The field by which the client bounds the answer, and its tokens. None where it does not, or says what is no
    count: the engine refuses that."""
    leg_headers: Headers
    request_id: str
    arrived_s: float

    @classmethod
    def read(
        cls, api: Api, body: bytes, *, leg_headers: Headers = (), request_id: str = "", arrived_s: float = 0.0
    ) -> Inbound:
        """Look at a body once. Raises RequestError that names the first field that is wrong.

        Above 16 KiB the GIL is free meanwhile, but the calling thread waits: an event loop gives a body of megabytes to
        another thread.
        """
        try:
            scan = api.fields.scan(body)
        except InvalidJsonError as error:
            raise RequestError(str(error)) from None
        field, size = _prompt(api, scan)
        nested = _nested(api, scan)
        return cls(
            api=api,
            scan=scan,
            model=_model(api, scan),
            stream=_stream(scan) and api.generates,
            prompt_field=field,
            size=size,
            many_field=_many_field(api, scan, nested),
            token_limit=_token_limit(api, scan, nested),
            leg_headers=leg_headers,
            request_id=request_id,
            arrived_s=arrived_s,
        )

    @property
    def path(self) -> str:
        return self.api.path

    @property
    def body(self) -> bytes:
        """The client's own bytes."""
        return self.scan.body

    def has(self, name: str) -> bool:
        """Whether the body has a field that the router looks at, and it is not null."""
        return self.scan.kind(name) not in (None, Kind.NULL)

    def is_on(self, name: str) -> bool:
        """Whether a field is there and neither null nor false. Every other value counts as true."""
        return self.scan.kind(name) not in (None, Kind.NULL, Kind.FALSE)

    @property
    def is_one_sequence(self) -> bool:
        """Whether an engine makes one sequence of it: one prompt and one answer."""
        return self.several is None

    @property
    def several(self) -> str | None:
        """The field that makes several sequences of it: of several answers, or a list of prompts; None for one. A list
        of one prompt is that prompt."""
        if self.many_field is not None:
            return self.many_field
        return None if self.size.prompts in (None, 1) else self.prompt_field

    @property
    def may_get_array(self) -> bool:
        """Whether an answer may be a JSON array: SGLang's to a list of prompts, also of one, or to several sequences,
        and those of its rerank routes."""
        is_listed = self.size.prompts is not None or not self.is_one_sequence
        return not self.api.generates or (self.api.is_sampled_by_object and is_listed)

    def needs(self) -> tuple[Need, Need]:
        """What the request takes at least, and what it will take by the router's estimate."""
        tokens, is_exact = self.prompt_tokens()
        is_whole = is_exact and self.scan.kind("truncate_prompt_tokens") is None  # vLLM's: the engine cuts the prompt
        need = Need(tokens if is_whole else 1, 1 if self.token_limit is None else self.token_limit[1])
        return need, dataclasses.replace(need, prompt_tokens=max(1, tokens))

    def prompt_tokens(self) -> tuple[int, bool]:
        """About how many tokens the prompt has, and whether that is exact."""
        return self.size.tokens, self.size.is_exact and self.is_one_sequence

    @property
    def token_limit_field(self) -> str | None:
        """The field by which the client asked for a number of tokens; None where it did not."""
        return None if self.token_limit is None else self.token_limit[0]

    def traced(self, traceparent: str) -> Inbound:
        """The same for one leg, whose span it names."""
        value = traceparent.encode("ascii")
        pairs = tuple((name, value if name == _TRACEPARENT else old) for name, old in self.leg_headers)
        return dataclasses.replace(self, leg_headers=pairs)

    @property
    def traceparent(self) -> str | None:
        """The trace that the legs belong to."""
        return next((value.decode("latin-1") for name, value in self.leg_headers if name == _TRACEPARENT), None)


def number_in(scan: Scan, name: str) -> int | float | None:
    """The value of a field that is a number of ordinary length; None for every other."""
    span = scan.span(name)
    if span is None or scan.kind(name) is not Kind.NUMBER or span[1] - span[0] > NUMBER_BYTES_MAX:
        return None
    value = scan.scalar(name)
    assert isinstance(value, (int, float))
    return value


def _model(api: Api, scan: Scan) -> str:
    kind = scan.kind("model")
    if kind in (None, Kind.NULL):
        if api.requires_model:
            raise RequestError("model: field required", param="model")
        return ""
    if kind is not Kind.STRING:
        raise RequestError(f"model: must be a string{_shown(scan, 'model')}", param="model")
    model = scan.scalar("model")
    assert isinstance(model, str)
    if not 0 < len(model) <= MODEL_CHARS_MAX:
        raise RequestError(f"model: must have 1 to {MODEL_CHARS_MAX} characters, not {len(model)}", param="model")
    if any("\ud800" <= letter <= "\udfff" for letter in model):
        raise RequestError("model: must be valid Unicode text, without lone surrogates", param="model")
    return model


def _stream(scan: Scan) -> bool:
    kind = scan.kind("stream")
    if kind not in (None, Kind.NULL, Kind.TRUE, Kind.FALSE):
        raise RequestError(f"stream: must be true or false{_shown(scan, 'stream')}", param="stream")
    return kind is Kind.TRUE


def _prompt(api: Api, scan: Scan) -> tuple[str, PromptSize]:
    if not api.prompt_fields:
        return "", _NO_PROMPT
    for name in api.prompt_fields:
        kind = scan.kind(name)
        if kind is None or kind is Kind.NULL:
            continue
        raw = bytes(scanner.raw(scan, name) or b"")
        if name in ("prompt_embeds", "input_embeds"):
            return name, prompts.size_of_embeds(raw, kind, name, has_lists=name == "input_embeds")
        if api.has_list_of_prompts:
            return name, prompts.size_of_prompt(raw, kind, name)
        size = prompts.size_of_messages(raw, kind, name, may_be_text=name == "input")
        spans = [span for span in map(scan.span, api.beside_fields) if span is not None]
        beside = sum(end - begin for begin, end in spans)
        return name, dataclasses.replace(size, tokens=size.tokens + estimate_tokens(beside))
    first = api.prompt_fields[0]
    raise RequestError(f"{first}: field required", param=first)


def _nested(api: Api, scan: Scan) -> Scan | None:
    """SGLang's ``sampling_params``, where it is one object. A list of them is one for each prompt of a list."""
    if not api.is_sampled_by_object or scan.kind(SAMPLING_PARAMS) is not Kind.OBJECT:
        return None
    try:
        return NESTED.scan(bytes(scanner.raw(scan, SAMPLING_PARAMS) or b""))
    except InvalidArgumentError as error:  # more members than are looked at
        raise RequestError(f"{SAMPLING_PARAMS}: {error}", param=SAMPLING_PARAMS) from None


def _many_field(api: Api, scan: Scan, nested: Scan | None) -> str | None:
    if api.is_sampled_by_object:
        if nested is None:
            return SAMPLING_PARAMS if _is_any_many(scan) else None
        return next((f"{SAMPLING_PARAMS}.{name}" for name in _MANY_NESTED if _is_many(nested, name)), None)
    return next((name for name in api.many_fields if _is_many(scan, name)), None)


def _is_any_many(scan: Scan) -> bool:
    """Whether one of a list of ``sampling_params`` asks for several answers. A long list is not read."""
    raw = scanner.raw(scan, SAMPLING_PARAMS)
    if raw is None or scan.kind(SAMPLING_PARAMS) is not Kind.ARRAY:
        return False
    if len(raw) > SAMPLING_LIST_BYTES_MAX:
        return True
    listed = json.loads(bytes(raw))
    return any(not isinstance(one, dict) or any((one.get(name) or 1) != 1 for name in _MANY_NESTED) for one in listed)


def _is_many(scan: Scan, name: str) -> bool:
    """Whether it says more than "one". What is no count may mean anything to an engine."""
    kind = scan.kind(name)
    if kind is None or kind is Kind.NULL:
        return False
    if name == "use_beam_search":
        return kind is not Kind.FALSE
    return number_in(scan, name) != 1


def _token_limit(api: Api, scan: Scan, nested: Scan | None) -> tuple[str, int] | None:
    if nested is not None:
        value = number_in(nested, "max_new_tokens")
        is_count = type(value) is int and 0 < value <= INTEGER_MAX
        return (f"{SAMPLING_PARAMS}.max_new_tokens", int(value or 0)) if is_count else None
    for name in api.limit_fields:
        value = number_in(scan, name)
        if type(value) is int and 0 < value <= INTEGER_MAX:
            return name, value
    return None


def _shown(scan: Scan, name: str) -> str:
    """What a field says, where it is short and one value."""
    span = scan.span(name)
    if span is None or scan.kind(name) in (Kind.OBJECT, Kind.ARRAY):
        return ""
    text = scan.body[span[0] : span[1]]
    if len(text) > _SHOWN_CHARS:
        return ""
    return f" (got {json.loads(text)!a})"
