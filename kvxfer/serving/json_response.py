"""JSON answers of control routes, in ASCII.

Decides the bytes only. A value may come from a client or an engine, where an escape without its partner stands for half
a character: it has no bytes of its own in UTF-8, and starlette's answer would fail for it.
"""

from __future__ import annotations

from typing import Any

from starlette import responses

from kvxfer.openai.sse import encode_object


class JSONResponse(responses.JSONResponse):
    """As starlette's, whose name and arguments it keeps."""

    def render(self, content: Any) -> bytes:
        return encode_object(content)
