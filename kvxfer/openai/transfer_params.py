"""``kv_transfer_params``: the one object the router adds to both legs, in the ``kvxfer`` dialect.

Written here once, so that the router that builds it and the worker that parses it cannot drift apart; it decides
nothing about a transfer.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from kvxfer.errors import InvalidArgumentError
from kvxfer.openai.errors import RequestError
from kvxfer.types import TransferId, check_agent_id

PARAM = "kv_transfer_params"
ATTEMPT_MAX = 1 << 16
TIMEOUT_MAX_S = 86400.0
BODY_BYTES_MAX = 64 << 20
"""Longest body of a client, where nothing else is said: several photographs in base64."""
LEG_BYTES_MAX = 4096
"""Most bytes that the router adds to a client's body for a leg (the prefill or the decode half of a request), in any
dialect and with the longest addresses. A worker's bound lies above the router's by as much, so a worker never refuses a
body that the router accepted."""


class Part(enum.StrEnum):
    """Which half of the request a leg asks for."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclasses.dataclass(frozen=True)
class TransferEnd:
    """One end of a transfer: the agent, how many ranks it has, its HTTP base URL, and where its pipeline stages end
    (as ``WorkerInfo.stages``)."""

    agent_id: str
    ranks: int = 1
    address: str = ""
    stages: str = ""

    def to_json(self) -> dict[str, Any]:
        """The object as it stands in the request body."""
        values = dict(vars(self))
        if not self.stages:
            del values["stages"]
        return values


@dataclasses.dataclass(frozen=True)
class TransferParams:
    """Which agent sends the prompt's KV cache to which, under which transfer id."""

    transfer_id: TransferId
    attempt: int
    role: Part
    source: TransferEnd
    destination: TransferEnd
    first_token: str = "decode"
    timeout_s: float | None = None
    """How long the decode leg waits for the grant; ``None``: as long as its worker's option says."""

    def to_json(self) -> dict[str, Any]:
        """The object as it stands in the request body."""
        timeout = {} if self.timeout_s is None else {"timeout_s": self.timeout_s}
        return {
            **timeout,
            "transfer_id": str(self.transfer_id),
            "attempt": self.attempt,
            "role": self.role.value,
            "source": self.source.to_json(),
            "destination": self.destination.to_json(),
            "first_token": self.first_token,
        }


def parse_transfer_params(values: dict[str, Any]) -> TransferParams:
    """Parse what :meth:`TransferParams.to_json` wrote; raise RequestError that names the field.

    Extra fields are ignored.
    """
    try:
        transfer_id = TransferId.from_hex(values.get("transfer_id", ""))
    except InvalidArgumentError as error:
        raise RequestError(str(error), param=f"{PARAM}.transfer_id") from None
    attempt = values.get("attempt", 1)
    if type(attempt) is not int or not 1 <= attempt <= ATTEMPT_MAX:
        raise RequestError(f"attempt must be 1 to {ATTEMPT_MAX}", param=f"{PARAM}.attempt")
    role = values.get("role")
    if role not in tuple(Part):
        raise RequestError("role must be 'prefill' or 'decode'", param=f"{PARAM}.role")
    first_token = values.get("first_token", "decode")
    if first_token != "decode":
        raise RequestError("first_token must be 'decode'", param=f"{PARAM}.first_token")
    source, destination = _parse_end(values, "source"), _parse_end(values, "destination")
    timeout_s = values.get("timeout_s")
    if timeout_s is not None and (type(timeout_s) not in (int, float) or not 0 < timeout_s <= TIMEOUT_MAX_S):
        raise RequestError(
            f"timeout_s must be a number of seconds above 0 and at most {TIMEOUT_MAX_S:g}", param=f"{PARAM}.timeout_s"
        )
    return TransferParams(transfer_id, attempt, Part(role), source, destination, first_token, timeout_s)


def _parse_end(values: dict[str, Any], name: str) -> TransferEnd:
    end = values.get(name)
    if not isinstance(end, dict):
        raise RequestError(f"{name} must be an object", param=f"{PARAM}.{name}")
    try:
        agent_id = check_agent_id(end.get("agent_id", ""))
    except InvalidArgumentError as error:
        raise RequestError(str(error), param=f"{PARAM}.{name}.agent_id") from None
    ranks, address = end.get("ranks", 1), end.get("address", "")
    if type(ranks) is not int or ranks != 1:
        raise RequestError("ranks must be 1", param=f"{PARAM}.{name}.ranks")
    if not isinstance(address, str):
        raise RequestError("address must be a string", param=f"{PARAM}.{name}.address")
    return TransferEnd(agent_id, ranks, address)
