"""The reference model of registered memory: which regions are offered, what was posted, what landed where and when, and
what each side was told. Like the other model, in ``checkers``, it shares no code with what it judges.

A post is a fetch or a push. A *flow* is what the model keeps of one post: what landed, which verdicts were given and
heard, and how it ended. Both sides find a flow by their incarnation and the post's id, whichever of the two posted it
and however many lanes carry it.
"""

from __future__ import annotations

import dataclasses

from kvxfer.testing.sim.checkers import Invariant, Violation
from kvxfer.testing.sim.links import Sample
from kvxfer.testing.sim.tagged_memory import Cell, TaggedMemory, describe
from kvxfer.testing.sim.virtual_clock import NEVER, S

Key = tuple[int, bytes]


@dataclasses.dataclass
class PostRecord:
    """``poster``, ``source``, ``target`` are incarnations; ``wanted[i]`` of the source goes to ``cells[i]`` of the
    target."""

    id: bytes
    is_push: bool
    poster: int
    source: int
    target: int
    wanted: list[Cell]
    cells: list[Cell]
    memory: TaggedMemory
    notification: bytes | None
    posted_at: int
    final: str = ""
    final_at: int = NEVER
    is_drained: bool = False
    is_notified: bool = False
    is_committed: bool = False
    """At the target."""


@dataclasses.dataclass
class _Flow:
    post: PostRecord
    landed: dict[int, tuple[bytes, Sample]] = dataclasses.field(default_factory=dict)
    """By element: the bytes in the target's memory, and what was read at the source."""
    ok_at: dict[int, int] = dataclasses.field(default_factory=dict)
    """When the source first confirmed each nonce."""
    heard_ok: list[int] = dataclasses.field(default_factory=list)
    """Nonces of the confirmations that reached the target."""
    ended: str = ""
    """The state in which a push's offer ended at its target."""


class RegionReference:
    """Every method raises :class:`Violation` the moment an invariant is broken."""

    def __init__(self) -> None:
        self._regions: dict[tuple[int, int], list[int]] = {}
        self._posts: dict[Key, PostRecord] = {}
        self._from: dict[Key, _Flow] = {}
        self._to: dict[Key, _Flow] = {}

    # --- regions ---

    def registered(self, incarnation: int, region: int, now: int) -> None:
        if (incarnation, region) in self._regions:
            raise AssertionError(f"incarnation {incarnation} registers region {region} twice")
        self._regions[incarnation, region] = [now, NEVER]

    def removed(self, incarnation: int, region: int, now: int) -> None:
        self._regions[incarnation, region][1] = now

    def is_offered(self, incarnation: int, region: int, at: int) -> bool:
        begin, end = self._regions.get((incarnation, region), (NEVER, 0))
        return begin <= at < end

    # --- known transfers ---

    def knows_post(self, incarnation: int, id_: bytes) -> bool:
        return (incarnation, id_) in self._posts

    def knows_source(self, incarnation: int, id_: bytes) -> bool:
        return (incarnation, id_) in self._from

    def knows_target(self, incarnation: int, id_: bytes) -> bool:
        return (incarnation, id_) in self._to

    # --- posts ---

    def posted(self, post: PostRecord) -> None:
        self._posts[post.poster, post.id] = post
        self._from[post.source, post.id] = self._to[post.target, post.id] = _Flow(post)

    def landed(self, incarnation: int, id_: bytes, cell: Cell, data: bytes, sample: Sample) -> None:
        """Bytes reached a cell of registered memory. The post must have asked for that cell and must not have ended."""
        flow = self._to.get((incarnation, id_))
        what = f"{describe(sample.data)} landed in {cell} of incarnation {incarnation} for {id_.hex()}"
        if flow is None or cell not in flow.post.cells:
            raise Violation(Invariant.RESERVATION, f"{what}, which was never asked to fill it")
        if self._regions[incarnation, cell.region][1] != NEVER:
            raise Violation(Invariant.RESERVATION, f"{what}, and that region was removed")
        # A push that is drained is not read from any more; what was read of it may still land, until its offer ends.
        ended = flow.ended or (flow.post.final if flow.post.is_drained and not flow.post.is_push else "")
        if ended:
            raise Violation(Invariant.RESERVATION, f"{what}, which had ended as {ended}")
        flow.landed[flow.post.cells.index(cell)] = (data, sample)

    def confirmed(self, incarnation: int, id_: bytes, nonce: int, now: int) -> None:
        """The source confirmed a nonce. Its region must be offered now, unless the source repeats an earlier
        confirmation."""
        flow = self._from[incarnation, id_]
        if nonce in flow.ok_at:
            return
        for region in {cell.region for cell in flow.post.wanted}:
            if not self.is_offered(incarnation, region, now):
                raise Violation(
                    Invariant.CONFIRMED,
                    f"incarnation {incarnation} confirmed {id_.hex()} at {now / S:.6f} s without region {region}",
                )
        if flow.post.is_push and flow.post.final:
            raise Violation(
                Invariant.CONFIRMED,
                f"incarnation {incarnation} confirmed its push {id_.hex()}, {flow.post.final} before",
            )
        flow.ok_at[nonce] = now

    def verdict_arrived(self, incarnation: int, id_: bytes, source: int, nonce: int) -> None:
        flow = self._to[incarnation, id_]
        if flow.post.source == source:
            flow.heard_ok.append(nonce)

    def final(self, incarnation: int, id_: bytes, state: str, now: int) -> None:
        """An event of the poster."""
        post = self._posts[incarnation, id_]
        if post.final:
            raise Violation(Invariant.ONCE, f"post {id_.hex()} became {post.final}, then {state}")
        post.final, post.final_at = state, now
        if state != "COMMITTED":
            return
        if not post.is_push:
            self._check_commit(self._to[incarnation, id_])
        elif not post.is_committed:
            raise Violation(Invariant.CONFIRMED, f"push {id_.hex()} is told as done; it is not committed at its target")
        elif post.notification is not None and not post.is_notified:
            raise Violation(Invariant.NOTIFICATION, f"push {id_.hex()} is told as done before its target was notified")

    def drained(self, incarnation: int, id_: bytes) -> None:
        post = self._posts[incarnation, id_]
        if not post.final:
            raise Violation(Invariant.ONCE, f"post {id_.hex()} drained before it was final")
        if post.is_drained:
            raise Violation(Invariant.ONCE, f"post {id_.hex()} drained twice")
        post.is_drained = True

    def offer_ended(self, incarnation: int, id_: bytes, state: str, now: int) -> None:
        """An event of the target of a push."""
        flow = self._to.get((incarnation, id_))
        if flow is None or not flow.post.is_push:
            raise Violation(Invariant.ONCE, f"an offer {id_.hex()} ended without a push")
        if flow.ended:
            raise Violation(Invariant.ONCE, f"offer {id_.hex()} ended as {flow.ended}, then as {state}")
        flow.ended = state
        if state == "COMMITTED":
            self._check_commit(flow)
            flow.post.is_committed = True

    def notified(self, sender: int, receiver: int, payload: bytes) -> None:
        """A notification that came with a push. The push's bytes must be there and confirmed, and it must come once."""
        post = self._posts.get((sender, payload[:16]))
        if post is None or post.target != receiver or post.notification != payload:
            raise Violation(
                Invariant.NOTIFICATION, f"incarnation {receiver} got {payload.hex()} of {sender}, which did not send it"
            )
        if post.is_notified:
            raise Violation(Invariant.NOTIFICATION, f"incarnation {receiver} was told of push {post.id.hex()} twice")
        flaw = self._flaw(self._to[receiver, post.id])
        if flaw is not None:
            raise Violation(
                Invariant.NOTIFICATION,
                f"incarnation {receiver} was told of push {post.id.hex()} before its commit: {flaw}",
            )
        post.is_notified = True

    def _check_commit(self, flow: _Flow) -> None:
        flaw = self._flaw(flow)
        if flaw is not None:
            raise Violation(Invariant.CONFIRMED, f"post {flow.post.id.hex()} committed, but {flaw}")

    def _flaw(self, flow: _Flow) -> str | None:
        """Why the flow must not commit; None where it may."""
        post, last = flow.post, 0
        for index, (wanted, cell) in enumerate(zip(post.wanted, post.cells, strict=True)):
            if index not in flow.landed:
                return f"nothing landed for element {index}"
            data, sample = flow.landed[index]
            if (sample.incarnation, sample.cell) != (post.source, wanted):
                return (
                    f"element {index} was read from {sample.cell} of incarnation {sample.incarnation}, "
                    f"not {wanted} of {post.source}"
                )
            if not self.is_offered(post.source, wanted.region, sample.at):
                return f"element {index} was read at {sample.at / S:.6f} s, when region {wanted.region} was not offered"
            if data != sample.data:
                return f"element {index} is not what was read"
            if post.memory.read(cell) != data:
                return f"element {index} is not in memory any more"
            last = max(last, sample.at)
        moments = [flow.ok_at[nonce] for nonce in flow.heard_ok]
        if not any(moment >= last for moment in moments):
            return f"its last byte was read at {last / S:.6f} s and no word came after that"
        return None

    # --- the end ---

    def check_rest(self, living: set[int], now: int) -> None:
        for (incarnation, id_), post in self._posts.items():
            if incarnation in living and not post.is_drained:
                raise Violation(
                    Invariant.FINAL,
                    f"post {id_.hex()} of incarnation {incarnation}, posted at {post.posted_at / S:.3f} s, is "
                    f"{'not drained' if post.final else 'not final'} at {now / S:.3f} s",
                )

    def is_at_rest(self, living: set[int]) -> bool:
        return all(post.is_drained for (incarnation, _), post in self._posts.items() if incarnation in living)

    def last_final_ns(self) -> int:
        return max((post.final_at for post in self._posts.values() if post.final), default=0)
