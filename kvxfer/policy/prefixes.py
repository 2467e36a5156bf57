"""What the workers' prefix caches hold, from this router's own history: the prompts that each was given, and answers.

Decides what is presumed to be still there: a worker's cache forgets what was used least lately, the end of a prompt
before its head, as vLLM's and SGLang's do. A prompt is a chain of keys; each stands for all content up to it. It must
never know content, tokens or time.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from kvxfer.types import AgentRef

FACTS_MAX = 1 << 19
"""Facts of all workers together: at about 300 bytes each a bound of 160 MiB, and 1 GiB of text that workers hold."""
FULL = 0.95
"""Part of a cache above which it is full: what is in use can push out the rest."""
REACH_GAIN = 0.25
"""Part of the way that a worker's reach goes towards what one answer proves."""


class Chain(NamedTuple):
    """One prompt: ``keys``, and for each the size of all content up to it (``sizes``, in bytes), ascending."""

    keys: Sequence[int]
    sizes: Sequence[int]

    @property
    def size(self) -> int:
        return self.sizes[-1] if self.sizes else 0


NO_CHAIN = Chain((), ())


class PresumedHeld(NamedTuple):
    """``sizes``: how much of one prompt each worker is presumed to hold, in bytes; workers that hold nothing are left
    out. ``uses``: how often others were given the longest part that any worker holds, within the time for which a cache
    holds what was used once; the turns of one session use each other's end once."""

    sizes: dict[AgentRef, int]
    uses: float


class Prefixes:
    """The facts of one router. ``facts_max`` is a hard limit."""

    def __init__(self, facts_max: int = FACTS_MAX) -> None:
        self._facts_max = facts_max
        self._holders: dict[AgentRef, _Holder] = {}
        self._by_key: dict[int, _Holder | set[_Holder]] = {}
        self._lost: list[_Holder] = []
        """Of workers that are gone: their facts go one by one, with later insertions."""
        self._turns: deque[_Holder] = deque()
        """Whose oldest fact goes next where there are too many."""
        self.facts = 0

    def held(self, chain: Chain) -> PresumedHeld:
        """How much of a prompt each worker is presumed to hold."""
        found: dict[AgentRef, int] = {}
        uses = 0.0
        most = -1
        known = len(self._holders)
        for at in range(len(chain.keys) - 1, -1, -1):
            holders = self._by_key.get(chain.keys[at])
            if holders is None:
                continue
            for holder in (holders,) if isinstance(holders, _Holder) else holders:
                if holder.is_lost or holder.ref in found:
                    continue
                found[holder.ref] = chain.sizes[at]
                if most < 0:
                    most = at
                if most == at:
                    uses += holder.uses(chain.keys[at])
            if len(found) == known:
                break
        return PresumedHeld(found, uses)

    def insert(self, ref: AgentRef, chain: Chain, capacity: float) -> float:
        """A worker was given the prompt. ``capacity``: what its cache holds, in bytes of such content. Returns how near
        the oldest part that it still had was to being forgotten: 0.0 to 1.0; 0.0 where it had none."""
        holder = self._holders.get(ref)
        if holder is None:
            holder = self._holders[ref] = _Holder(ref, capacity)
            self._turns.append(holder)
        holder.capacity = capacity
        age = self._put(holder, chain) / holder.reach if holder.reach > 0 else 0.0
        while holder.used > min(holder.capacity, holder.reach) and holder.order:
            self._drop(holder, next(iter(holder.order)))
        self._bound()
        return age

    def is_full(self, ref: AgentRef) -> bool:
        """Whether more content of a worker's pushes out what it holds."""
        holder = self._holders.get(ref)
        return holder is not None and holder.used >= FULL * min(holder.capacity, holder.reach)

    def correct(self, ref: AgentRef, chain: Chain, presumed: int, delivered: int) -> None:
        """The worker said how much of the prompt it held when it computed it: ``delivered`` bytes, where ``presumed``
        were presumed. The prompt was inserted at the choice; what it tells is of how far back the cache reaches."""
        holder = self._holders.get(ref)
        if holder is None or not chain.keys:
            return
        aged = holder.ages.pop(chain.keys[-1], None)
        if aged is None:
            return
        if delivered < presumed - _step(chain, presumed):
            # What was that far back is gone: the cache is smaller, or others use it too.
            holder.reach += REACH_GAIN * (min(holder.reach, max(aged, float(chain.size))) - holder.reach)
        elif aged > holder.reach / 2:
            holder.reach = min(holder.capacity, holder.reach * (1.0 + REACH_GAIN))

    def forget(self, ref: AgentRef) -> None:
        """The worker is gone, or has cleared its cache."""
        holder = self._holders.pop(ref, None)
        if holder is not None:
            holder.is_lost = True
            self._lost.append(holder)

    def _put(self, holder: _Holder, chain: Chain) -> float:
        """Returns how much was put in since the oldest part of it that was there was used."""
        order = holder.order
        oldest: float | None = None
        for at in range(len(chain.keys) - 1, -1, -1):  # the end first, so that the head is used last and stays longest
            key = chain.keys[at]
            fact = order.get(key)
            if fact is None:
                size, uses = chain.sizes[at] - (chain.sizes[at - 1] if at else 0), 0.0
                holder.used += size
                holder.volume += size
                self.facts += 1
                there = self._by_key.get(key)
                if there is None:
                    self._by_key[key] = holder
                elif isinstance(there, _Holder):
                    self._by_key[key] = {there, holder}
                else:
                    there.add(holder)
            else:
                size, uses = fact[0], holder.uses(key)
                age = holder.volume - fact[1]
                oldest = age if oldest is None else max(oldest, age)
            order[key] = (size, holder.volume, uses + 1.0)
            order.move_to_end(key)
        if oldest is not None:
            holder.remember(chain.keys[-1], oldest)
        return oldest or 0.0

    def _drop(self, holder: _Holder, key: int) -> None:
        size = holder.order.pop(key)[0]
        holder.used -= size
        self.facts -= 1
        there = self._by_key[key]
        if there is holder:
            del self._by_key[key]
        elif isinstance(there, set):
            there.discard(holder)
            if len(there) == 1:
                self._by_key[key] = there.pop()

    def _bound(self) -> None:
        """A few facts of those that are gone; and where there are too many, the oldest of each worker in turn."""
        for _ in range(8):
            if not self._lost:
                break
            self._drop_lost()
        while self._lost and self.facts > self._facts_max:
            self._drop_lost()
        turns = self._turns
        while self.facts > self._facts_max:
            holder = turns[0]
            if 2 * len(holder.order) * len(turns) < self.facts:  # one with less than half its share is left alone
                turns.rotate(-1)
                continue
            self._drop(holder, next(iter(holder.order)))
            turns.rotate(-1)

    def _drop_lost(self) -> None:
        holder = self._lost[-1]
        if holder.order:
            self._drop(holder, next(iter(holder.order)))
        else:
            self._turns.remove(self._lost.pop())

    def __repr__(self) -> str:
        return f"Prefixes(workers={len(self._holders)}, facts={self.facts})"


def _step(chain: Chain, size: int) -> int:
    """How far apart keys are at ``size``: no answer can be held to more than that."""
    before = 0
    for there in chain.sizes:
        if there >= size:
            return there - before
        before = there
    return 1


class _Holder:
    """The facts of one worker, those that were used least lately first: by key the size, how much had been put in when
    it was last used, and how often it had been then."""

    __slots__ = ("ages", "capacity", "is_lost", "order", "reach", "ref", "used", "volume")

    AGES_MAX = 1024

    def __init__(self, ref: AgentRef, capacity: float) -> None:
        self.ref = ref
        self.capacity = capacity
        self.reach = capacity
        """How much can be put in until what was not used meanwhile is gone."""
        self.order: OrderedDict[int, tuple[int, float, float]] = OrderedDict()
        self.used = 0.0
        self.volume = 0.0
        self.is_lost = False
        self.ages: OrderedDict[int, float] = OrderedDict()
        """Of prompts under way, by their last key: how much was put in since the oldest part of them was used."""

    def uses(self, key: int) -> float:
        """How often it was used; what was a cache's length ago counts for 1/e."""
        _, volume, uses = self.order[key]
        return uses * math.exp((volume - self.volume) / self.reach) if self.reach > 0 else 0.0

    def remember(self, key: int, age: float) -> None:
        self.ages[key] = age
        if len(self.ages) > self.AGES_MAX:
            self.ages.popitem(last=False)
