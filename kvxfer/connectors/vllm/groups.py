"""KV groups: which blocks of each block table of a model hold what a reader of a prompt needs, and in which order.

vLLM keeps one block table for each group of layers that share one; a model with sliding windows or recurrent states has
several. All block ids come from one pool, and a block belongs to one group at a time. This module decides, for a prompt
of so many tokens, which positions of each table matter to an engine that goes on after it:

- full attention: all of them;
- sliding window: those that the next token still sees, the last ``window - 1`` tokens;
- chunked local attention: those of the chunk that the next token lies in;
- state (Mamba, linear attention): the last one, which is the state after the prompt's last token.

They form one sequence, ordered by the prompt's token that a block ends with, states last. So what a forward has
finished is a beginning of the sequence, and what a reader lacks behind its own prefix cache is an end of it. A *block
number* names a block together with its group: ``group << 32 | id``. With one group it is vLLM's block id.

Pure: it must never know vLLM, memory or time. The numbers of skipped tokens are those of ``get_num_skipped_tokens`` in
vLLM's ``v1/core/single_type_kv_cache_manager.py``.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import hashlib
from collections.abc import Sequence

from kvxfer.connectors.common.ids import blocks_for

GROUP_BITS = 32
ID_MASK = (1 << GROUP_BITS) - 1
TEXT_MAX = 800
"""Characters of groups in a compatibility record; more are told by their digest."""
NULL_BLOCK = 0
"""vLLM's id of the block that stands for none."""


class GroupKind(enum.Enum):
    """What the blocks of a group hold."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    STATE = "state"


@dataclasses.dataclass(frozen=True)
class KvGroup:
    """Layers that share a block table of ``block_tokens`` tokens a block.

    ``window``: of a sliding window or of a chunk, in tokens; 0 for the other kinds. ``content``: what a page holds, as
    a text that is equal where it means the same.
    """

    kind: GroupKind
    block_tokens: int
    window: int = 0
    layers: tuple[str, ...] = ()
    content: str = ""

    def positions(self, tokens: int) -> range:
        """Positions of the table that hold what the token after the first ``tokens`` depends on."""
        end = blocks_for(tokens, self.block_tokens)
        if tokens == 0 or self.kind is GroupKind.FULL:
            return range(end)
        if self.kind is GroupKind.STATE:
            return range(end - 1, end)
        if self.kind is GroupKind.SLIDING:
            skipped = max(0, tokens - self.window + 1)
        else:
            skipped = tokens // self.window * self.window
        return range(min(skipped // self.block_tokens, end), end)


@dataclasses.dataclass(frozen=True)
class Sequenced:
    """The blocks of one prompt in order: ``places`` are (group, position in its table), ``ends`` the tokens up to which
    each has room. The last ``states`` of them are states. ``may_lack``: vLLM may have given some
    away, and has its null block in their place."""

    places: tuple[tuple[int, int], ...]
    ends: tuple[int, ...]
    states: int
    may_lack: bool

    def __len__(self) -> int:
        return len(self.places)

    @property
    def kept(self) -> int:
        """How many of them are not states. Those come first."""
        return len(self.places) - self.states

    def full_after(self, tokens: int) -> int:
        """How many blocks, from the first on, the first ``tokens`` tokens fill. A state is never full: it changes with
        each token."""
        return min(bisect.bisect_right(self.ends, tokens), self.kept)

    def numbers(
        self, tables: Sequence[Sequence[int]], first: int = 0, end: int | None = None
    ) -> tuple[int, ...] | None:
        """Block numbers of the blocks ``first`` to ``end``, from each group's ``tables``; ``None`` where vLLM keeps one
        of them no longer, or not yet."""
        found = []
        for group, position in self.places[first:end]:
            table = tables[group]
            block = table[position] if position < len(table) else NULL_BLOCK
            if position >= len(table) or (block == NULL_BLOCK and self.may_lack):
                return None
            found.append(group << GROUP_BITS | block)
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class KvGroups:
    """The groups of one engine, in vLLM's order."""

    groups: tuple[KvGroup, ...]

    @property
    def has_states(self) -> bool:
        """Whether a prompt's end has to be the prompt's last token but one: a state cannot be taken back."""
        return any(group.kind is GroupKind.STATE for group in self.groups)

    @property
    def forgets(self) -> bool:
        """Whether vLLM gives away blocks of a prompt while the request goes on beyond it."""
        return any(group.kind is not GroupKind.FULL for group in self.groups)

    @property
    def is_plain(self) -> bool:
        """One group of full attention."""
        return len(self.groups) == 1 and not self.forgets

    @property
    def block_tokens(self) -> int:
        """Of the first group with full attention; of the first group where there is none."""
        full = (group for group in self.groups if group.kind is GroupKind.FULL)
        return next(full, self.groups[0]).block_tokens

    def sequence(self, tokens: int) -> Sequenced:
        """The blocks of a prompt of ``tokens`` tokens. Both sides of a transfer compute it by themselves."""
        entries = []
        for number, group in enumerate(self.groups):
            is_state = group.kind is GroupKind.STATE
            for position in group.positions(tokens):
                end = (position + 1) * group.block_tokens
                entries.append((is_state, end, number, position))
        entries.sort()
        return Sequenced(
            tuple((number, position) for _, _, number, position in entries),
            tuple(end for _, end, _, _ in entries),
            sum(is_state for is_state, *_ in entries),
            self.forgets,
        )

    def to_text(self, layers: Sequence[str]) -> str:
        """What both ends of a transfer must have in common, for the compatibility record; empty for one group of full
        attention. Layers are numbered by their place in ``layers``."""
        if self.is_plain:
            return ""
        number = {name: at for at, name in enumerate(layers)}
        text = "; ".join(
            f"{group.kind.value} {group.window}/{group.block_tokens} [{group.content}] of layers "
            + ",".join(str(number[name]) for name in group.layers if name in number)
            for group in self.groups
        )
        if len(text) <= TEXT_MAX:
            return text
        return f"{len(self.groups)} groups, SHA-256 {hashlib.sha256(text.encode()).hexdigest()}"

    @classmethod
    def plain(cls, block_tokens: int) -> KvGroups:
        """One group of full attention."""
        return cls((KvGroup(GroupKind.FULL, block_tokens),))
