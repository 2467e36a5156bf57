"""What an engine says of itself, read from its own pages: load, blocks, models, context.

Decides which lines and fields count: vLLM's and SGLang's. Everything comes from a peer: a page gives numbers, or
nothing, and never an error. It must never know how a page was fetched.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

from kvxfer.router.fleet.worker import MODEL_CHARS_MAX
from kvxfer.types import Load

MODELS_MAX = 256
CONTEXT = "max_model_len"
OWN_MEMBERS = frozenset({"id", "object", "created", "owned_by"})
"""Of an entry of ``/v1/models``: the router says these itself."""
LISTED_MEMBERS_MAX = 32
LISTED_BYTES_MAX = 4096
"""Of what is kept of one entry; one with more keeps its context alone."""
COUNT_MAX = 1 << 40
PERMILLE = 1000
"""Blocks that stand for a whole pool whose size is not known."""

_RUNNING = (b"vllm:num_requests_running", b"sglang:num_running_reqs")
_QUEUED = (
    b"vllm:num_requests_waiting",
    b"sglang:num_queue_reqs",
    b"sglang:num_prefill_prealloc_queue_reqs",
    b"sglang:num_prefill_inflight_queue_reqs",
    b"sglang:num_decode_prealloc_queue_reqs",
    b"sglang:num_decode_transfer_queue_reqs",
)
_USED = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", b"sglang:token_usage")
_GENERATED = (b"vllm:generation_tokens_total", b"kvxfer_engine_tokens_total")
"""Counts of tokens that grow with each step. SGLang's ``generation_tokens_total`` grows when a request has ended."""
_TOKENS = b"sglang:max_total_num_tokens"
_BLOCKS = b"vllm:cache_config_info"
_LABEL = re.compile(rb'([a-z_]+)="([^"\\]{0,200})"')
LINES_MAX = 64
"""Of one metric: one for each engine or rank behind an address."""


@dataclasses.dataclass(frozen=True)
class EngineLoad:
    """What ``/metrics`` says. ``used`` is the part of the pool that is taken; None where it is not said."""

    running: int = 0
    queued: int = 0
    used: float | None = None
    blocks: int = 0
    block_tokens: int = 0
    pool_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class EngineIdentity:
    """What ``/v1/models`` and ``/server_info`` say."""

    models: tuple[str, ...] = ()
    max_context_tokens: int = 0
    block_tokens: int = 0
    pool_tokens: int = 0
    listed: tuple[tuple[str, str], ...] = ()
    """Of each model: its name, and as JSON the members of its entry that are one value (``root``, ``parent``)."""


def read_metrics(page: bytes, dp_rank: int | None = None) -> EngineLoad | None:
    """The load in a page of metrics; None where it is neither vLLM's nor SGLang's. Of several engines behind one
    address all are added up, or only ``dp_rank`` is taken."""
    running = _values(page, _RUNNING, dp_rank)
    if not running:
        return None
    used = _values(page, _USED, dp_rank)
    tokens = _values(page, (_TOKENS,), dp_rank)
    blocks = block_tokens = 0
    for labels, _ in _lines(page, _BLOCKS):
        if _is_of(labels, dp_rank):
            blocks += _count(labels.get(b"num_gpu_blocks"))
            block_tokens = _count(labels.get(b"block_size")) or block_tokens
    return EngineLoad(
        running=int(sum(running)),
        queued=int(sum(_values(page, _QUEUED, dp_rank))),
        used=min(1.0, max(0.0, sum(used) / len(used))) if used else None,
        blocks=blocks,
        block_tokens=block_tokens,
        pool_tokens=int(sum(tokens)),
    )


def read_generated(page: bytes, dp_rank: int | None = None) -> float | None:
    """How many tokens an engine has computed for answers since its start, in a page of metrics; None where it does not
    say it."""
    counts = [
        value
        for name in _GENERATED
        for labels, value in _lines(page, name)
        if _is_of(labels, dp_rank) and value is not None and labels.get(b"kind", b"decode") == b"decode"
    ]
    return sum(counts) if counts else None


def load_of(said: EngineLoad, identity: EngineIdentity) -> tuple[Load, int]:
    """The load as a heartbeat would say it, and the tokens of a block: 0 where the size of the pool is not known."""
    block_tokens = said.block_tokens or identity.block_tokens
    pool_tokens = said.pool_tokens or identity.pool_tokens
    total = said.blocks or (pool_tokens // block_tokens if block_tokens else 0)
    if not total:
        total, block_tokens = PERMILLE, 0
    if said.used is None:
        total = free = 0
    else:
        free = round(total * (1.0 - said.used))
    load = Load(
        queued_requests=said.queued, running_requests=said.running, free_blocks=free, total_blocks=min(total, COUNT_MAX)
    )
    return load, block_tokens


def read_models(page: bytes) -> EngineIdentity | None:
    """Names and context of ``/v1/models``; None where that is no list with a name in it."""
    values = _json(page)
    data = values.get("data") if isinstance(values, dict) else None
    if not isinstance(data, list):
        return None
    entries = [one for one in data[:MODELS_MAX] if isinstance(one, dict) and _is_name(one.get("id"))]
    if not entries:
        return None
    # An adapter names the model that it belongs to; a model's own entry comes first.
    entries.sort(key=lambda one: one.get("parent") is not None)
    lengths = [_whole(one.get(CONTEXT)) for one in entries]
    listed = {one["id"]: _listed(one) for one in reversed(entries)}
    return EngineIdentity(tuple(dict.fromkeys(one["id"] for one in entries)), lengths[0], listed=tuple(listed.items()))


def _listed(entry: dict[str, Any]) -> str:
    plain = {name: one for name, one in entry.items() if one is None or isinstance(one, (bool, int, float, str))}
    plain = {name: one for name, one in plain.items() if name not in OWN_MEMBERS}
    plain[CONTEXT] = _whole(entry.get(CONTEXT))
    if not plain[CONTEXT]:
        del plain[CONTEXT]
    text = _encoded(plain)
    if len(plain) > LISTED_MEMBERS_MAX or not 0 < len(text) <= LISTED_BYTES_MAX:
        return _encoded({name: one for name, one in plain.items() if name == CONTEXT})
    return text


def _encoded(values: dict[str, Any]) -> str:
    """Empty where they hold a number that JSON has not, as 1e999 is read."""
    try:
        return json.dumps(values, separators=(",", ":"), sort_keys=True, allow_nan=False)
    except ValueError:
        return ""


def read_server_info(page: bytes) -> EngineIdentity:
    """SGLang's ``/server_info``."""
    values = _json(page)
    if not isinstance(values, dict):
        return EngineIdentity()
    return EngineIdentity(
        max_context_tokens=_whole(values.get("context_length")),
        block_tokens=_whole(values.get("page_size")),
        pool_tokens=_whole(values.get("max_total_num_tokens")),
    )


def _values(page: bytes, names: tuple[bytes, ...], dp_rank: int | None) -> list[float]:
    return [
        value for name in names for labels, value in _lines(page, name) if _is_of(labels, dp_rank) and value is not None
    ]


def _lines(page: bytes, name: bytes) -> list[tuple[dict[bytes, bytes], float | None]]:
    """(labels, value) of the samples of one metric. Only lines that begin with its name are looked at."""
    found: list[tuple[dict[bytes, bytes], float | None]] = []
    at = 0 if page.startswith(name) else page.find(b"\n" + name) + 1
    while len(found) < LINES_MAX and page.startswith(name, at):
        end = page.find(b"\n", at)
        line = page[at : end if end >= 0 else len(page)]
        if line[len(name) : len(name) + 1] in (b"{", b" "):
            value_at = line.rfind(b"}") + 1 or len(name)
            labels = dict(_LABEL.findall(line, len(name), value_at))
            found.append((labels, _number(line[value_at:].split(maxsplit=1)[:1])))
        following = page.find(b"\n" + name, at)
        if following < 0:
            break
        at = following + 1
    return found


def _is_of(labels: dict[bytes, bytes], dp_rank: int | None) -> bool:
    """Whether a sample is of that engine; samples that name no engine are of all. Of tensor-parallel ranks the first
    counts, because each says the same."""
    if labels.get(b"tp_rank", b"0") != b"0" or labels.get(b"pp_rank", b"0") != b"0":
        return False
    if dp_rank is None:
        return True
    engine = labels.get(b"engine", labels.get(b"dp_rank"))
    return engine is None or engine == b"%d" % dp_rank


def _number(texts: list[bytes]) -> float | None:
    try:
        value = float(texts[0][:40])
    except (ValueError, IndexError):
        return None
    return value if math.isfinite(value) and 0 <= value <= COUNT_MAX else None


def _count(text: bytes | None) -> int:
    return int(text) if text is not None and text.isdigit() and len(text) <= 12 else 0


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 < value <= COUNT_MAX else 0


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MODEL_CHARS_MAX


def _json(page: bytes) -> Any:
    try:
        return json.loads(page)
    except (ValueError, RecursionError):
        return None
