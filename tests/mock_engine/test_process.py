"""The command: its flags, its ports, its end, and its KV events."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvxfer.errors import ConfigError
from kvxfer.mock_engine.options import EngineRole, MockEngineOptions, PaceKind
from tests.support.child import environment
from tests.support.mock_engine.mocks import Mocks, free_ports, mocks


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_process_within_a_second_whatever_runs(number: signal.Signals) -> None:
    started = Mocks("--count", "3", "--itl-ms", "50")
    with started.engines[0].connect() as connection:
        engine = started.engines[0]
        connection.sendall(engine.raw("/v1/completions", {"prompt": "x", "max_tokens": 9999, "stream": True}))
        connection.recv(1)
        before_s = time.monotonic()
        code, said = started.stop(number)
    assert (code, "Traceback" in said) == (0, False)
    assert time.monotonic() - before_s < 1


def test_ports_and_roles_are_those_of_the_flags() -> None:
    ports = free_ports(3)
    with mocks("--ports", f"{ports[0]}-{ports[1]},{ports[2]}", "--roles", "prefill,decode") as started:
        shown = [(engine.port, engine.shown["role"]) for engine in started.engines]
        assert shown == [(ports[0], "prefill"), (ports[1], "decode"), (ports[2], "decode")]
        assert len({engine.shown["engine_id"] for engine in started.engines}) == 3
        assert [engine.request("GET", "/health").status for engine in started.engines] == [200] * 3
        taken = Mocks.__new__(Mocks)
        with pytest.raises(AssertionError, match="in use"):
            taken.__init__("--ports", str(ports[0]))  # type: ignore[misc]


def test_admin_routes_are_for_this_machine_and_name_their_ports() -> None:
    with mocks("--count", "2") as started:
        first, second = started.engines
        assert first.request("GET", "/mock/statistics?port=1").status == 404
        assert len(first.request("GET", "/mock/statistics?port=all").json()) == 2
        assert first.request("GET", f"/mock/statistics?port={second.port}").json()[0]["port"] == second.port
        assert first.post("/mock/nothing", {}).status == 404


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ports": "x"}, "ports must be like"),
        ({"ports": "9-8"}, "rising"),
        ({"ports": "8000,8000"}, "twice"),
        ({"host": "0.0.0.0"}, "not loopback"),
        ({"itl_ms": -1.0}, "itl_ms"),
        ({"speed": 0.0}, "speed"),
        ({"blocks": 0}, "blocks"),
        ({"step_ms": -1.0}, "step_ms"),
        ({"prefill_context_token_ns": -1.0}, "prefill_context_token_ns must be 0 or more"),
        ({"decode_sequence_us": float("nan")}, "decode_sequence_us"),
        ({"roles": ()}, "roles"),
        ({"model": ("",)}, "model"),
        ({"kv_events_port": 5557}, "need --pace steps"),
        ({"kv_events_replay_port": 5557, "pace": PaceKind.STEPS}, "needs kv_events_port"),
        ({"bootstrap_port": 65536}, "bootstrap_port"),
        (
            {"ports": "8100", "roles": (EngineRole.PREFILL, EngineRole.DECODE)},
            "roles names 2 roles, and there are 1 engines",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_option_is_a_config_error(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MockEngineOptions(**changes)


def test_last_role_counts_for_all_engines_that_follow() -> None:
    options = MockEngineOptions(ports="8100-8103", roles=(EngineRole.PREFILL, EngineRole.DECODE))
    assert options.port_list == [8100, 8101, 8102, 8103]
    assert [options.role_of(index) for index in range(4)] == ["prefill", "decode", "decode", "decode"]


def test_wrong_flag_is_one_sentence_and_exit_code_2() -> None:
    command = [sys.executable, "-m", "kvxfer.cli", "mock-engine", "--itl-ms", "-1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=20)
    assert (done.returncode, done.stderr) == (2, "kvxfer: itl_ms must be 0 or more, not -1.0\n")


@pytest.fixture(params=["array", "map"])
def publishing(request: pytest.FixtureRequest) -> Iterator[tuple[Mocks, str, Any]]:
    """An engine with six blocks that publishes, and a subscriber that has all events from the beginning."""
    events, replay = free_ports(2)
    flags = ("--pace", "steps", "--step-ms", "0.1", "--blocks", "6", "--kv-events-topic", "kv")
    ports = ("--kv-events-port", str(events), "--kv-events-replay-port", str(replay))
    with mocks(*flags, *ports, "--kv-events-format", request.param) as started, zmq.Context() as context:
        subscriber = context.socket(zmq.SUB)
        subscriber.connect(started.engines[0].shown["kv_events"])
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
        subscriber.setsockopt(zmq.RCVTIMEO, 5000)
        requester = context.socket(zmq.DEALER)
        requester.connect(started.engines[0].shown["kv_events_replay"])
        requester.setsockopt(zmq.RCVTIMEO, 5000)
        time.sleep(0.2)  # a subscription has no answer: vLLM's subscribers ask for a replay of what they missed
        yield started, request.param, (subscriber, requester)
        subscriber.close(linger=0)
        requester.close(linger=0)


def test_kv_events_are_vllms(publishing: tuple[Mocks, str, Any]) -> None:
    started, form, (subscriber, requester) = publishing
    engine = started.engines[0]
    ids = list(range(1000, 1032))
    assert engine.complete(ids, 2).status == 200

    def read(payload: bytes) -> list[Any]:
        batch = msgspec.msgpack.decode(payload)
        if form == "map":
            assert set(batch) == {"ts", "events", "data_parallel_rank"}
            return [list(event.values()) for event in batch["events"]]
        assert len(batch) == 3
        return list(batch[1])

    topic, number, payload = subscriber.recv_multipart()
    assert (topic, number) == (b"kv", (0).to_bytes(8, "big"))
    [[name, hashes, parent, tokens, size, lora_id, medium, lora_name]] = read(payload)
    assert (name, len(hashes), parent, tokens, size) == ("BlockStored", 2, None, ids, 16)
    assert (lora_id, medium, lora_name) == (None, "GPU", None)
    assert engine.complete(list(range(2000, 2090)), 1).status == 200
    seen = read(subscriber.recv_multipart()[2])
    assert {event[0] for event in seen} == {"BlockStored", "BlockRemoved"}
    assert {key for event in seen if event[0] == "BlockRemoved" for key in event[1]} == set(hashes)
    engine.post("/reset_prefix_cache", {})
    while (last := subscriber.recv_multipart()) and read(last[2])[-1][0] != "AllBlocksCleared":
        pass
    requester.send_multipart((b"", (0).to_bytes(8, "big")))
    replayed = []
    while (frames := requester.recv_multipart())[1] != (-1).to_bytes(8, "big", signed=True):
        replayed.append(frames[1:])
    assert replayed[0] == [number, payload]
    assert replayed[-1] == last[1:]
    assert [int.from_bytes(one[0], "big") for one in replayed] == list(range(len(replayed)))
