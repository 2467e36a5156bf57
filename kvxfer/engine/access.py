"""Which callers may use a worker's HTTP port: what its options, its agent and its files say, put together.

Decides which of certificate and key a worker asks for. It must never know what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from kvxfer.engine.options import WorkerOptions
from kvxfer.errors import ConfigError
from kvxfer.serving.cluster_tls import ClusterTls
from kvxfer.serving.leg_access import LegAccess
from kvxfer.serving.leg_keys import LegKeyFile, followed_leg_keys
from kvxfer.serving.tls import ServerTls, TlsFiles
from kvxfer.trust.permissions import SERVES
from kvxfer.trust.revoked import RevokedList

if TYPE_CHECKING:
    from kvxfer.agent import Agent

_log = logging.getLogger(__name__)

REVOKED_LOOK_S = 1.0


class WorkerAccess:
    """Of one worker. Raises ConfigError for files that are wrong, or of another holder than this worker."""

    def __init__(self, options: WorkerOptions, agent_id: str) -> None:
        self._options = options
        self.agent: Agent | None = None
        """Whose coordinator hands out keys."""
        self._revoked = RevokedList(options.revoked_file)
        self._file = LegKeyFile()
        self.tls: ServerTls | None = None
        self._cluster = ""
        self._are_keys_known = asyncio.Event()
        if not (options.coordinator and options.leg_keys):
            self._are_keys_known.set()
        files = TlsFiles(options.tls_cert_file, options.tls_key_file, options.tls_client_ca_file)
        if files.client_ca_file:
            self.tls = tls = ClusterTls(files)
            self._cluster = tls.identity.cluster
            if options.role not in SERVES.get(tls.identity.role, ()) or not tls.identity.speaks_for(agent_id):
                raise ConfigError(
                    f"tls_cert_file: {files.cert_file} is of {tls.identity}, and not of agent {agent_id} for the part "
                    f"{options.role}"
                )
        elif files.cert_file:
            self.tls = ServerTls(files)

    def guarded(self, app: ASGIApp, on_refused: Callable[[str], None]) -> ASGIApp:
        """``app`` for the callers that may use it."""
        return LegAccess(
            app,
            cluster=self._cluster,
            revoked=self._revoked,
            keys=self._keys,
            are_known=self._are_keys_known,
            on_refused=on_refused,
        )

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Within the block all files are read again when they change. Raises ConfigError for a wrong file of keys."""
        async with contextlib.AsyncExitStack() as stack:
            self._file = await stack.enter_async_context(followed_leg_keys(self._options.leg_key_file))
            if self.tls is not None:
                await stack.enter_async_context(self.tls.watched)
            looking = asyncio.create_task(self._look_at_revoked(), name="kvxfer revoked certificates")
            try:
                yield
            finally:
                looking.cancel()
                await asyncio.wait([looking])

    def on_change(self, renew: Callable[[], None]) -> None:
        """Have ``renew`` called when open connections are not to be kept."""
        if isinstance(self.tls, ClusterTls):
            self.tls.on_change = renew

    def registered(self) -> None:
        """The coordinator, if there is one, has handed out its keys: it is said where there are none."""
        self._are_keys_known.set()
        if self.agent is not None and self._options.leg_keys and not self._cluster and not self._keys():
            _log.warning(
                "the coordinator hands out no leg keys: this worker takes requests of everybody that reaches it"
            )

    def _keys(self) -> tuple[bytes, ...]:
        given = self.agent.leg_keys if self.agent is not None and self._options.leg_keys else ()
        return (*self._file.keys, *(key.hex().encode() for key in given))

    async def _look_at_revoked(self) -> None:
        while self._options.revoked_file:
            await asyncio.sleep(REVOKED_LOOK_S)
            self._revoked.look()
