"""What the engines behind the router call the two halves of a request; one file a dialect, one seam (``base.Dialect``).

Decides which names there are. A coordinator's members say ``vllm`` for vLLM with kvxfer's connector, which here is
``vllm-kvxfer``; the source that reads the coordinator maps it.
"""

from __future__ import annotations

from kvxfer.errors import ConfigError
from kvxfer.router.dialects.base import (
    CLIENT_FIELDS,
    Handover,
    HandoverError,
    LegWorker,
    Order,
    Pair,
    Prefilled,
)
from kvxfer.router.dialects.base import LegRequest as Leg
from kvxfer.router.dialects.base import PairDialect as Dialect
from kvxfer.router.dialects.kvxfer import KvxferDialect
from kvxfer.router.dialects.plain import PlainDialect
from kvxfer.router.dialects.sglang import SglangDialect
from kvxfer.router.dialects.vllm import VllmDialect
from kvxfer.router.dialects.vllm_kvxfer import VllmKvxferDialect
from kvxfer.router.dialects.vllm_mooncake import VllmMooncakeDialect

_ALL: tuple[Dialect, ...] = (
    KvxferDialect(),
    VllmKvxferDialect(),
    VllmDialect(),
    VllmMooncakeDialect(),
    SglangDialect(),
    PlainDialect(),
)
_BY_NAME = {one.name: one for one in _ALL}
DIALECTS = frozenset(_BY_NAME)
CLIPPING = frozenset(one.name for one in _ALL if one.clips_answers)
"""Of engines that end an answer where their context ends, whatever was asked for."""
KVXFER, VLLM = "kvxfer", "vllm"


def dialect(name: str) -> Dialect:
    """The dialect of that name. Raises ConfigError that lists the names."""
    found = _BY_NAME.get(name)
    if found is None:
        raise ConfigError(f"dialect must be one of {', '.join(_BY_NAME)}, not {name!r:.80}")
    return found


__all__ = [
    "CLIENT_FIELDS",
    "CLIPPING",
    "DIALECTS",
    "KVXFER",
    "VLLM",
    "Dialect",
    "Handover",
    "HandoverError",
    "Leg",
    "LegWorker",
    "Order",
    "Pair",
    "Prefilled",
    "dialect",
]
