"""The coordinator's membership as a source of workers. Decides nothing of its own."""

from __future__ import annotations

import contextlib

from kvxfer.errors import CoordinatorUnavailableError
from kvxfer.router.fleet.workers import Workers
from kvxfer.rpc import MembershipWatch
from kvxfer.trust.files import FollowedFiles
from kvxfer.types import Membership


class CoordinatorSource:
    """An async context manager. A coordinator that is lost leaves the last membership, and is come back to for ever."""

    def __init__(self, target: str, token: bytes, workers: Workers, *, tls: FollowedFiles | None = None) -> None:
        """``target`` is ``host:port``. With ``tls`` the certificate takes the place of ``token``."""
        self._workers = workers
        self._watch = MembershipWatch(
            target, token, on_membership=self._on_membership, on_state=self._on_state, tls=tls
        )

    def _on_membership(self, membership: Membership) -> None:
        self._workers.update(membership, self._watch.leg_secret)

    def _on_state(self, is_connected: bool) -> None:
        self._workers.is_connected = is_connected

    async def wait_first(self, timeout_s: float) -> None:
        """Wait for a first membership, at most so long.

        Raises AuthenticationError or ForbiddenError where the coordinator does not take the token or the certificate,
        and ProtocolError.
        """
        with contextlib.suppress(CoordinatorUnavailableError):
            await self._watch.wait_connected(timeout_s)

    async def __aenter__(self) -> CoordinatorSource:
        self._watch.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._watch.close()

    def __repr__(self) -> str:
        return f"CoordinatorSource({self._watch!r})"
