"""Which part of the model the pages of a rank hold, and what two ranks have in common if their engines differ in tensor
or pipeline parallelism or in tokens of a page. Decides which source gives which layers and heads; must never know an
address, a room or a peer's name.

Both sides work out what they have in common by themselves, from the two shapes alone, and so come to the same. Which
of several replicas is asked is the destination's choice; one that is not asked gives nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from kvxfer.errors import ConfigError, IncompatibleError, InvalidArgumentError, ProtocolError
from kvxfer.layout.kv_layout import Holding
from kvxfer.layout.tp_sharding import choose_sources, tp_heads

BUFFERS_MAX = 4096
NUMBER_MAX = 1 << 24
NAME_MAX = 32
"""Characters of a part's name."""
SHAPE_BYTES_MAX = 1 << 18
"""Of a shape as JSON."""
_SAID_MAX = 40
"""Characters of a list in a record; a longer one is said by its digest."""


@dataclasses.dataclass(frozen=True)
class KvShape:
    """The pages of rank ``tp_rank`` of ``tp_size``, which share the model's ``total_heads`` KV heads out. A page is, in
    each buffer, ``page_tokens`` tokens one after the other, each of the rank's heads, of so many bytes.

    Buffer ``i`` keeps the part ``parts[i]`` (``k``, ``v``, ``latent``, ...) of layer ``layers[i]`` (numbered in the
    whole model), in ``head_bytes[i]`` bytes a token and head. A model whose latent is not cut has one head.

    Raises ConfigError naming the field."""

    layers: tuple[int, ...]
    parts: tuple[str, ...]
    head_bytes: tuple[int, ...]
    page_tokens: int
    tp_rank: int = 0
    tp_size: int = 1
    total_heads: int = 1

    def __post_init__(self) -> None:
        count = len(self.layers)
        if not 1 <= count <= BUFFERS_MAX or not count == len(self.parts) == len(self.head_bytes):
            counts = f"{count} layers, {len(self.parts)} parts and {len(self.head_bytes)} head_bytes"
            raise ConfigError(
                f"layers: one layer, part and size is needed for each of 1 to {BUFFERS_MAX}, not {counts}"
            )
        if not all(0 <= layer < NUMBER_MAX for layer in self.layers):
            raise ConfigError(f"layers: every one must be 0 to {NUMBER_MAX - 1}")
        if not all(0 < len(part) <= NAME_MAX and part.isascii() and part.isidentifier() for part in self.parts):
            raise ConfigError(f"parts: every one must be a name of at most {NAME_MAX} letters")
        if len(set(zip(self.layers, self.parts, strict=True))) != count:
            raise ConfigError("parts: a part of a layer is named twice")
        if not all(0 < size < NUMBER_MAX for size in self.head_bytes):
            raise ConfigError(f"head_bytes: every one must be 1 to {NUMBER_MAX - 1}")
        if not 0 < self.page_tokens < NUMBER_MAX:
            raise ConfigError(f"page_tokens: must be 1 to {NUMBER_MAX - 1}, not {self.page_tokens}")
        if not 0 < self.total_heads < NUMBER_MAX:
            raise ConfigError(f"total_heads: must be 1 to {NUMBER_MAX - 1}, not {self.total_heads}")
        if not 0 < self.tp_size < NUMBER_MAX:
            raise ConfigError(f"tp_size: must be 1 to {NUMBER_MAX - 1}, not {self.tp_size}")
        try:
            tp_heads(self.total_heads, self.tp_size, self.tp_rank)
        except InvalidArgumentError as error:
            raise ConfigError(str(error)) from None

    @functools.cached_property
    def heads(self) -> range:
        """The heads that this rank holds, of all of the model's."""
        return tp_heads(self.total_heads, self.tp_size, self.tp_rank)

    @functools.cached_property
    def holding(self) -> Holding:
        """The same, as the planners take it."""
        return Holding(tuple(sorted(set(self.layers))), self.heads.start, len(self.heads), self.total_heads)

    @functools.cached_property
    def buffer_of(self) -> dict[tuple[int, str], int]:
        """Which buffer keeps a part of a layer."""
        return {key: index for index, key in enumerate(zip(self.layers, self.parts, strict=True))}

    def page_bytes(self, index: int) -> int:
        """Bytes of one page in that buffer."""
        return self.page_tokens * len(self.heads) * self.head_bytes[index]

    def to_json(self) -> str:
        """For a peer's :meth:`from_json`."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> KvShape:
        """Raises ProtocolError for anything that :meth:`to_json` does not make."""
        names = {field.name: field for field in dataclasses.fields(cls)}
        try:
            values: Any = json.loads(text) if len(text) <= SHAPE_BYTES_MAX else None
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or set(values) != set(names):
            raise ProtocolError("a peer's shape must be JSON with exactly the fields of a shape")
        made: dict[str, Any] = {}
        for name, value in values.items():
            kind = str if name == "parts" else int
            is_list = str(names[name].type).startswith("tuple")
            items = value if is_list and isinstance(value, list) else [value]
            if is_list != isinstance(value, list) or not all(type(item) is kind for item in items):
                raise ProtocolError(f"{name} of a peer's shape is of another kind")
            made[name] = tuple(value) if is_list else value
        try:
            return cls(**made)
        except ConfigError as error:
            raise ProtocolError(f"a peer's shape makes no sense: {error}") from None


@dataclasses.dataclass(frozen=True)
class Slice:
    """What two ranks have in common: of these layers (ascending) these parts and heads, ``block_tokens`` tokens in a
    block; ``is_whole``: it is all of either, in the same order, so that their pages are alike."""

    layers: tuple[int, ...]
    heads: range
    block_tokens: int
    is_whole: bool

    def buffers(self, shape: KvShape) -> list[int]:
        """Those of a rank that the slice lies in, in the order that both sides have: by layer, then by part."""
        wanted = set(self.layers)
        return [shape.buffer_of[key] for key in sorted(shape.buffer_of) if key[0] in wanted]


def common(ours: KvShape, theirs: KvShape) -> Slice:
    """What both hold; the same whichever side asks. Raises IncompatibleError naming the field: ``total_heads``,
    ``layers`` or ``heads`` (they have none in common), ``parts`` or ``head_bytes`` (they keep a layer differently)."""
    if ours.total_heads != theirs.total_heads:
        raise _differ("total_heads", ours.total_heads, theirs.total_heads)
    layers = sorted(set(ours.layers) & set(theirs.layers))
    if not layers:
        raise _differ("layers", spans(ours.layers), spans(theirs.layers))
    heads = range(max(ours.heads.start, theirs.heads.start), min(ours.heads.stop, theirs.heads.stop))
    if not heads:
        raise _differ("heads", spans(ours.heads), spans(theirs.heads))
    wanted = set(layers)
    for key in sorted(ours.buffer_of.keys() | theirs.buffer_of.keys()):
        if key[0] in wanted:
            our, their = ours.buffer_of.get(key), theirs.buffer_of.get(key)
            if our is None or their is None:
                raise _differ("parts", _parts_of(ours, key[0]), _parts_of(theirs, key[0]), f" of layer {key[0]}")
            if ours.head_bytes[our] != theirs.head_bytes[their]:
                sizes = ours.head_bytes[our], theirs.head_bytes[their]
                raise _differ("head_bytes", *sizes, f" of {key[1]} of layer {key[0]}")
    is_paged = ours.page_tokens == theirs.page_tokens and ours.heads == theirs.heads
    is_whole = is_paged and (ours.layers, ours.parts) == (theirs.layers, theirs.parts)
    return Slice(tuple(layers), heads, ours.page_tokens if is_paged else 1, is_whole)


def choose(destination: KvShape, sources: Sequence[KvShape]) -> dict[int, Slice]:
    """Of which of ``sources`` the destination takes what, by their place in the list: everything that it holds, once.
    Of replicas rank ``r`` takes the ``r``-th, round and round.

    Raises IncompatibleError naming the field: where no source has some layer or head, and as :func:`common`."""
    holdings = {place: source.holding for place, source in enumerate(sources)}
    chosen: dict[int, Slice] = {}
    for share in choose_sources(destination.holding, holdings, destination_rank=destination.tp_rank):
        slice_ = common(destination, sources[share.source])
        if (share.layers, share.heads) != (slice_.layers, slice_.heads):
            raise IncompatibleError(
                f"layers: source {share.source} would give more than its share: layers {spans(slice_.layers)} of heads "
                f"{spans(slice_.heads)}, and layers {spans(share.layers)} of heads {spans(share.heads)} are its own",
                field="layers",
            )
        chosen[share.source] = slice_
    return chosen


def asking(source: KvShape, destination: KvShape) -> int:
    """How many ranks of the destination's engine SGLang has ask one of the source's, those that read nothing of it
    included. Each size divides the other, or is divided by it (:func:`~.limits.check_sizes`)."""
    return max(1, destination.tp_size // source.tp_size)


def spans(numbers: Iterable[int]) -> str:
    """Them in short: ``0-15+20``."""
    runs = itertools.groupby(enumerate(sorted(set(numbers))), lambda item: item[1] - item[0])
    ends = [[number for _, number in run] for _, run in runs]
    return "+".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)


def axes_of(what: str, layers: Sequence[int], heads: range, total_heads: int, block_tokens: int) -> str:
    """What stands in the record of a pool about the place of its blocks in the model."""
    held = f"layers {_short(spans(layers))}, heads {spans(heads)} of {total_heads}"
    return f"{what}: {held}, {block_tokens} tokens"


def packing_of(what: str, shape: KvShape, buffers: Sequence[int]) -> str:
    """And about the order of the bytes in them: the parts with their sizes, layer by layer."""
    kept = "+".join(f"{shape.layers[index]}.{shape.parts[index]}.{shape.head_bytes[index]}" for index in buffers)
    return f"{what}:{_short(kept)}"


def _short(text: str) -> str:
    if len(text) <= _SAID_MAX:
        return text
    return f"{text[: _SAID_MAX // 2]}...#{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def _parts_of(shape: KvShape, layer: int) -> str:
    return "+".join(sorted(part for held, part in shape.buffer_of if held == layer)) or "nothing"


def _differ(field: str, ours: object, theirs: object, of: str = "") -> IncompatibleError:
    return IncompatibleError(f"{field}{of}: {ours} here, {theirs} there", field=field)
