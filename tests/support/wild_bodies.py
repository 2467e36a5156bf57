"""Hypothesis strategies for what a client may send: bodies near a valid one, bodies far from any, and their heads."""

from __future__ import annotations

import gzip
import json
from typing import Any

from hypothesis import strategies as st

from kvxfer.router.apis import ROUTES

TEXT = "Say something."
_CHAT = {"model": "mock", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "mock", "prompt": TEXT, "max_tokens": 4},
    "/v1/chat/completions": {**_CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    "/v1/responses": {"model": "mock", "input": TEXT, "max_output_tokens": 4},
    "/v1/messages": {**_CHAT, "system": "Be brief."},
    "/generate": {"text": TEXT, "sampling_params": {"max_new_tokens": 4, "n": 1}},
    "/v1/embeddings": {"model": "mock", "input": [TEXT, TEXT]},
    "/tokenize": {"model": "mock", "prompt": TEXT},
    "/detokenize": {"model": "mock", "tokens": [1, 2, 3]},
}
_RERANK = {"model": "mock", "query": TEXT, "documents": [TEXT, TEXT]}
"""Of every other route."""
NAMES = (
    *("model", "stream", "stream_options", "prompt", "prompt_embeds", "messages", "input", "text", "input_ids", "n"),
    *("input_embeds", "max_tokens", "max_completion_tokens", "max_output_tokens", "best_of", "use_beam_search"),
    *("system", "instructions", "tools", "tool_choice", "echo", "logprobs", "top_logprobs", "prompt_logprobs", "stop"),
    *("truncate_prompt_tokens", "vllm_xargs", "sampling_params", "background", "previous_response_id", "conversation"),
    *("return_logprob", "logprob_start_len", "session_params", "min_tokens", "ignore_eos", "kv_transfer_params"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "response_format", "query", "documents"),
)
HUGE = (
    *(0, -1, 1, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63), 10**400, -(10**4000), 1e308, -0.0, 5e-324),
    *(float("nan"), float("inf"), -float("inf")),
)
KINDS = (
    *("application/json", "application/json; charset=utf-16", "text/plain", "multipart/form-data; boundary=x", "x/y"),
    *("application/x-www-form-urlencoded", "APPLICATION/JSON;charset=latin1", "", "application/json" * 50, "\xe4/\xff"),
)
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "utf-7", "cp037")

texts = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(categories=("Cs", "Cc", "Zl", "So")), max_size=8),
    st.sampled_from([TEXT, "", "mock", "\x00", "a" * 5000, "\ud800", "data: [DONE]\n\n", '"', "\\", "../..", "true"]),
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(HUGE), texts)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(NAMES), texts), inner, max_size=4),
    ),
    max_leaves=12,
)
_odd_lists = st.sampled_from(
    [
        *(
            [],
            [[]],
            [[1], []],
            [[1], "a"],
            [1, "a"],
            [1, 2.5],
            [None],
            [True],
            [{}],
            [[[1.0]]],
            ["a"] * 40,
            [""],
            [0] * 300,
        ),
        *(
            [{"role": "user"}],
            [{"role": 1}],
            [{"content": "x"}],
            [{"role": "user", "content": [{"type": "image_url"}]}],
        ),
        *([{"n": 2}, {"n": 1}], [{"n": None}], [{"type": "function"}], {"a": {"b": [1]}}, {"n": 10**30}, {"n": "2"}),
    ]
)


def valid_body(path: str) -> dict[str, Any]:
    return dict(VALID.get(path, _RERANK))


def deep(depth: int, opening: str, inner: str, closing: str) -> bytes:
    return (opening * depth + inner + closing * depth).encode()


@st.composite
def _near(draw: st.DrawFn, path: str) -> bytes:
    """A valid body of which some members are others, or more, or fewer."""
    body: dict[str, Any] = valid_body(path)
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.one_of(st.sampled_from(sorted(body) or ["model"]), st.sampled_from(NAMES), texts))
        if draw(st.integers(0, 4)) == 0:
            body.pop(name, None)
        else:
            body[name] = draw(st.one_of(values, _odd_lists, st.sampled_from([TEXT, 1, True])))
    text = json.dumps(body, ensure_ascii=draw(st.booleans()))
    if draw(st.integers(0, 5)) == 0:  # a member twice
        text = text[:-1] + "," + json.dumps(draw(st.sampled_from(NAMES))) + ":" + json.dumps(draw(values)) + "}"
    return text.encode("utf-8", "surrogatepass")


@st.composite
def _broken(draw: st.DrawFn, path: str) -> bytes:
    """A valid body of which some bytes are others, or more, or fewer."""
    content = bytearray(json.dumps(valid_body(path)).encode())
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        action = draw(st.integers(0, 3))
        if action == 0:
            content[at : at + 1] = draw(st.binary(min_size=1, max_size=3))
        elif action == 1:
            del content[at : at + draw(st.integers(1, 20))]
        elif action == 2:
            content[at:at] = draw(
                st.sampled_from([b"{", b"}", b"[", b"]", b'"', b"\\", b",", b"\xff", b"\x00", b"\\u12"])
            )
        else:
            content = content[:at]
    return bytes(content)


_DEEP = [
    deep(depth, opening, inner, closing)
    for depth in (10, 127, 128, 129, 500, 1000, 5000, 100_000)
    for opening, inner, closing in (("[", "1", "]"), ('{"a":', "1", "}"), ('{"messages":[', "", "]}"), ("[", "", ""))
]
_NUMBERS = [
    b"1" * 4300,
    b"1" * 4301,
    b"-" + b"9" * 50_000,
    b"1e" + b"9" * 400,
    b"1." + b"3" * 5000,
    b"0123",
    b"1e",
    b"-",
]


@st.composite
def _members(draw: st.DrawFn, path: str) -> bytes:
    """A valid body with one member of raw bytes: a huge number, or deep nesting."""
    name = draw(st.sampled_from(NAMES)).encode()
    raw = draw(st.one_of(st.sampled_from(_NUMBERS), st.sampled_from(_DEEP), st.binary(max_size=20)))
    first = b'{"%b":%b,' % (name, raw)
    return first + json.dumps(valid_body(path)).encode()[1:]


@st.composite
def _encoded(draw: st.DrawFn, path: str) -> bytes:
    """A valid body in another encoding, or packed."""
    text = json.dumps({**valid_body(path), "user": "\u00e4"}, ensure_ascii=False)
    content = text.encode(draw(st.sampled_from(ENCODINGS)), "replace")
    return gzip.compress(content, mtime=0) if draw(st.integers(0, 5)) == 0 else content


def bodies(path: str) -> st.SearchStrategy[bytes]:
    return st.one_of(
        _near(path),
        _near(path),
        _broken(path),
        _members(path),
        _encoded(path),
        values.map(lambda value: json.dumps(value).encode()),
        st.sampled_from(_DEEP),
        st.binary(max_size=60),
        st.just(b""),
    )


@st.composite
def hot_requests(draw: st.DrawFn) -> tuple[str, bytes, list[bytes], bytes]:
    """(method, target, headers, body) for a route of an inference API."""
    path = draw(st.sampled_from([api.path for api in ROUTES]))
    method = draw(st.sampled_from(["POST"] * 12 + ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]))
    target = path.encode() + draw(st.sampled_from([b"", b"", b"", b"?a=1", b"?model=%00", b"?" + b"x" * 500]))
    headers = []
    kind = draw(st.sampled_from(KINDS))
    if kind:
        headers.append(b"content-type: " + kind.encode("latin-1"))
    if draw(st.booleans()):
        headers.append(b"x-kvxfer-account: 1")
    if draw(st.integers(0, 3)) == 0:
        headers.append(
            draw(
                st.sampled_from(
                    [
                        *(
                            b"x-request-id: \xff\xfe",
                            b"x-request-id: " + b"a" * 300,
                            b"traceparent: 00-zz",
                            b"cookie: a",
                        ),
                        *(
                            b"authorization: Bearer \xe4",
                            b"content-encoding: gzip",
                            b"accept: text/html",
                            b"te: trailers",
                        ),
                        *(b"x-data-parallel-rank: 99999999999", b"accept-encoding: gzip", b"expect: 100-continue"),
                    ]
                )
            )
        )
    return method, target, headers, draw(bodies(path))


PATHS = (
    *("/v1/models", "/v1/models/mock", "/v1/models/", "/v1/workers", "/workers", "/workers/", "/workers/x/drain"),
    *("/workers/127.0.0.1-1/drain", "/workers/x", "/live", "/health", "/ready", "/metrics", "/docs", "/openapi.json"),
    *("/", "//", "/v1", "/v1/unknown", "/docs/oauth2-redirect", "/favicon.ico", "/v1/models/a/b%2Fc", "/%00", "/%ff"),
)
_WORKER = {"url": "http://127.0.0.1:1", "role": "decode", "dialect": "vllm", "model": "m", "name": "w", "dp_rank": 0}


@st.composite
def _worker_bodies(draw: st.DrawFn) -> bytes:
    body: dict[str, Any] = dict(_WORKER)
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.one_of(st.sampled_from(sorted(_WORKER)), texts))
        if draw(st.booleans()):
            body.pop(name, None)
        else:
            body[name] = draw(values)
    return json.dumps(body).encode()


@st.composite
def control_requests(draw: st.DrawFn) -> tuple[str, bytes, list[bytes], bytes]:
    """(method, target, headers, body) for a control route, an admin route, or no route at all."""
    method = draw(st.sampled_from(["GET", "GET", "POST", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]))
    path = draw(st.sampled_from(PATHS)).encode()
    quoted = draw(
        st.sampled_from([b"", b"", b"?on=false", b"?on=maybe", b"?on=%ff", b"?model=%ed%a0%80", b"?model=x&a"])
    )
    kind = draw(st.sampled_from([b"content-type: application/json", b"content-type: text/plain", b"x: y"]))
    body = draw(st.one_of(_worker_bodies(), _worker_bodies(), bodies("/v1/completions"), st.just(b"")))
    return method, path + quoted, [kind], body
