"""What a caller of the control routes sees: all, or only what its API key may use.

Decides which models and workers there are for a key that is for some models, and what it is told of a worker. It must
never know a request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

TOLD = ("role", "max_context_tokens", "is_ready", "state")
"""Of a worker, beside its models: no name, which may be an address, and no load, which is also that of other keys."""


@dataclasses.dataclass(frozen=True)
class View:
    """``models`` are those that the caller's key is for; None: all."""

    models: frozenset[str] | None = None

    def shows(self, model: str) -> bool:
        """Whether the caller may know of a model."""
        return self.models is None or model in self.models

    def workers(self, described: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of ``described`` (``Workers.describe``) that serve a model that is shown."""
        if self.models is None:
            return list(described)
        return [told for told in map(self._told, described) if told is not None]

    def _told(self, worker: dict[str, Any]) -> dict[str, Any] | None:
        names = [name for name in (worker["model"], *worker["aliases"]) if self.shows(name)]
        if not names:
            return None
        return {"model": names[0], "aliases": names[1:], **{name: worker[name] for name in TOLD}}
