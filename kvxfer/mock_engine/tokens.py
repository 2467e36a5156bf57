"""Tokens without a tokenizer: three bytes of UTF-8 are a token, and the answer is a function of the prompt's tokens.

Decides token ids, keys of full blocks and the words of an answer, so that a prompt as text and the same prompt as token
ids have one answer and one prefix. It must never know requests or time.

A token id has the number of its bytes above the bytes themselves, so that every text can be told from its ids. Any
other number below 2**31 is a token id too: it has no text, and stands for itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

TOKEN_BYTES = 3
ID_BYTES = 4
ID_MAX = (1 << 31) - 1
_LENGTH_SHIFT = 8 * TOKEN_BYTES
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORD_COUNT = 673
"""A prime: every step length goes through all words before one returns."""
WORDS = tuple(f" {first}{second}" for first in _LETTERS for second in _LETTERS)[:_WORD_COUNT]
WORD_BYTES = tuple(word.encode() for word in WORDS)


def _id_of(part: bytes) -> int:
    return len(part) << _LENGTH_SHIFT | int.from_bytes(part, "big")


WORD_IDS = tuple(map(_id_of, WORD_BYTES))


def ids_of_text(text: str) -> bytes:
    """The token ids of ``text``, packed as little-endian numbers of four bytes."""
    raw = text.encode("utf-8", "surrogatepass")
    whole = len(raw) // TOKEN_BYTES
    parts = np.frombuffer(raw, np.uint8, whole * TOKEN_BYTES).reshape(whole, TOKEN_BYTES)
    ids = np.empty((whole, ID_BYTES), np.uint8)
    ids[:, 0], ids[:, 1], ids[:, 2] = parts[:, 2], parts[:, 1], parts[:, 0]
    ids[:, 3] = TOKEN_BYTES
    packed = ids.tobytes()
    rest = raw[whole * TOKEN_BYTES :]
    return packed + _id_of(rest).to_bytes(ID_BYTES, "little") if rest else packed


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids packed. Raises ValueError for a number that is no token id."""
    try:
        packed = np.array(ids)
    except ValueError:  # lists of unequal length
        raise ValueError("token ids must be numbers") from None
    if not packed.size:
        return b""
    if packed.ndim != 1 or packed.dtype.kind not in "iu" or not (packed.min() >= 0 and packed.max() <= ID_MAX):
        raise ValueError(f"token ids must be whole numbers from 0 to {ID_MAX}")
    return packed.astype("<u4").tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    return np.frombuffer(packed, "<u4").tolist()  # type: ignore[no-any-return]


def text_of_ids(ids: Sequence[int]) -> str:
    """The text that these token ids stand for. An id without text is shown as its number."""
    parts = []
    for token in ids:
        length = token >> _LENGTH_SHIFT
        is_text = 0 < length <= TOKEN_BYTES and not (token & ((1 << _LENGTH_SHIFT) - 1)) >> (8 * length)
        value = token & ((1 << _LENGTH_SHIFT) - 1)
        parts.append(value.to_bytes(length, "big") if is_text else f"<{token}>".encode())
    return b"".join(parts).decode("utf-8", "replace")


class PromptTokens:
    """A prompt as packed token ids."""

    __slots__ = ("count", "packed", "seed")

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        self.count = len(packed) // ID_BYTES
        self.seed = xxhash.xxh3_64_intdigest(packed)


class AnswerWords:
    """The words of the answer to one prompt; ``index`` tells the answers to one prompt apart."""

    __slots__ = ("start", "stride")

    def __init__(self, seed: int, index: int = 0) -> None:
        self.start = (seed + 97 * index) % _WORD_COUNT
        self.stride = 1 + (seed // _WORD_COUNT) % (_WORD_COUNT - 1)

    def position(self, number: int) -> int:
        """Where the word ``number`` of the answer stands in WORDS."""
        return (self.start + number * self.stride) % _WORD_COUNT

    def text(self, count: int) -> str:
        return "".join([WORDS[self.position(number)] for number in range(count)])

    def ids(self, count: int) -> list[int]:
        return [WORD_IDS[self.position(number)] for number in range(count)]


def block_keys(packed: bytes, block_tokens: int, salt: str = "") -> list[int]:
    """A key for each full block: it stands for the block's tokens, all before them, and ``salt``."""
    size = block_tokens * ID_BYTES
    digest = xxhash.xxh3_64_intdigest
    key = digest(salt.encode()) if salt else 0
    keys = []
    for start in range(0, len(packed) - size + 1, size):
        key = digest(packed[start : start + size], key)
        keys.append(key)
    return keys
