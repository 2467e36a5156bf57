"""Clients that leave at any moment, in every dialect: both engines are free afterwards, and serve as before."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import socket

import pytest

from tests.support.mock_engine.mocks import Engine, mocks

REQUESTS = 120
LEASE_S = 0.5


def leave(engine: Engine, body: dict[str, object], after_s: float) -> None:
    """Send a request, and read its answer for ``after_s`` at most."""
    with contextlib.suppress(TimeoutError, ConnectionError), engine.connect() as connection:
        connection.sendall(engine.raw("/v1/completions", body, headers="connection: close\r\n"))
        connection.settimeout(after_s)
        while connection.recv(1 << 16):
            pass
        connection.shutdown(socket.SHUT_RDWR)


def one_request(number: int, prefill: Engine, decode: Engine) -> None:
    chance = random.Random(number)
    prompt = f"{number % 7} " + "shared words " * chance.randrange(1, 60)
    body: dict[str, object] = {"prompt": prompt, "max_tokens": chance.randrange(1, 60), "stream": chance.random() < 0.7}
    waits = [chance.choice([0.001, 0.01, 0.03, 2.0]) for _ in range(2)]
    kind = number % 4
    if kind == 0:
        leave(decode, body, waits[0])
        return
    if kind == 1:
        own = {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        with contextlib.suppress(OSError):
            params = prefill.post("/v1/completions", {**body, **own}).json()["kv_transfer_params"]
            leave(decode, {**body, "kv_transfer_params": params}, waits[1])
        return
    if kind == 2:
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.port, "bootstrap_room": number + 1}
        legs = [(prefill, {**body, **room}), (decode, {**body, **room})]
    else:
        address = f"127.0.0.1:{prefill.port}"
        own = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "transfer_id": str(number)}}
        remote = {"do_remote_prefill": True, "transfer_id": str(number), "remote_bootstrap_addr": address}
        legs = [(prefill, {**body, **own}), (decode, {**body, "kv_transfer_params": remote})]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for (engine, leg), wait_s in zip(legs, waits, strict=True):
            pool.submit(leave, engine, leg, wait_s)


@pytest.mark.parametrize("pace", ["fixed", "steps"])
def test_engines_are_free_after_clients_left_at_any_moment(pace: str) -> None:
    timing = ("--itl-ms", "1", "--step-ms", "0.5", "--blocks", "120", "--transfer-ms", "2", "--pace", pace)
    waits = ("--kv-lease-s", str(LEASE_S), "--kv-wait-s", "1", "--kv-load-failure-policy", "recompute")
    with mocks("--count", "2", "--roles", "prefill,decode", *timing, *waits) as started:
        prefill, decode = started.engines
        expected = decode.complete("the same before and after").text
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            for done in [pool.submit(one_request, number, prefill, decode) for number in range(REQUESTS)]:
                done.result()
        for engine in (prefill, decode):
            now = engine.wait(
                lambda now: now["blocks_used"] == now["open_requests"] == now["holds"] == now["running"] == 0,
                timeout_s=LEASE_S + 3,
            )
            assert (now["waiting"], now["clients_left"] > 0) == (0, True)
        assert decode.complete("the same before and after").text == expected
