"""What the two halves of a vLLM engine know of its weights. Decides which worker's report counts, and where an engine
of one process finds it; must never read a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvxfer.connectors.common.weights import PENDING, Weights
from kvxfer.connectors.vllm.loaded import LOADED, Loaded

_HERE: dict[str, Weights] = {}


def share(agent_id: str, weights: Weights) -> None:
    """Let an engine's scheduler find its worker's, where both are one process."""
    _HERE[agent_id] = weights


def unshare(agent_id: str, weights: Weights) -> None:
    """Callable twice."""
    if _HERE.get(agent_id) is weights:
        del _HERE[agent_id]


class EngineWeights:
    """What an engine's scheduler knows of its workers' weights: of those in this process at once, of others what they
    said last."""

    def __init__(self, agents: Iterable[str], loaded: Loaded = LOADED) -> None:
        self._told: dict[str, str | None] = dict.fromkeys(agents, PENDING)
        self._loaded = loaded
        self._changed: str | None = None
        self._unlisten: Callable[[], None] = lambda: None

    def listen(self) -> None:
        """Hear of changes that this process makes to weights of others."""
        self._unlisten = self._loaded.listen(self._on_changed)

    def stop(self) -> None:
        """Callable twice."""
        self._unlisten()

    def tell(self, agent_id: str, why: str | None) -> None:
        """What the worker with that agent says: why it does not know, or ``None``."""
        if agent_id in self._told:
            self._told[agent_id] = why

    def why_unknown(self) -> str | None:
        """Why it is not known which weights this engine has; ``None``: all of its workers know."""
        if self._changed is not None:
            return self._changed
        for agent_id, told in self._told.items():
            here = _HERE.get(agent_id)
            why = told if here is None else here.why
            if why is not None:
                return why
        return None

    def _on_changed(self, why: str) -> None:
        self._changed = self._changed or why
