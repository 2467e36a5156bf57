"""What a decode rank knows of prefill engines: which of their ranks answered, and which room is asked of which
rank. Decides when a prefill rank may be asked, and when what is known of it is out of date; must never import SGLang,
nor know how pages travel.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvxfer.connectors.sglang.core import TransportCore
from kvxfer.connectors.sglang.destination import RoomSource
from kvxfer.connectors.sglang.greetings import Refused, Registered, RoomFailed
from kvxfer.types import TransferId

log = logging.getLogger("kvxfer.sglang")

ANSWER_S = 3.0
"""How soon a prefill rank answers a registration."""

Place = tuple[str, int]


class DecodeEngine(Protocol):
    """What this side uses of SGLang's manager. From any thread."""

    def fail(self, room: int, text: str) -> None: ...

    def forget(self, bootstrap_addr: str) -> None: ...


@dataclasses.dataclass(frozen=True)
class RequestedRoom:
    """A room that was begun."""

    transfer_id: TransferId
    bootstrap_addr: str


def place_of(bootstrap_info: dict[str, Any]) -> Place:
    """Where the prefill rank of one of SGLang's bootstrap infos hears messages."""
    return str(bootstrap_info["rank_ip"]), int(bootstrap_info["rank_port"])


class DecodeSide:
    """Of one rank. From any thread."""

    def __init__(self, engine: DecodeEngine, core: TransportCore) -> None:
        self._engine = engine
        self._core = core
        self._lock = threading.Lock()
        self._known: dict[Place, Registered | Refused] = {}
        self._asked: dict[int, RequestedRoom] = {}
        self._rooms: dict[int, str] = {}

    # --- prefill ranks ---

    def answered(self, greeting: Registered | Refused, place: Place) -> None:
        """A prefill rank answered a registration."""
        if isinstance(greeting, Registered):
            self._core.add_remote_agent(greeting.agent_metadata, greeting.agent_id)
        with self._lock:
            self._known[place] = greeting

    def refusal(self, infos: Iterable[dict[str, Any]]) -> Refused | None:
        """Of the first of those prefill ranks that refused us."""
        with self._lock:
            found = [self._known.get(place_of(info)) for info in infos]
        return next((answer for answer in found if isinstance(answer, Refused)), None)

    def waits_for(self, infos: Iterable[dict[str, Any]]) -> Place | None:
        """The first of those prefill ranks that has not answered."""
        places = [place_of(info) for info in infos]
        with self._lock:
            return next((place for place in places if place not in self._known), None)

    def sources(self, infos: Iterable[dict[str, Any]]) -> list[RoomSource]:
        """The sources with a share of what this rank holds; all of them have answered. The others are marked as SGLang
        marks ranks that nothing is read from; they are told of the room too. Raises as
        :meth:`~.destination.DestinationRooms.choose`."""
        with self._lock:
            known = [(info, self._known.get(place_of(info))) for info in infos if not info.get("is_dummy")]
        asked = [(info, RoomSource(to.agent_id, to.rank, to.shape)) for info, to in known if isinstance(to, Registered)]
        asked.sort(key=lambda one: -int(one[0].get("pp_rank", 0)))  # the last stage has the auxiliary row
        chosen = list(self._core.destinations.choose([source for _, source in asked]))
        for info, source in asked:
            info["is_dummy"] = source not in chosen
        return chosen

    def forget(self, places: Sequence[Place]) -> None:
        """This rank registers at those ranks again before the next room."""
        with self._lock:
            for place in places:
                self._known.pop(place, None)

    # --- rooms ---

    def begin(self, room: int, bootstrap_addr: str) -> TransferId:
        """A new transfer id for that room, which is requested from the prefill engine at ``bootstrap_addr``."""
        asked = RequestedRoom(TransferId(secrets.token_bytes(16)), bootstrap_addr)
        with self._lock:
            self._asked[room] = asked
        return asked.transfer_id

    def transfer_id(self, room: int) -> TransferId:
        """The transfer id of a room that was begun."""
        with self._lock:
            return self._asked[room].transfer_id

    def end(self, room: int) -> None:
        """Callable twice."""
        with self._lock:
            self._asked.pop(room, None)

    def room_failed(self, greeting: RoomFailed) -> None:
        """A prefill rank reports that nothing will be sent for a room."""
        with self._lock:
            asked = self._asked.get(greeting.room)
        if asked is None or asked.transfer_id != greeting.transfer_id:
            return
        self._engine.fail(greeting.room, f"{greeting.code}: {greeting.text}")
        self._core.destinations.abort(greeting.room, greeting.text)
        if greeting.code == "peer_gone":
            self._engine.forget(asked.bootstrap_addr)

    def failed(self, room: int, code: str, text: str) -> None:
        """The transfer of a room failed, and has drained."""
        with self._lock:
            asked = self._asked.get(room)
        self._engine.fail(room, f"{code}: {text}")
        if asked is not None and code == "peer_gone":
            self._engine.forget(asked.bootstrap_addr)
