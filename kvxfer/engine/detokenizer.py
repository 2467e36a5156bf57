"""Tokens to text, one token at a time.

Decides which characters are final now: those that no later token can change. It must never know of stop strings,
requests or streams. The pieces joined are what decoding all tokens at once gives, wherever the tokens spell valid text.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6
"""Tokens before the new ones that are decoded with them: leading spaces depend on what stands before."""
PENDING_TOKENS_MAX = 16
"""Bytes that spell nothing after so many tokens never will; they go out as replacement characters."""


class Detokenizer:
    """Incremental decoder for one answer.

    ``prompt_ids``, the prompt's last tokens at least, are the context that decides the first token's leading space.
    ``lock`` guards a tokenizer that several threads share.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int] = (), *, lock: threading.Lock | None = None) -> None:
        self._tokenizer = tokenizer
        self._lock = lock or threading.Lock()
        self._window = list(prompt_ids[-CONTEXT_TOKENS:]) if prompt_ids else []
        self._settled = len(self._window)
        self._settled_text = self._decode(self._window)
        self._sent = 0

    def push(self, token: int) -> str:
        """Take the next token id; return the characters that became final, often none within a multi-byte character."""
        self._window.append(token)
        fresh = self._fresh()
        stable = fresh.rstrip(REPLACEMENT)
        if len(fresh) - len(stable) > 3:
            # A character has at most 3 bytes before its last one: what stands earlier is not the start of one.
            stable = fresh[:-3]
        piece = stable[self._sent :]
        if len(stable) == len(fresh) or len(self._window) - self._settled > PENDING_TOKENS_MAX:
            piece = fresh[self._sent :]
            self._window = self._window[self._settled :][-CONTEXT_TOKENS:]
            self._settled = len(self._window)
            self._settled_text = self._decode(self._window)
            self._sent = 0
        else:
            self._sent = max(self._sent, len(stable))
        return piece

    def flush(self) -> str:
        """The answer ended: the characters still held back, as they are."""
        rest = self._fresh()[self._sent :]
        self._sent += len(rest)
        return rest

    def _fresh(self) -> str:
        return self._decode(self._window)[len(self._settled_text) :]

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        with self._lock:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
