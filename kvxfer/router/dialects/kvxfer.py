"""Kvxfer's own engine: both legs are the client's body with ``kv_transfer_params`` (DESIGN section 4), both at once.

Decides nothing beyond ``base``: the engine knows from ``role`` which half a leg is, and P answers with its usage and
timings only.
"""

from __future__ import annotations

from kvxfer.openai.transfer_params import PARAM, Part, TransferEnd, TransferParams
from kvxfer.router.dialects.base import DialectBase, Handover, LegRequest, LegWorker, Pair, encoded, leg
from kvxfer.router.inbound import Inbound


class KvxferDialect(DialectBase):
    name = "kvxfer"
    recovers = True

    def prefill_leg(self, inbound: Inbound, pair: Pair) -> LegRequest:
        return leg(inbound, {PARAM: encoded(transfer_params(pair, Part.PREFILL).to_json())})

    def decode_leg(self, inbound: Inbound, pair: Pair, handover: Handover | None) -> LegRequest:
        return leg(inbound, {PARAM: encoded(transfer_params(pair, Part.DECODE).to_json())})

    def alone_leg(self, inbound: Inbound, worker: LegWorker) -> LegRequest:
        return leg(inbound, {})


def transfer_params(pair: Pair, part: Part) -> TransferParams:
    """What both ends know of a transfer, for one of them."""
    return TransferParams(
        transfer_id=pair.transfer_id,
        attempt=pair.attempt,
        role=part,
        source=_end_of(pair.source),
        destination=_end_of(pair.decode),
        timeout_s=pair.timeout_s,
    )


def _end_of(worker: LegWorker) -> TransferEnd:
    return TransferEnd(worker.agent_id, worker.ranks, worker.url, worker.stages)
