"""The grants of one step's blocks to one reader: one in each storage, announced as the layers are written."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence

from kvxfer.agent import Agent, Grant, Pool
from kvxfer.connectors.common.ids import part_id
from kvxfer.connectors.vllm.pages import LayerStorage, cut_stores
from kvxfer.connectors.vllm.pending_send import PendingSend
from kvxfer.connectors.vllm.stage import StageLayers
from kvxfer.connectors.vllm.stream_callbacks import Callback
from kvxfer.errors import GrantExpiredError, GrantGoneError, GrantRevokedError, KvxferError, PeerGoneError
from kvxfer.observe import OpenSpan
from kvxfer.types import GrantState, TransferId

log = logging.getLogger("kvxfer.vllm")

_CODES = {
    GrantState.EXPIRED: GrantExpiredError.code,
    GrantState.REVOKED: GrantRevokedError.code,
    GrantState.READER_GONE: PeerGoneError.code,
}


@dataclasses.dataclass(frozen=True)
class PartGrant:
    """A part's pages in one storage. ``ends``: how many of them are its first layer's, its first two layers', and so
    on."""

    grant: Grant
    first_layer: int
    ends: tuple[int, ...]

    def announce(self, layers: int) -> None:
        """So many of the model's layers are written. Raises GrantGoneError's kinds."""
        own = min(layers - self.first_layer, len(self.ends))
        if own > 0:
            self.grant.ready(self.ends[own - 1], layers=own, complete=own == len(self.ends))


def announce(parts: list[PartGrant], layers: int) -> None:
    """So many of the model's layers are written; parts that have ended are dropped."""
    alive = []
    for part in parts:
        try:
            part.announce(layers)
            alive.append(part)
        except GrantGoneError as error:
            log.debug("a part ended while it was computed: %s", error)
    parts[:] = alive


class Granting:
    """Makes the grants of one rank's sends, in each of its storages."""

    def __init__(
        self,
        agent: Agent,
        pools: tuple[Pool, ...],
        stores: tuple[LayerStorage, ...],
        rank: int,
        stage: StageLayers,
        ttl_s: float,
    ) -> None:
        self._agent = agent
        self._pools = pools
        self._stores = stores
        self._rank = rank
        self._stage = stage
        self._ttl_s = ttl_s

    def grant(
        self,
        send: PendingSend,
        reader: str | None,
        reader_rank: int,
        part: int,
        blocks: Sequence[int],
        layers: range,
        on_ended: Callable[[Grant, GrantState], None],
    ) -> list[PartGrant]:
        """Grants of these blocks' pages of ``layers`` (numbered as in the model) in every storage, or none where one
        could not be made. Raises IncompatibleError where this rank does not keep those layers."""
        granted = []
        content_digest = self._stage.content(send.content_digest, layers)
        for index, pool, store in cut_stores(self._pools, self._stores, self._stage.local(layers)):
            transfer_id = part_id(send.transfer_id, self._rank, reader_rank, part, index)
            pages = store.ids(blocks)
            try:
                grant = self._agent.grant(
                    pool,
                    pages,
                    transfer_id=transfer_id,
                    reader=reader,
                    ttl_s=self._ttl_s,
                    content_digest=content_digest,
                )
            except KvxferError as error:
                log.warning("blocks could not be granted: %s", error, extra={"request_id": send.request_id})
                return []
            send.grants[transfer_id] = grant
            span = OpenSpan(
                "kvxfer.grant",
                send.traceparent,
                request_id=send.request_id,
                transfer_id=str(send.transfer_id),
                part=part,
                blocks=len(blocks),
            )
            grant.on_ended(functools.partial(_ended, grant, span, on_ended))
            granted.append(PartGrant(grant, store.first_layer, store.ends(blocks)))
        return granted

    def abort(self, transfer_id: TransferId, part: int) -> None:
        """End what this rank's own counterpart was granted of that part."""
        for index in range(len(self._pools)):
            with contextlib.suppress(KvxferError):
                self._agent.abort_grant(part_id(transfer_id, self._rank, self._rank, part, index))


def _ended(grant: Grant, span: OpenSpan, on_ended: Callable[[Grant, GrantState], None], state: GrantState) -> None:
    span.end(_CODES.get(state))
    on_ended(grant, state)


class Announcing:
    """The parts that the forward under way writes. Announced: the layers that are written without a gap before them,
    at least ``every`` of them at once. Called by the forward thread."""

    def __init__(self, layers: int, every: int, after: Callable[[Callback], None]) -> None:
        self._layers = layers
        self._every = every
        self._after = after
        self._parts: list[PartGrant] = []
        self._saved: set[int] = set()
        self._announced = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, parts: list[PartGrant]) -> None:
        """The coming forward writes these."""
        self._parts += parts

    def layer_saved(self, layer: int) -> None:
        """It wrote its part of one layer."""
        if not self._parts:
            return
        self._saved.add(layer)
        done = self._announced
        while done in self._saved:
            done += 1
        if done - self._announced >= self._every or done == self._layers:
            self._announce(done)

    def all_saved(self) -> None:
        """It wrote everything."""
        self._announce(self._layers)
        self.drop()

    def drop(self) -> None:
        """It announces nothing more."""
        self._parts = []
        self._saved.clear()
        self._announced = 0

    def _announce(self, layers: int) -> None:
        if self._parts and layers > self._announced:
            self._announced = layers
            self._after(functools.partial(announce, self._parts, layers))
