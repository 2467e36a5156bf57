"""A record of committed bytes, layer by layer, to prove that what arrived is what was sent.

It decides what is hashed and how long the record is kept. It must never know how blocks travel or what reads the
record. Off unless an operator turns it on: hashing costs a pass over every block."""

from __future__ import annotations

import collections
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvxfer.types import TransferId

TRANSFERS_MAX = 256
DIGEST_BYTES = 8


class BlockDigests:
    """Digests of the blocks of the last transfers.

    ``storage`` is uint8 [block_count, block_bytes], with one run of bytes a layer in every block.
    """

    def __init__(
        self,
        storage: torch.Tensor,
        layers: int,
        *,
        on_committed: Callable[[TransferId, dict[str, Any]], None] | None = None,
    ) -> None:
        self._storage = storage
        self._layers = layers
        self._on_committed = on_committed
        self._entries: collections.OrderedDict[str, dict[str, Any]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def record(self, transfer_id: TransferId, side: str, blocks: Sequence[int], *, first: int) -> None:
        """Hash ``blocks``, which are grant positions ``first ..`` and must not change meanwhile.

        ``side`` is ``source`` or ``destination``.
        """
        digests = [
            [hashlib.blake2b(layer.numpy().data, digest_size=DIGEST_BYTES).hexdigest() for layer in block]
            for block in (self._storage[index].cpu().reshape(self._layers, -1) for index in blocks)
        ]
        entry = {"side": side, "first": first, "blocks": digests}
        with self._lock:
            self._entries[f"{transfer_id}/{side}"] = entry
            while len(self._entries) > TRANSFERS_MAX:
                self._entries.popitem(last=False)
        if self._on_committed is not None:
            self._on_committed(transfer_id, entry)

    def as_dict(self) -> dict[str, Any]:
        """``{"<transfer id>/<side>": {"side", "first", "blocks": [[digest of each layer] of each block]}}``.

        From any thread.
        """
        with self._lock:
            return dict(self._entries)
