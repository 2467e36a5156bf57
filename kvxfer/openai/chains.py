"""The keys of a prompt: hashes of what a request's JSON says, each of all that an engine reads before it.

Decides where a chain has its keys, and what is hashed. It must never know which fields a route has, nor which worker
holds what. Two prompts share exactly the keys of what they begin with in common, so a shared key says that an engine
may have computed that much before.

- A text has a key behind every ``INTERVAL_BYTES`` of its UTF-8, and one at its end. A list of token ids has one behind
  every 512 ids, and one at its end. Of a list of prompts the first one counts.
- A list of messages or items has a key at the end of each, and behind every ``INTERVAL_BYTES`` within one. So the next
  turn of a conversation has all keys of the turn before, and a text that grows keeps those within it.
- A chain ends with its ``KEYS_MAX``-th key, at 8 MiB of text.

Hashed is what a parser reads: decoded strings, names of members in the client's order with every occurrence of a name,
numbers as they are written, and where containers begin and end. Spaces and the spelling of a string do not matter.
``key[i] = SipHash-2-4(secret, key[i - 1], content between them)``, and ``key[-1]`` is the root: `SipHash: a fast
short-input PRF`, Aumasson and Bernstein, 2012. Keys of another secret, or of another root, are other keys. A client
that sees a hit learns that, but it cannot make a prompt whose keys are those of another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvxfer._native import _core as native
from kvxfer.errors import InvalidArgumentError
from kvxfer.policy.prefixes import Chain

INTERVAL_BYTES = native.CHAIN_BYTES
ID_BYTES = native.CHAIN_ID_BYTES
"""What a token id counts in the sizes of a chain."""
KEYS_MAX = native.CHAIN_KEYS_MAX
SECRET_BYTES = 16


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """Random bytes that the caller draws (``os.urandom(16)``); processes that share keys share them. Raises
    InvalidArgumentError for another length."""

    value: bytes

    def __post_init__(self) -> None:
        if len(self.value) != SECRET_BYTES:
            raise InvalidArgumentError(f"a secret has {SECRET_BYTES} bytes, not {len(self.value)}")

    def __repr__(self) -> str:
        return "Secret()"


class ChainHasher:
    """Finds the keys of bodies that were scanned with ``fields``. Prepared once; may be used by several threads.

    ``root``: fields whose values the root is made of. ``heads``: fields that an engine reads before the prompt. Raises
    InvalidArgumentError for a name that is none of ``fields``.
    """

    __slots__ = ("_native",)

    def __init__(
        self, secret: Secret, fields: native.JsonFields, *, root: Sequence[str] = (), heads: Sequence[str] = ()
    ) -> None:
        self._native = native.ChainHasher(secret.value, fields, root, heads)

    def root(self, scan: native.JsonScan, texts: Sequence[bytes] = ()) -> int:
        """One key of ``texts``, in their order, and of the root's fields, every occurrence of each that is not null.

        Raises InvalidArgumentError where the body was scanned with other fields.
        """
        return self._native.root(scan, texts)

    def chain(self, scan: native.JsonScan, root: int, name: str, *, is_list_of_prompts: bool = False) -> Chain:
        """The chain of the heads and of the prompt in field ``name``; fields that are absent or null have no part. Keys
        have 64 bits; sizes are bytes of decoded strings, names of members and numbers, and ``ID_BYTES`` a token id.

        ``is_list_of_prompts``: a list holds token ids, or prompts; otherwise it holds messages or items. Above 16 KiB
        of body the GIL is free meanwhile, but the calling thread waits. Raises InvalidArgumentError where the body was
        scanned with other fields.
        """
        keys, sizes = self._native.chain(scan, root, name, is_list_of_prompts)
        return Chain(memoryview(keys).cast("Q").tolist(), memoryview(sizes).cast("Q").tolist())
