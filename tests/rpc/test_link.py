"""Failed calls become errors of our tree, and waits grow within their bound."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest

from kvxfer import errors
from kvxfer.rpc.link import ReconnectBackoff, both_ways, credentials, error_from_exception, error_from_status


@pytest.mark.parametrize("status", grpc.StatusCode)
def test_every_status_has_an_error(status: grpc.StatusCode) -> None:
    error = error_from_status("host:1", status, "why" * 2000, None)
    assert isinstance(error, errors.KvxferError)
    assert "host:1" in str(error)
    assert len(str(error)) < 1200


def test_the_stable_code_wins_over_the_status() -> None:
    error = error_from_status("h:1", grpc.StatusCode.UNKNOWN, "x", "incompatible")
    assert isinstance(error, errors.IncompatibleError)
    assert isinstance(error_from_status("h:1", grpc.StatusCode.UNKNOWN, "x", None), errors.CoordinatorUnavailableError)
    assert "unknown error code 'new'" in str(error_from_status("h:1", grpc.StatusCode.UNKNOWN, "x", "new"))


@pytest.mark.parametrize(
    ("details", "kind", "words"),
    [
        ("x: Hostname Verification Check failed.", errors.AuthenticationError, "no coordinator of this cluster"),
        ("Peer name c is not in peer certificate", errors.AuthenticationError, "no coordinator of this cluster"),
        ("OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: x", errors.AuthenticationError, "no coordinator of this cluster"),
        ("OPENSSL_internal:WRONG_VERSION_NUMBER: x", errors.AuthenticationError, "no coordinator of this cluster"),
        ("Socket closed", errors.CoordinatorUnavailableError, "without a certificate that it believes"),
        ("Connection refused", errors.CoordinatorUnavailableError, "unavailable: Connection refused"),
    ],
)
def test_a_handshake_that_failed_says_why(details: str, kind: type[errors.KvxferError], words: str) -> None:
    error = error_from_status("h:1", grpc.StatusCode.UNAVAILABLE, details, None)
    assert type(error) is kind
    assert words in str(error)


def test_a_refused_certificate_is_no_wrong_token() -> None:
    error = error_from_status(
        "h:1", grpc.StatusCode.UNAUTHENTICATED, "the certificate of x is revoked", "unauthenticated"
    )
    assert isinstance(error, errors.AuthenticationError)
    assert "token" not in str(error)
    error = error_from_status("h:1", grpc.StatusCode.PERMISSION_DENIED, "x may not watch", "forbidden")
    assert type(error) is errors.ForbiddenError


def test_any_exception_has_an_error() -> None:
    named = errors.RefusedError("no")
    assert error_from_exception("h:1", named) is named
    assert "did not answer in time" in str(error_from_exception("h:1", TimeoutError()))
    assert "ZeroDivisionError" in str(error_from_exception("h:1", ZeroDivisionError()))


def test_waits_double_jittered_up_to_their_bound_and_start_again() -> None:
    backoff = ReconnectBackoff(random.Random(1), first_s=0.1, max_s=1.0)
    for whole_s in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert whole_s / 2 <= backoff.next_s() <= whole_s
    backoff.reset()
    assert backoff.next_s() <= 0.1


def test_all_who_wait_spread_over_the_time_that_they_were_told() -> None:
    backoff = ReconnectBackoff(random.Random(1), first_s=0.1, max_s=1.0)
    backoff.spread(10.0)
    waits = [backoff.next_s() for _ in range(200)]
    assert min(waits) < 1.0 < 9.0 < max(waits) <= 10.0
    backoff.spread(0.05)
    backoff.reset()
    assert 0.05 <= backoff.next_s() <= 0.1, "as without"
    assert 0.1 <= backoff.next_s() <= 0.2


@pytest.mark.parametrize("token", [b"with space", b"\n", b"\xff"])
def test_a_token_no_header_can_carry_is_refused(token: bytes) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        credentials(token)


async def test_the_receiver_names_the_reason_even_if_the_sender_fails_first() -> None:
    async def send() -> None:
        raise asyncio.InvalidStateError("RPC already finished")

    async def receive() -> None:
        await asyncio.sleep(0.05)
        raise errors.RefusedError("the reason")

    with pytest.raises(errors.RefusedError, match="the reason"):
        await both_ways(send(), receive())


async def test_a_failed_sender_counts_if_the_receiver_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.rpc.link.RECEIVER_SAYS_S", 0.05)
    was_cancelled = asyncio.Event()

    async def send() -> None:
        raise ZeroDivisionError

    async def receive() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    with pytest.raises(ZeroDivisionError):
        await both_ways(send(), receive())
    assert was_cancelled.is_set()
