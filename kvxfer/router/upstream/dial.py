"""One TCP connection to the address of an engine, by its name or its number.

Decides which of the addresses that a name stands for are tried: none at which no engine can be, whatever the name's
server says (``protocol.http_url.no_engine_at``). The name is resolved once, and the connection goes to an address that
was judged. It must never know a request.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

from kvxfer.protocol.http_url import address_of, no_engine_at

ProtocolT = TypeVar("ProtocolT", bound=asyncio.BaseProtocol)


async def dial(
    make: Callable[[], ProtocolT], host: str, port: int, tls: ssl.SSLContext | None
) -> tuple[asyncio.BaseTransport, ProtocolT]:
    """Connect. Raises OSError, also where ``host`` is a name that stands for nothing but refused addresses. A ``host``
    that is an address was judged where it was read, and is not judged again."""
    loop = asyncio.get_running_loop()
    if address_of(host) is not None:
        return await loop.create_connection(make, host, port, ssl=tls)
    found = await resolve(host, port)
    refused = {text: kind for text in found if (kind := no_engine_at(ipaddress.ip_address(text)))}
    if len(refused) == len(found):
        told = ", ".join(f"{text} ({kind})" for text, kind in refused.items())
        raise OSError(errno.EACCES, f"{host} stands for addresses at which no engine is: {told or 'none at all'}")
    last: OSError | None = None
    for text in (one for one in found if one not in refused):
        try:
            return await loop.create_connection(make, text, port, ssl=tls, server_hostname=host if tls else None)
        except ssl.SSLError:
            raise  # it was reached
        except OSError as error:
            last = error
    assert last is not None
    raise last


async def resolve(host: str, port: int) -> list[str]:
    """The addresses that a name stands for now, each once, in the order in which they are to be tried."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in infos))
