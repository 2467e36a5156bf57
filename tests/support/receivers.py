"""A session's state, as the coordinator's service makes it."""

from __future__ import annotations

from kvxfer.coordinator.gate import Caller
from kvxfer.coordinator.receivers import StreamState
from kvxfer.trust.permissions import Subject


def session_state(agent_id: str) -> StreamState:
    return StreamState(Caller(None, "", "test"), Subject(agent_id))
