"""Runs one handler of an exchange to its end, and sees that its client gets an end, too.

Decides what a client gets where the handler fails. It must never know how the answer travels.
"""

from __future__ import annotations

import asyncio
import logging

from kvxfer.errors import ClosedError, KvxferError
from kvxfer.openai.errors import error_body
from kvxfer.openai.sse import encode_object
from kvxfer.serving.answers import CLOSE, JSON
from kvxfer.serving.exchange import ClientExchange, ClientGoneError, ExchangeHandler

log = logging.getLogger("kvxfer.serving")

FAILED = 500
STOPPING = 503


async def run_handler(handler: ExchangeHandler, exchange: ClientExchange) -> None:
    """Raises nothing but the CancelledError of its own task."""
    try:
        await handler(exchange)
        if not exchange.is_ended and not exchange.is_gone:
            raise KvxferError("the handler returned before its answer was whole")
    except asyncio.CancelledError:
        _end(exchange, STOPPING, ClosedError("this server is stopping"))
        raise
    except ClientGoneError:
        exchange.abort()
    except Exception as error:
        log.error("%s %s was not answered", exchange.method, exchange.path, exc_info=error)
        _end(exchange, FAILED, error)


def _end(exchange: ClientExchange, status: int, error: Exception) -> None:
    """An answer with ``error`` where none has begun, else a cut connection. Where the answer is whole, this does
    nothing."""
    if exchange.is_started:
        exchange.abort()
    else:
        exchange.respond(status, [JSON, CLOSE], encode_object(error_body(error)))
