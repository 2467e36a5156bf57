"""How an agent gets its name: from the coordinator, which gives its incarnation a number, or by itself where there is
no coordinator. Decides nothing; must never know of pools' contents or transfers.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvxfer.config import AgentConfig
from kvxfer.types import AgentRef, DataAddress, Incarnation, Load, Membership, PoolRecord, WorkerInfo

if TYPE_CHECKING:
    from kvxfer.rpc import CoordinatorSession


def alone(agent_id: str) -> AgentRef:
    """An incarnation that no coordinator numbered: its number is when it began, in milliseconds since 1970."""
    return AgentRef(agent_id, Incarnation(time.time_ns() // 1_000_000, secrets.token_bytes(16)))


def cluster_token(token: bytes | None) -> bytes:
    """``token``, or the one at the default place. Raises ConfigError."""
    from kvxfer.rpc import default_token_path, load_token

    return token if token is not None else load_token(default_token_path())


def open_session(
    coordinator: str,
    token: bytes | None,
    info: WorkerInfo,
    address: DataAddress,
    pools: Iterable[PoolRecord],
    load: Load,
    *,
    on_membership: Callable[[Membership], None],
    on_state: Callable[[bool], None],
    config: AgentConfig,
) -> CoordinatorSession:
    """A session for a new incarnation, not started yet. It shows the certificate that ``config`` names; else ``token``
    or, without it, the one at the default place. Raises ConfigError."""
    from kvxfer.rpc import CoordinatorSession, coordinator_tls

    tls = coordinator_tls(config.coordinator_ca_file, config.coordinator_cert_file, config.coordinator_key_file)
    session = CoordinatorSession(
        coordinator,
        cluster_token(token) if tls is None else b"",
        secrets.token_bytes(16),
        info,
        address,
        list(pools),
        on_membership=on_membership,
        on_state=on_state,
        tls=tls,
    )
    session.set_load(load)
    return session
