"""``kv_transfer_params`` as this connector reads and writes it: vLLM's fields for two legs, and those of kvxfer's
router.

A prefill leg says ``do_remote_decode``; a decode leg says ``do_remote_prefill`` and whose blocks it wants: what the
prefill leg was answered, or (both legs at once) the router's ``source``. Decides what makes sense; never raises
anything but InvalidArgumentError, because what it reads came from a client.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from kvxfer.connectors.common.ids import rank_agent
from kvxfer.errors import BY_CODE, InvalidArgumentError
from kvxfer.observe import traceparent_of
from kvxfer.protocol.signed_metadata import TEXT_MAX
from kvxfer.types import STAGES, Incarnation, TransferId, check_agent_id

VERSION = 1
RANKS_MAX = 1024
DECLINED_TEXT_MAX = 512
TIMEOUT_S_MAX = 86400.0
DISCOVERED_RANKS_MAX = 16
"""Ranks of one engine whose agent metadata one request carries at most."""
_INCARNATION = re.compile(r"([0-9]{1,20})\.([0-9a-f]{32})")


@dataclasses.dataclass(frozen=True)
class PrefillLeg:
    """Compute the prompt and keep it. ``reader`` is the base agent of the engine that will fetch it while it is
    computed; without one an engine that knows the transfer id fetches it afterwards."""

    transfer_id: TransferId | None
    reader: str | None


@dataclasses.dataclass(frozen=True)
class DecodeLeg:
    """Fetch the prompt. ``tokens``: how many the source holds, if its answer says so; then it has computed them.
    ``incarnations``: those of ``sources`` that did, with their signed ``agent_metadata``; empty if unknown.
    ``timeout_s``: how long it may wait for a source that has not begun it, if given. ``stages``: where each pipeline
    stage of the sources' engine ends (:func:`.shares.stages_of`); empty: there is one."""

    transfer_id: TransferId
    sources: tuple[str, ...]
    tokens: int | None
    incarnations: tuple[Incarnation, ...] = ()
    agent_metadata: tuple[str, ...] = ()
    timeout_s: float | None = None
    stages: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the prompt may have no named reader, so that the first engine that asks gets it. A client may give
        one answer to several engines, and claim anything about it."""
        return self.tokens is not None


@dataclasses.dataclass(frozen=True)
class Declined:
    """The source did not keep the prompt, for the reason in its error code and text: it is computed here."""

    code: str
    text: str


def parse(params: Mapping[str, Any] | None) -> PrefillLeg | DecodeLeg | Declined | None:
    """The leg that a request asks for; ``None`` if it involves no other engine. Raises InvalidArgumentError."""
    if not params:
        return None
    if params.get("do_remote_prefill"):
        return _decode_leg(params)
    if params.get("do_remote_decode"):
        return _prefill_leg(params)
    return _refusal(params.get("kvxfer"))


def trace_of(headers: Mapping[str, str] | None, params: Mapping[str, Any] | None) -> str | None:
    """The W3C ``traceparent`` of a request: from its ``headers``, which vLLM passes on if it traces, else from its
    parameters; ``None`` if neither has a valid one."""
    for place in (headers, params):
        traceparent = traceparent_of((place or {}).get("traceparent"))
        if traceparent is not None:
            return traceparent
    return None


def declined(transfer_id: TransferId, code: str, text: str) -> dict[str, Any]:
    """The answer of a prefill leg whose prompt is not kept. A decode leg that gets it computes the prompt, and tells
    its client why."""
    return {
        "do_remote_prefill": False,
        "do_remote_decode": False,
        "transfer_id": str(transfer_id),
        "kvxfer": {"version": VERSION, "code": code, "text": text[:DECLINED_TEXT_MAX]},
    }


def handed_over(
    transfer_id: TransferId,
    agents: tuple[str, ...],
    request_id: str,
    tokens: int,
    traceparent: str | None = None,
    incarnations: tuple[Incarnation, ...] = (),
    agent_metadata: tuple[str, ...] = (),
    stages: str = "",
) -> dict[str, Any]:
    """The answer of a prefill leg, for the decode leg: ``agents`` keep ``tokens``, in these ``incarnations`` of theirs,
    which ``agent_metadata`` describes; their engine's pipeline ``stages``."""
    trace = {} if traceparent is None else {"traceparent": traceparent}
    return {
        **trace,
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": agents[0],
        "remote_request_id": request_id,
        "transfer_id": str(transfer_id),
        "kvxfer": {
            "version": VERSION,
            "agents": list(agents),
            "lives": [f"{incarnation.number}.{incarnation.boot_nonce.hex()}" for incarnation in incarnations],
            "cards": list(agent_metadata),
            "stages": stages,
            "tokens": tokens,
        },
    }


def _refusal(answered: Any) -> Declined | None:
    code = answered.get("code") if isinstance(answered, dict) else None
    if not isinstance(code, str) or code not in BY_CODE:
        return None
    return Declined(code, str(answered.get("text", ""))[:DECLINED_TEXT_MAX])


def _prefill_leg(params: Mapping[str, Any]) -> PrefillLeg:
    text = params.get("transfer_id")
    transfer_id = None if text is None else TransferId.from_hex(text)
    destination = params.get("destination")
    if destination is None or transfer_id is None:
        return PrefillLeg(transfer_id, None)
    return PrefillLeg(transfer_id, _end("destination", destination)[0])


def _decode_leg(params: Mapping[str, Any]) -> DecodeLeg:
    transfer_id = TransferId.from_hex(params.get("transfer_id", ""))
    answered, timeout_s = params.get("kvxfer"), _timeout(params.get("timeout_s"))
    if answered is None:
        base, ranks = _end("source", params.get("source"))
        names = tuple(rank_agent(base, rank) for rank in range(ranks))
        return DecodeLeg(transfer_id, names, None, timeout_s=timeout_s, stages=_stages("source", params["source"]))
    if not isinstance(answered, dict) or answered.get("version") != VERSION:
        raise InvalidArgumentError(
            f"kvxfer.version must be {VERSION}: prefill and decode run different versions of kvxfer"
        )
    agents, tokens = answered.get("agents"), answered.get("tokens")
    if not isinstance(agents, list) or not 1 <= len(agents) <= RANKS_MAX:
        raise InvalidArgumentError("kvxfer.agents must name the agents of the prefill engine")
    if type(tokens) is not int or tokens < 0:
        raise InvalidArgumentError("kvxfer.tokens must be a count")
    names = tuple(check_agent_id(agent) for agent in agents)
    incarnations, agent_metadata = (_for_each(agents, answered, name) for name in ("lives", "cards"))
    if len(agent_metadata) > DISCOVERED_RANKS_MAX:
        raise InvalidArgumentError(f"kvxfer.cards must be at most {DISCOVERED_RANKS_MAX}")
    return DecodeLeg(
        transfer_id,
        names,
        tokens,
        tuple(map(_incarnation, incarnations)),
        tuple(map(_metadata, agent_metadata)),
        stages=_stages("kvxfer", answered),
    )


def _timeout(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value <= TIMEOUT_S_MAX:
        raise InvalidArgumentError(f"timeout_s must be a number above 0, and at most {TIMEOUT_S_MAX:g}")
    return float(value)


def _for_each(agents: list[Any], answered: Mapping[str, Any], name: str) -> list[Any]:
    values = answered.get(name, [])
    if not isinstance(values, list) or len(values) not in (0, len(agents)):
        raise InvalidArgumentError(f"kvxfer.{name} must have one for each of kvxfer.agents")
    return values


def _stages(name: str, values: Mapping[str, Any]) -> str:
    text = values.get("stages", "")
    if not isinstance(text, str) or not STAGES.fullmatch(text):
        raise InvalidArgumentError(f"{name}.stages must say at which layers the pipeline stages end, as '16,32'")
    return text


def _metadata(text: Any) -> str:
    if not isinstance(text, str) or len(text) > TEXT_MAX:
        raise InvalidArgumentError(f"kvxfer.cards must have agent metadata, a text of at most {TEXT_MAX} characters")
    return text


def _incarnation(text: Any) -> Incarnation:
    found = _INCARNATION.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise InvalidArgumentError("an incarnation of kvxfer.lives must be a number, a point and 32 hex digits")
    return Incarnation(int(found[1]), bytes.fromhex(found[2]))


def _end(name: str, end: Any) -> tuple[str, int]:
    if not isinstance(end, dict):
        raise InvalidArgumentError(f"{name} must be an object with agent_id and ranks")
    ranks = end.get("ranks", 1)
    if type(ranks) is not int or not 1 <= ranks <= RANKS_MAX:
        raise InvalidArgumentError(f"{name}.ranks must be 1 to {RANKS_MAX}")
    return check_agent_id(end.get("agent_id", "")), ranks
