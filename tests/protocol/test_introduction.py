"""What a proof of an introduction covers."""

from __future__ import annotations

import itertools

import pytest

from kvxfer.errors import AuthenticationFailed, InvalidArgument
from kvxfer.protocol.introduction import NONCE_BYTES, PROOF_BYTES, Exchange, Step

A, B = bytes(NONCE_BYTES), b"\x01" * NONCE_BYTES


def test_a_proof_fits_one_exchange_one_step_and_what_was_said() -> None:
    exchanges = [Exchange(token, *nonces) for token in (b"t", b"u") for nonces in ((A, B), (B, A), (A, A))]
    said = [(), (b"",), (b"", b""), (b"ab",), (b"a", b"b"), (b"", b"ab")]
    proofs = {
        exchange.proof(step, *cards): (exchange, step, cards)
        for exchange, step, cards in itertools.product(exchanges, Step, said)
    }
    assert len(proofs) == len(exchanges) * len(Step) * len(said)
    for proof, (exchange, step, cards) in proofs.items():
        assert len(proof) == PROOF_BYTES
        exchange.check(proof, step, *cards)
        with pytest.raises(AuthenticationFailed):
            exchange.check(proof, step, *cards, b"more")
        with pytest.raises(AuthenticationFailed):
            exchange.check(proof[:-1], step, *cards)


@pytest.mark.parametrize(("token", "nonces"), [(b"", (A, B)), (b"t", (A[1:], B)), (b"t", (A, B + b"x"))])
def test_nothing_is_proved_with_less(token: bytes, nonces: tuple[bytes, bytes]) -> None:
    with pytest.raises(InvalidArgument):
        Exchange(token, *nonces)
