"""What is promised to one reader of one step's blocks: a grant in each storage, announced as the layers are written."""

from __future__ import annotations

import dataclasses
import logging

from kvxfer.agent import Grant
from kvxfer.errors import GrantGone

log = logging.getLogger("kvxfer.vllm")


@dataclasses.dataclass(frozen=True)
class PartGrant:
    """A part's pages in one storage: ``count`` pages a layer."""

    grant: Grant
    first_layer: int
    layers: int
    count: int

    def announce(self, layers: int) -> None:
        """So many of the model's layers are written. Raises GrantGone's kinds."""
        own = min(layers - self.first_layer, self.layers)
        if own > 0:
            self.grant.ready(own * self.count, layers=own, complete=own == self.layers)


def announce(parts: list[PartGrant], layers: int) -> None:
    """So many of the model's layers are written; parts that have ended are dropped."""
    alive = []
    for part in parts:
        try:
            part.announce(layers)
            alive.append(part)
        except GrantGone as error:
            log.debug("a part ended while it was computed: %s", error)
    parts[:] = alive
