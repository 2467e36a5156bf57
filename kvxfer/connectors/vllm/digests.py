"""Digests of the pages of the last transfers, for tests that must prove that what arrived is what was sent. Off unless
asked for: hashing costs a pass over every page. Decides what is hashed and how long it is kept.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import itertools
import threading
from collections.abc import Sequence

from kvxfer.connectors.vllm.pages import Pages
from kvxfer.types import TransferId

PROMPTS_MAX = 256


class Digests:
    """Of one rank, of memory of the host. From any thread."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._memory = [
            memoryview((ctypes.c_ubyte * store.region.length_bytes).from_address(store.region.address))
            for store in pages.stores
        ]
        self._entries: collections.OrderedDict[str, list[list[str]]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def record(self, transfer_id: TransferId, side: str, first: int, blocks: Sequence[int]) -> None:
        """Hash ``blocks``, which begin at block ``first`` of the prompt: one list a layer, one digest for each block of
        the layer's group."""
        size = self._pages.page_bytes
        rows = []
        for memory, store in zip(self._memory, self._pages.stores, strict=True):
            flat = [
                hashlib.blake2b(memory[page * size : (page + 1) * size], digest_size=8).hexdigest()
                for page in store.ids(blocks).tolist()
            ]
            rows += [flat[begin:end] for begin, end in itertools.pairwise((0, *store.ends(blocks)))]
        with self._lock:
            self._entries[f"{transfer_id}/{side}/{first}"] = rows
            while len(self._entries) > PROMPTS_MAX:
                self._entries.popitem(last=False)

    def as_dict(self) -> dict[str, list[list[str]]]:
        """``{"<transfer id>/<source or destination>/<first block>": [[digest of each block] of each layer]}``."""
        with self._lock:
            return dict(self._entries)
