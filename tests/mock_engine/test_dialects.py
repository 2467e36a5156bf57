"""Prefill and decode in every dialect: which engine computes the prompt, and what becomes of the blocks."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.openai.transfer_params import Part
from kvxfer.types import TransferId
from tests.support.mock_engine.legs import LEG_P, kvxfer_params, sglang_body, together
from tests.support.mock_engine.mocks import Engine, Mocks, free_ports, mocks

PROMPT = "The KV cache of this prompt is computed once. " * 20
BODY = {"prompt": PROMPT, "max_tokens": 8}


@pytest.fixture(scope="module", params=["one process", "two processes", "steps"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """(prefill, decode): KV goes from one to the other within a process, or over HTTP."""
    timing = ("--itl-ms", "0", "--kv-lease-s", "5", "--kv-wait-s", "2")
    if request.param == "two processes":
        with mocks("--roles", "prefill", *timing) as one, mocks("--roles", "decode", *timing) as other:
            yield one.engines[0], other.engines[0]
    else:
        steps = ("--pace", "steps", "--speed", "100") if request.param == "steps" else ()
        with mocks("--count", "2", "--roles", "prefill,decode", *timing, *steps) as both:
            yield both.engines[0], both.engines[1]


class Before:
    """What two engines had counted when a test began."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = prefill, decode
        self._p, self._d = prefill.statistics(), decode.statistics()

    def assert_computed_once(self, tokens: int) -> None:
        """P computed the prompt, D one token of it, and all blocks are free."""
        p = self.prefill.wait(lambda now: now["holds"] == now["blocks_used"] == 0)
        d = self.decode.wait(lambda now: now["blocks_used"] == 0)
        grown_p = {name: p[name] - self._p[name] for name in p if type(p[name]) is int}
        grown_d = {name: d[name] - self._d[name] for name in d if type(d[name]) is int}
        assert (grown_p["prompt_tokens_computed"], grown_d["prompt_tokens_computed"]) == (tokens, 1)
        assert grown_d["prompt_tokens_loaded"] == tokens - 1
        assert (grown_p["blocks_released"], grown_p["blocks_expired"]) == (-(-tokens // 16), 0)


@pytest.fixture
def pair(engines: tuple[Engine, Engine]) -> Before:
    for engine in engines:
        assert engine.post("/reset_prefix_cache", {}).status == 200
    return Before(*engines)


def test_vllm_nixl_two_legs(pair: Before) -> None:
    prefill, decode = pair.prefill, pair.decode
    first = prefill.post("/v1/completions", {**BODY, **LEG_P}).json()
    params = first["kv_transfer_params"]
    assert (params["do_remote_prefill"], params["remote_port"]) == (True, prefill.port)
    assert prefill.statistics()["holds"] == 1
    answer = decode.post("/v1/completions", {**BODY, "kv_transfer_params": params, "stream": True})
    pair.assert_computed_once(first["usage"]["prompt_tokens"])
    assert answer.text == decode.complete(PROMPT).text


def test_vllm_mooncake_both_legs_at_once(pair: Before) -> None:
    prefill, decode = pair.prefill, pair.decode
    ranks = prefill.request("GET", "/query").json()
    engine_id = ranks["0"]["engine_id"]
    assert set(ranks) == {"0"}
    own = {"transfer_id": "t-1", "do_remote_decode": True, "do_remote_prefill": False}
    other = {
        "transfer_id": "t-1",
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": engine_id,
        "remote_bootstrap_addr": f"http://127.0.0.1:{prefill.port}",
    }
    p, d = together(
        lambda: prefill.post("/v1/completions", {**BODY, "max_tokens": 1, "kv_transfer_params": own}),
        lambda: decode.post("/v1/completions", {**BODY, "kv_transfer_params": other}),
    )
    assert (p.status, d.status, len(d.text)) == (200, 200, 24)
    pair.assert_computed_once(p.json()["usage"]["prompt_tokens"])


@pytest.mark.parametrize("vllm", [False, True], ids=["kvxfer", "vllm"])
def test_kvxfer_both_legs_at_once(pair: Before, vllm: bool) -> None:
    prefill, decode = pair.prefill, pair.decode
    number = 0xAB if vllm else 0xCD
    identity = TransferId.from_hex(f"{number:032x}")

    def body(part: Part) -> dict[str, Any]:
        return {**BODY, "kv_transfer_params": kvxfer_params(part, number, prefill, decode, vllm=vllm)}

    p, d = together(
        lambda: prefill.post("/v1/completions", body(Part.PREFILL)),
        lambda: decode.post("/v1/completions", {**body(Part.DECODE), "stream": True}),
    )
    assert (p.status, d.status, len(d.text)) == (200, 200, 24)
    report = d.events[-2]["kvxfer"]
    assert (report["transfer_id"], report["prefill"], report["failure"]) == (str(identity), "remote", None)
    if not vllm:
        assert p.json()["object"] == "kvxfer.prefill"
    pair.assert_computed_once(p.json()["usage"]["prompt_tokens"])


def leg_of(part: Part, number: int, prefill: Engine, decode: Engine) -> dict[str, Any]:
    return {**BODY, "kv_transfer_params": kvxfer_params(part, number, prefill, decode)}


def test_kvxfer_legs_say_how_long_each_part_took() -> None:
    """One prefill at a time, of 100 ms: the last of three waited for two others.

    The three do not arrive at one instant, and what arrives later waits less: half a step is allowed for that.
    """
    steps = ("--pace=steps", "--step-ms=100", "--prefill-token-us=0", "--max-num-seqs=1", "--no-prefix-caching")
    with mocks("--count=2", "--roles=prefill,decode", *steps, "--transfer-ms=20", "--kind=kvxfer") as both:
        prefill, decode = both.engines
        answers = together(
            *(
                lambda at=at: prefill.post("/v1/completions", leg_of(Part.PREFILL, at, prefill, decode))
                for at in (1, 2, 3)
            ),
            lambda: decode.post("/v1/completions", leg_of(Part.DECODE, 1, prefill, decode)),
        )
    assert [answer.status for answer in answers] == [200] * 4
    timings = sorted((answer.json()["timings"] for answer in answers[:3]), key=lambda told: float(told["queue_s"]))
    for number, told in enumerate(timings):
        assert told["queue_s"] >= (number - 0.5) * 0.1
        assert told["prefill_s"] >= 0.099
    report = answers[3].json()["kvxfer"]
    seconds = report["seconds"]
    assert seconds["queue"] >= 0.05
    assert seconds["wire"] >= 0.019
    assert report["ttft_s"] >= seconds["queue"] + seconds["wire"] + 0.099
    assert report["total_s"] >= report["ttft_s"] + 7 * 0.099
    assert report["queue_s"] >= seconds["queue"] + seconds["wire"] - 1e-6  # each is rounded


def test_a_fixed_pace_has_no_queue() -> None:
    with mocks("--count=2", "--roles=prefill,decode", "--ttft-ms=20", "--kind=kvxfer") as both:
        prefill, decode = both.engines
        p, d = together(
            lambda: prefill.post("/v1/completions", leg_of(Part.PREFILL, 1, prefill, decode)),
            lambda: decode.post("/v1/completions", leg_of(Part.DECODE, 1, prefill, decode)),
        )
    assert p.json()["timings"]["queue_s"] < p.json()["timings"]["prefill_s"]
    assert p.json()["timings"]["prefill_s"] >= 0.019
    assert d.json()["kvxfer"]["ttft_s"] >= 0.019


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_sglang_both_legs_at_once(pair: Before, path: str) -> None:
    prefill, decode = pair.prefill, pair.decode
    room = 4711 + len(path)
    sampling = {"text": PROMPT, "sampling_params": {"max_new_tokens": 8}}
    body = sglang_body(prefill, room, **(sampling if path == "/generate" else BODY))
    p, d = together(lambda: prefill.post(path, body), lambda: decode.post(path, body))
    assert (p.status, d.status) == (200, 200)
    text = d.json()["text"] if path == "/generate" else d.text
    assert len(text) == 24
    usage = p.json()["meta_info"] if path == "/generate" else p.json()["usage"]
    pair.assert_computed_once(usage["prompt_tokens"])


def test_sglang_batch_has_a_room_for_each_sequence(pair: Before) -> None:
    prefill, decode = pair.prefill, pair.decode
    body = sglang_body(prefill, [11, 12], prompt=[PROMPT, PROMPT[::-1]], max_tokens=8, stream=True)
    p, d = together(lambda: prefill.post("/v1/completions", body), lambda: decode.post("/v1/completions", body))
    assert (p.status, d.status) == (200, 200)
    assert {event["choices"][0]["index"] for event in d.events[:-1]} == {0, 1}
    assert prefill.wait(lambda now: now["blocks_used"] == 0)["holds"] == 0


def test_sglang_prefill_without_its_decode_ends_after_the_bootstrap_wait(pair_process: Mocks) -> None:
    prefill, decode = pair_process.engines
    before_s = time.monotonic()
    answer = prefill.post("/v1/completions", sglang_body(prefill, 5, **BODY))
    assert (answer.status, 1.5 < time.monotonic() - before_s < 6) == (504, True)
    assert decode.post("/v1/completions", sglang_body(prefill, 5, **BODY)).status >= 500


def test_sglang_bootstrap_port_of_its_own() -> None:
    [port, _] = free_ports(2)
    flags = ("--count", "2", "--roles", "prefill,decode", "--kind", "sglang", "--itl-ms", "0")
    with mocks(*flags, "--bootstrap-port", str(port)) as started:
        prefill, decode = started.engines
        assert started.ready["engines"][0]["bootstrap_port"] == port
        body = {**sglang_body(prefill, 9, **BODY), "bootstrap_port": port}
        p, d = together(lambda: prefill.post("/v1/completions", body), lambda: decode.post("/v1/completions", body))
        assert (p.status, d.status) == (200, 200)
        assert prefill.request("GET", "/server_info").json()["disaggregation_mode"] == "prefill"
        assert decode.complete("no room").status == 400
        assert decode.request("GET", "/version").status == 404


def test_each_sglang_engine_says_its_own_bootstrap_port() -> None:
    flags = ("--count", "2", "--roles", "prefill,prefill", "--kind", "sglang")
    for bootstrap in (0, free_ports(2)[0]):
        with mocks(*flags, "--bootstrap-port", str(bootstrap)) as started:
            said = [one.request("GET", "/server_info").json() for one in started.engines]
            served = [bootstrap + index if bootstrap else one.port for index, one in enumerate(started.engines)]
            assert [one["disaggregation_bootstrap_port"] for one in said] == served


def test_blocks_that_are_not_fetched_expire_and_are_counted(pair_process: Mocks) -> None:
    prefill, decode = pair_process.engines
    params = prefill.post("/v1/completions", {**BODY, **LEG_P}).json()["kv_transfer_params"]
    expired = prefill.statistics()["blocks_expired"]
    now = prefill.wait(lambda now: now["holds"] == 0)
    assert now["blocks_expired"] - expired == len(params["remote_block_ids"][0])
    answer = decode.post("/v1/completions", {**BODY, "kv_transfer_params": params})
    assert (answer.status, b"lease" in answer.body) == (500, True)
    assert decode.statistics()["load_failures"] >= 1


@pytest.mark.parametrize("field", ["remote_block_ids", "remote_engine_id", "remote_request_id"])
def test_parameters_that_were_changed_get_no_blocks(pair_process: Mocks, field: str) -> None:
    prefill, decode = pair_process.engines
    params = prefill.post("/v1/completions", {**BODY, **LEG_P}).json()["kv_transfer_params"]
    changed = {**params, field: [[1]] if field == "remote_block_ids" else "another"}
    assert decode.post("/v1/completions", {**BODY, "kv_transfer_params": changed}).status >= 500
    assert decode.post("/v1/completions", {**BODY, "kv_transfer_params": params}).status == 200


def test_parameters_of_an_engine_that_was_replaced_get_no_blocks(pair_process: Mocks) -> None:
    decode = pair_process.engines[1]
    port = str(free_ports(1)[0])
    with mocks("--ports", port, "--roles", "prefill", "--itl-ms", "0") as started:
        params = started.engines[0].post("/v1/completions", {**BODY, **LEG_P}).json()["kv_transfer_params"]
    with mocks("--ports", port, "--roles", "prefill", "--itl-ms", "0"):
        answer = decode.post("/v1/completions", {**BODY, "kv_transfer_params": params})
    assert (answer.status, b"no longer here" in answer.body) == (500, True)
    answer = decode.post("/v1/completions", {**BODY, "kv_transfer_params": params})
    assert (answer.status, b"cannot be reached" in answer.body) == (502, True)


def test_two_prefills_under_one_request_id_are_two(pair_process: Mocks) -> None:
    prefill, decode = pair_process.engines
    made = [prefill.post("/v1/completions", {**BODY, **LEG_P}, x_request_id="same").json() for _ in range(2)]
    for one in made:
        body = {**BODY, "kv_transfer_params": one["kv_transfer_params"]}
        assert decode.post("/v1/completions", body).status == 200


def test_parameters_without_blocks_are_computed_silently_and_counted(pair_process: Mocks) -> None:
    decode = pair_process.engines[1]
    before = decode.statistics()
    params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": None}
    assert decode.post("/v1/completions", {**BODY, "kv_transfer_params": params}).status == 200
    now = decode.statistics()
    assert now["silent_recomputes"] == before["silent_recomputes"] + 1
    assert now["prompt_tokens_computed"] > before["prompt_tokens_computed"] + 100


def test_blocks_are_given_back_although_the_client_left_at_once(pair_process: Mocks) -> None:
    prefill, decode = pair_process.engines
    params = prefill.post("/v1/completions", {**BODY, **LEG_P}).json()["kv_transfer_params"]
    released = prefill.statistics()["holds_released"]
    with decode.connect() as connection:
        connection.sendall(decode.raw("/v1/completions", {**BODY, "kv_transfer_params": params}))
    assert prefill.wait(lambda now: now["holds"] == 0, timeout_s=0.3)["holds_released"] == released + 1


def test_prefill_that_fails_tells_its_reader_at_once(pair_process: Mocks) -> None:
    decode = pair_process.engines[1]
    own = {"transfer_id": "t-9", "do_remote_decode": True}
    other = {"transfer_id": "t-9", "do_remote_prefill": True}
    with concurrent.futures.ThreadPoolExecutor() as pool, mocks("--roles", "prefill", "--ttft-ms", "60000") as started:
        held = started.engines[0]
        remote = {**other, "remote_bootstrap_addr": f"127.0.0.1:{held.port}"}
        with held.connect() as connection:
            connection.sendall(held.raw("/v1/completions", {**BODY, "max_tokens": 1, "kv_transfer_params": own}))
            held.wait(lambda now: now["running"] == 1)
            reader = pool.submit(decode.post, "/v1/completions", {**BODY, "kv_transfer_params": remote})
            decode.wait(lambda now: now["open_requests"] == 1)
        assert reader.result(timeout=1.5).status == 500
        assert held.wait(lambda now: now["blocks_used"] == 0)["clients_left"] == 1


def test_load_that_fails_is_computed_again_where_the_policy_says_so() -> None:
    with mocks("--count", "2", "--roles", "prefill,decode", "--kv-load-failure-policy", "recompute") as started:
        prefill, decode = started.engines
        params = prefill.post("/v1/completions", {**BODY, **LEG_P}).json()["kv_transfer_params"]
        decode.fault("load", count=1, leg="decode")
        answer = decode.post("/v1/completions", {**BODY, "kv_transfer_params": params})
        assert (answer.status, decode.statistics()["recomputes"]) == (200, 1)


def test_blocks_that_are_fetched_and_never_released_expire(pair_process: Mocks) -> None:
    prefill, decode = pair_process.engines
    params = prefill.post("/v1/completions", {**BODY, **LEG_P}).json()["kv_transfer_params"]
    decode.fault("keep", count=1, leg="decode")
    expired = prefill.statistics()["holds_expired"]
    assert decode.post("/v1/completions", {**BODY, "kv_transfer_params": params}).status == 200
    assert prefill.statistics()["holds"] == 1
    assert prefill.wait(lambda now: now["holds"] == 0)["holds_expired"] == expired + 1
