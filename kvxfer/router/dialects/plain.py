"""One engine that does everything itself, of any kind that speaks the client's API.

Decides nothing: the client's body goes as it came, without what no client may set.
"""

from __future__ import annotations

from kvxfer.router.dialects.base import DialectBase, Handover, HandoverError, LegRequest, Order, Pair
from kvxfer.router.inbound import Inbound


class PlainDialect(DialectBase):
    name = "plain"
    order = Order.ALONE
    clips_answers = True
    """Whether this one does is not known. What it refuses it refuses itself, with its own words."""

    def refuses_split(self, inbound: Inbound) -> str | None:
        """Nothing is ever split."""
        return None

    def prefill_leg(self, inbound: Inbound, pair: Pair) -> LegRequest:
        raise HandoverError("a plain engine is no half of a pair")

    def decode_leg(self, inbound: Inbound, pair: Pair, handover: Handover | None) -> LegRequest:
        return self.alone_leg(inbound, pair.decode)
