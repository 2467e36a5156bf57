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
        """The tokens that are decoded together: first the context, then the pending tokens."""
        self._context_count = len(self._window)
        """How many tokens of the window are context: all of their text went out."""
        self._context_text = self._decode(self._window)
        self._sent_chars = 0
        """How many characters of the pending tokens' text went out."""

    def push(self, token: int) -> str:
        """Take the next token id; return the characters that became final, often none within a multi-byte character.

        Text that ends in replacement characters is not final: a later token may complete the character. Once it is, or
        once it has stayed incomplete for too long, the pending tokens become context.
        """
        self._window.append(token)
        pending = self._pending_text()
        final = pending.rstrip(REPLACEMENT)
        if len(pending) - len(final) > 3:
            # An incomplete character has at most 3 bytes: replacement characters before the last 3 are final.
            final = pending[:-3]
        piece = final[self._sent_chars :]
        if len(final) == len(pending) or len(self._window) - self._context_count > PENDING_TOKENS_MAX:
            piece = pending[self._sent_chars :]
            self._window = self._window[self._context_count :][-CONTEXT_TOKENS:]
            self._context_count = len(self._window)
            self._context_text = self._decode(self._window)
            self._sent_chars = 0
        else:
            self._sent_chars = max(self._sent_chars, len(final))
        return piece

    def flush(self) -> str:
        """The answer ended: the characters still held back, as they are."""
        rest = self._pending_text()[self._sent_chars :]
        self._sent_chars += len(rest)
        return rest

    def _pending_text(self) -> str:
        """The text of the pending tokens."""
        return self._decode(self._window)[len(self._context_text) :]

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        with self._lock:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
