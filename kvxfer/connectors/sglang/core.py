"""The transport core of one SGLang rank: its agent on a thread of its own, its memory as pools, the rooms it sends and
those it receives. Decides who hears which message; must never know SGLang's classes.
"""

from __future__ import annotations

import dataclasses

from kvxfer.agent import AgentStatistics
from kvxfer.connectors.sglang.destination import DestinationCallbacks, DestinationRooms
from kvxfer.connectors.sglang.memory import EngineMemory
from kvxfer.connectors.sglang.options import Options
from kvxfer.connectors.sglang.source import SourceCallbacks, SourceRooms
from kvxfer.types import CompatibilityRecord, Role


@dataclasses.dataclass(frozen=True)
class CoreStatistics:
    """Counts of this moment, beside the agent's own."""

    agent: AgentStatistics
    sources_open: int
    """Rooms that are sent, and not over."""
    destinations_open: int


class TransportCore:
    """One rank's. Made before SGLang serves, started once, stopped once."""

    sources: SourceRooms
    destinations: DestinationRooms

    def __init__(
        self,
        options: Options,
        memory: EngineMemory,
        record: CompatibilityRecord,
        *,
        agent_id: str,
        rank: int,
        role: Role,
        source_callbacks: SourceCallbacks | None = None,
        destination_callbacks: DestinationCallbacks | None = None,
    ) -> None:
        """``record`` describes the pages; it is compared with the other side's before a byte moves. ``agent_id``: of
        this rank alone, and new for each process is best. Raises ConfigError, InvalidArgument."""
        raise NotImplementedError

    @property
    def agent_id(self) -> str:
        raise NotImplementedError

    def start(self) -> None:
        """Return once peers can reach it. Raises ConfigError, AuthenticationFailed, CoordinatorUnavailable, Refused."""
        raise NotImplementedError

    def stop(self) -> None:
        """End it: peers are told, rooms fail with ``closed``. Waits at most STOP_S. Callable twice, and without a
        start."""
        raise NotImplementedError

    def card(self) -> str:
        """What others :meth:`meet` this life by; empty with a coordinator, through which all are known."""
        raise NotImplementedError

    def meet(self, card: str, agent_id: str) -> None:
        """Know a peer by its card, before anything that is asked of this core later; does nothing with a coordinator.
        From any thread. A card that is not believed is logged, and rooms with that peer fail with ``peer_gone``."""
        raise NotImplementedError

    def describe(self, record: CompatibilityRecord) -> None:
        """The pages are made with other weights from now on, or it is not known with which. From any thread."""
        raise NotImplementedError

    def statistics(self) -> CoreStatistics:
        """From any thread."""
        raise NotImplementedError
