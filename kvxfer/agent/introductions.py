"""Agents that meet without a coordinator: one dials the other's address, both prove that they hold the cluster token,
and tell each other who they are. Decides how long that may take and how many may try at once; what is proved is
:mod:`kvxfer.protocol.introduction`'s.

An address may come from anybody: it is an IP address and a port, what is sent there before the other has proved itself
is a nonce, and whoever proves itself is met only under the name, and in the life, that was looked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import secrets
import weakref
from collections.abc import Callable

from kvxfer.agent.peers import Peers
from kvxfer.config import AgentConfig
from kvxfer.errors import ConfigError, InvalidArgument, KvxferError, PeerGone, ProtocolViolation
from kvxfer.protocol.handshake import session_key, session_root
from kvxfer.protocol.introduction import CARD_BYTES_MAX, MAGIC, NONCE_BYTES, PROOF_BYTES, Exchange, Step
from kvxfer.types import Incarnation, Member

log = logging.getLogger("kvxfer.agent")

GUESTS_MAX = 64
"""Strangers that are listened to at once."""
GUEST_S = 2.0
"""How long one may take."""


class Introductions:
    """Of one agent, on its loop."""

    def __init__(self, token: bytes, own: Callable[[], Member], peers: Peers) -> None:
        """``own()``: what others shall know of this agent. ``peers`` gets those that proved themselves."""
        self._token = token
        self._root = session_root(token)
        self._own = own
        self._peers = peers
        self._dialing: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._server: asyncio.Server | None = None
        self._guests: set[asyncio.Task[None]] = set()
        self.address = ""
        """Where others find this agent, ``host:port``; empty before :meth:`start`."""

    async def start(self, config: AgentConfig, host: str) -> None:
        """Listen; others dial ``host``. Raises ConfigError."""
        port = config.introduction_port
        try:
            self._server = await asyncio.start_server(self._welcome, config.bind_host, port, limit=CARD_BYTES_MAX)
        except OSError as error:
            raise ConfigError(f"cannot listen on {config.bind_host} port {port}: {error.strerror}") from None
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()
        for guest in self._guests:
            guest.cancel()
        await asyncio.gather(*self._guests, return_exceptions=True)

    async def seek(self, address: str, agent_id: str, incarnation: Incarnation | None, timeout_s: float) -> Member:
        """Meet the agent of that name, and in that life where one is given, at ``address``, unless it is known. Of
        several that seek at one address at once, one dials.

        Raises InvalidArgument for no address, PeerGone (nobody there, no answer in time, another name or life),
        AuthenticationFailed, ProtocolViolation, Refused.
        """
        known = self._known(agent_id, incarnation)
        if known is not None:
            return known
        host, port = split_address(address)
        try:
            async with asyncio.timeout(timeout_s), self._dialing.setdefault(address, asyncio.Lock()):
                known = self._known(agent_id, incarnation)
                if known is not None:
                    return known
                reader, writer = await asyncio.open_connection(host, port, limit=CARD_BYTES_MAX)
                try:
                    member = await self._dial(reader, writer)
                finally:
                    writer.close()
                self._admit(member, address, agent_id, incarnation)
        except TimeoutError:
            raise PeerGone(f"agent {agent_id!r} at {address} did not answer within {timeout_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise PeerGone(f"agent {agent_id!r} is not to be had at {address}: {error}") from None
        return member

    def _admit(self, member: Member, address: str, agent_id: str, incarnation: Incarnation | None) -> None:
        if member.ref.agent_id != agent_id:
            raise PeerGone(f"agent {agent_id!r} is not at {address}, {member.ref} is")
        if incarnation not in (None, member.ref.incarnation):
            raise PeerGone(f"agent {agent_id!r} was restarted: it is {member.ref} now, and no longer #{incarnation}")
        self._peers.introduce(member)

    def _known(self, agent_id: str, incarnation: Incarnation | None) -> Member | None:
        known = self._peers.find(agent_id)
        return known if known is not None and incarnation in (None, known.ref.incarnation) else None

    # --- both sides of an exchange ---

    async def _dial(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Member:
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(MAGIC + nonce)
        exchange = Exchange(self._token, nonce, await reader.readexactly(NONCE_BYTES))
        exchange.check(await reader.readexactly(PROOF_BYTES), Step.HOST)
        ours = self._card()
        writer.write(exchange.proof(Step.GUEST, ours) + _framed(ours))
        proof = await reader.readexactly(PROOF_BYTES)
        theirs = await _card_from(reader)
        exchange.check(proof, Step.MET, ours, theirs)
        return self._member(theirs)

    async def _host(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await reader.readexactly(len(MAGIC) + NONCE_BYTES)
        if not hello.startswith(MAGIC):
            raise ProtocolViolation("this is no introduction")
        nonce = secrets.token_bytes(NONCE_BYTES)
        exchange = Exchange(self._token, hello[len(MAGIC) :], nonce)
        writer.write(nonce + exchange.proof(Step.HOST))
        proof = await reader.readexactly(PROOF_BYTES)
        theirs = await _card_from(reader)
        exchange.check(proof, Step.GUEST, theirs)
        self._peers.introduce(self._member(theirs))
        ours = self._card()
        writer.write(exchange.proof(Step.MET, theirs, ours) + _framed(ours))
        await writer.drain()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            if len(self._guests) >= GUESTS_MAX:
                return
            guest = asyncio.current_task()
            assert guest is not None
            self._guests.add(guest)
            try:
                async with asyncio.timeout(GUEST_S):
                    await self._host(reader, writer)
            except (KvxferError, OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                log.warning("somebody was not met: %s", error or type(error).__name__)
            except asyncio.CancelledError:
                log.debug("somebody was not met: the agent closes")  # a server's task must not end by it
            finally:
                self._guests.discard(guest)

    # --- cards ---

    def _card(self) -> bytes:
        from kvxfer.rpc.convert import write_member

        return write_member(self._own(), b"").SerializeToString()

    def _member(self, card: bytes) -> Member:
        """Raises ProtocolViolation."""
        from google.protobuf.message import DecodeError

        from kvxfer._pb import control_pb2
        from kvxfer.rpc.convert import read_member

        try:
            message = control_pb2.Member.FromString(card)
        except DecodeError:
            raise ProtocolViolation("another agent's card cannot be read") from None
        member = read_member(message)
        key = session_key(self._root, self._own().ref, member.ref)
        return dataclasses.replace(member, session_key=key)


def split_address(address: str) -> tuple[str, int]:
    """IP address and port of ``host:port``; a name is none. Raises InvalidArgument."""
    host, _, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise InvalidArgument(f"{address!r} is not an IP address and a port") from None
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidArgument(f"{address!r} is not an IP address and a port")
    return host, int(port)


def _framed(card: bytes) -> bytes:
    return len(card).to_bytes(4, "big") + card


async def _card_from(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > CARD_BYTES_MAX:
        raise ProtocolViolation(f"a card has at most {CARD_BYTES_MAX} bytes, not {length}")
    return await reader.readexactly(length)
