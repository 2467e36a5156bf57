"""What the workers' own ``/v1/models`` say of one model, for the router's.

Decides which members of an engine's entry are kept, and what several workers say together: the smallest context, and of
everything else what none contradicts. Everything comes from a peer, and is bounded. It must never know how a page was
fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kvxfer.router.fleet.entry import WorkerEntry
from kvxfer.router.fleet.facts import CONTEXT, EngineIdentity


def listed_of(model: str, entries: Iterable[WorkerEntry]) -> dict[str, Any]:
    """What those who serve a model say of it, without what the router says itself (``id``, ``object``, ``created``,
    ``owned_by``)."""
    found: dict[str, Any] = {}
    denied: set[str] = set()
    contexts: list[int] = []
    for entry in entries:
        info = entry.worker.member.info
        if model != info.model and model not in entry.worker.aliases:
            continue
        said = members_said(entry.identity, model)
        context = said.pop(CONTEXT, None)
        contexts += [count for count in (context, info.max_context_tokens) if type(count) is int and count > 0]
        denied |= {name for name, value in said.items() if name in found and found[name] != value}
        found |= said
    found = {name: value for name, value in found.items() if name not in denied}
    return found | ({CONTEXT: min(contexts)} if contexts else {})


def members_said(identity: EngineIdentity | None, model: str) -> dict[str, Any]:
    """The members of one engine's entry of a model."""
    texts = () if identity is None else identity.listed
    found = next((text for name, text in texts if name == model), "{}")
    values = json.loads(found)
    assert isinstance(values, dict)
    return values
