"""What the scheduler of a vLLM engine knows of its workers' weights. A worker in the scheduler's process is asked
directly; the others report. Decides which of these counts; must never read a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvxfer.connectors.common.weights import PENDING, Weights
from kvxfer.connectors.vllm.loaded import LOADED, Loaded

_IN_PROCESS: dict[str, Weights] = {}
"""The weights of the workers in this process, by agent."""


def share(agent_id: str, weights: Weights) -> None:
    """Let the scheduler in this process find its worker's weights."""
    _IN_PROCESS[agent_id] = weights


def unshare(agent_id: str, weights: Weights) -> None:
    """Undo :func:`share`. Callable twice."""
    if _IN_PROCESS.get(agent_id) is weights:
        del _IN_PROCESS[agent_id]


class EngineWeights:
    """What an engine's scheduler knows of its workers' weights. Of a worker in this process it knows the present state,
    of another the last report."""

    def __init__(self, agents: Iterable[str], loaded: Loaded = LOADED) -> None:
        self._told: dict[str, str | None] = dict.fromkeys(agents, PENDING)
        self._loaded = loaded
        self._changed: str | None = None
        self._unlisten: Callable[[], None] = lambda: None

    def listen(self) -> None:
        """Learn of changes that a call in this process makes to the workers' weights."""
        self._unlisten = self._loaded.listen(self._on_changed)

    def stop(self) -> None:
        """Callable twice."""
        self._unlisten()

    def tell(self, agent_id: str, why: str | None) -> None:
        """The worker with that agent reports why it does not know its weights, or ``None``: it knows them."""
        if agent_id in self._told:
            self._told[agent_id] = why

    def why_unknown(self) -> str | None:
        """Why it is not known which weights this engine has; ``None``: all of its workers know."""
        if self._changed is not None:
            return self._changed
        for agent_id, told in self._told.items():
            own = _IN_PROCESS.get(agent_id)
            why = told if own is None else own.why
            if why is not None:
                return why
        return None

    def _on_changed(self, why: str) -> None:
        self._changed = self._changed or why
