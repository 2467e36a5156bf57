"""The prompt of a planned request: token ids of exactly the planned length, or made-up text.

Decides which tokens stand where: a block of a hash id has always the same ids, so prompts share exactly what their hash
ids say, and a request without hash ids shares nothing. Ids are uniform from ``token_low`` on and below ``token_high``.
Another seed or salt changes every block. Knows nothing of bodies.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidArgumentError
from kvxfer.workload.request import WorkloadRequest
from kvxfer.workload.seeds import key_of, stream_of_block
from kvxfer.workload.words import WORDS

TokenIds = npt.NDArray[np.uint32]
TOKEN_LIMIT = 1 << 31
CACHE_TOKENS = 1 << 22
"""Of blocks with hash ids: so many tokens are kept, the least recently used go first."""
DIGITS_TABLE_MAX = 1 << 17
"""Up to so many different ids their digits are looked up in a table."""


class PromptMaker:
    """Makes the prompts of a workload. The same arguments make the same prompts, in any process and in any order.

    Raises InvalidArgumentError where the token ids are out of range.
    """

    def __init__(
        self, *, seed: int = 0, salt: str = "", token_low: int = 100, token_high: int = 1000, hash_tokens: int = 512
    ) -> None:
        if not 0 <= token_low < token_high <= TOKEN_LIMIT:
            raise InvalidArgumentError(
                f"token_low must be 0 or more and below token_high, which is at most {TOKEN_LIMIT}, "
                f"not {token_low} and {token_high}"
            )
        if hash_tokens < 1:
            raise InvalidArgumentError(f"hash_tokens must be 1 or more, not {hash_tokens}")
        self.salt = salt
        self.token_low, self.token_high, self.hash_tokens = token_low, token_high, hash_tokens
        self._block_key = key_of(seed, salt, "block")
        self._alone_key = key_of(seed, salt, "request")
        self._blocks: OrderedDict[int, tuple[TokenIds, bytes]] = OrderedDict()
        self._blocks_max = max(1, CACHE_TOKENS // hash_tokens)
        self._digits = len(str(token_high - 1))
        self._table: npt.NDArray[np.bytes_] | None = None
        if token_high - token_low <= DIGITS_TABLE_MAX:
            every = np.arange(token_low, token_high, dtype=np.uint32)
            self._table = np.ascontiguousarray(self._written(every)).view(f"S{self._digits + 1}").ravel()

    def tokens(self, request: WorkloadRequest) -> TokenIds:
        """Its ``prompt_tokens`` token ids. Raises InvalidArgumentError where its hash ids do not fit its length."""
        if not request.hash_ids:
            return self._drawn(self._alone_key, request.number, request.prompt_tokens)
        parts = [block for block, _ in self._blocks_of(request)]
        return np.concatenate(parts)[: request.prompt_tokens]

    def json(self, request: WorkloadRequest) -> bytes:
        """The same ids as a JSON list. Short ids have spaces before them, which JSON allows: all are then equally wide,
        and the list is made by one look-up for each block."""
        if not request.hash_ids:
            written = self._json_of(self._drawn(self._alone_key, request.number, request.prompt_tokens))
        else:
            written = b"".join([written for _, written in self._blocks_of(request)])
        return b"[%b]" % written[: request.prompt_tokens * (self._digits + 1) - 1]

    def text(self, request: WorkloadRequest) -> str:
        """Its own text where it has one, after the salt and a line's end where there is a salt; otherwise one word for
        each token id: about as many tokens, and the same shared beginnings."""
        if request.text is not None:
            return f"{self.salt}\n{request.text}" if self.salt else request.text
        return " ".join([WORDS[token % len(WORDS)] for token in self.tokens(request).tolist()])

    def _blocks_of(self, request: WorkloadRequest) -> list[tuple[TokenIds, bytes]]:
        needed = -(-request.prompt_tokens // self.hash_tokens)
        if len(request.hash_ids) != needed:
            raise InvalidArgumentError(
                f"request {request.number}: {request.prompt_tokens} tokens in blocks of {self.hash_tokens} need "
                f"{needed} hash ids, not {len(request.hash_ids)}"
            )
        return [self._block(number) for number in request.hash_ids]

    def _block(self, number: int) -> tuple[TokenIds, bytes]:
        found = self._blocks.get(number)
        if found is not None:
            self._blocks.move_to_end(number)
            return found
        ids = self._drawn(self._block_key, number, self.hash_tokens)
        made = self._blocks[number] = (ids, self._json_of(ids))
        if len(self._blocks) > self._blocks_max:
            self._blocks.popitem(last=False)
        return made

    def _drawn(self, key: bytes, number: int, count: int) -> TokenIds:
        return stream_of_block(key, number).integers(self.token_low, self.token_high, count, dtype=np.uint32)

    def _json_of(self, ids: TokenIds) -> bytes:
        if self._table is not None:
            return self._table.take(ids - self.token_low).tobytes()
        return self._written(ids).tobytes()

    def _written(self, ids: TokenIds) -> npt.NDArray[np.uint8]:
        """A row for each id: its digits, right aligned, and a comma."""
        rows = np.full((len(ids), self._digits + 1), ord(" "), dtype=np.uint8)
        rows[:, -1] = ord(",")
        left = ids.astype(np.uint64)
        for place in range(self._digits - 1, -1, -1):
            is_there = (left > 0) | (place == self._digits - 1)
            rows[is_there, place] = (left[is_there] % 10 + ord("0")).astype(np.uint8)
            left //= 10
        return rows
