"""The scheduler half against a small model of vLLM's scheduler: what it orders, whatever happens in which order."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.connectors.common.ids import blocks_for, content_of
from kvxfer.connectors.vllm.params import handed_over
from kvxfer.connectors.vllm.steps import Report, Standing, StepOrders
from kvxfer.types import Incarnation, TransferId
from tests.support.vllm_connector.scheduler import BLOCK, ID, PREFILL, Request, Status, concurrent, new_half, step

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


def test_a_plain_prefill_is_kept_and_handed_over() -> None:
    half, request = new_half(), Request("r", list(range(40)), PREFILL)
    incarnations = tuple(Incarnation(7, bytes([rank]) * 16) for rank in range(2))
    half.set_incarnations(incarnations)
    half.on_new_request(request)
    assert half.matched(request, 0) == 0
    assert step(half, {"r": ([1, 2, 3], 0, 40)}) == StepOrders(has_forward=True)
    request.status = Status.FINISHED_LENGTH_CAPPED
    is_kept, answer = half.finished(request, [[1, 2, 3]])
    transfer_id = TransferId((1).to_bytes(16, "big"))
    assert is_kept
    assert answer == handed_over(transfer_id, ("me", "me.1"), "r", 39, incarnations=incarnations)
    (finish,) = step(half).finishes
    assert (finish.blocks, finish.transfer_id, finish.content_digest) == (
        (1, 2, 3),
        transfer_id,
        content_of(range(39), 2, [""]),
    )


def test_the_trace_of_a_request_goes_with_its_orders_and_with_what_is_handed_over() -> None:
    half, headers = new_half(), {"traceparent": TRACE}
    plain = Request("r", list(range(40)), PREFILL, Status.FINISHED_STOPPED, headers)
    answer = half.finished(plain, [[1, 2, 3]])[1]
    assert answer is not None
    assert answer["traceparent"] == step(half).finishes[0].traceparent == TRACE
    half.on_new_request(Request("o", list(range(60)), concurrent("decode") | headers))
    assert [order.traceparent for order in step(half, {"o": ([1, 2, 3], 0, 48)}).opens] == [TRACE]
    decode = Request("d", list(range(40)), answer)
    half.allocated(decode, [[4, 5, 6]], half.matched(decode, 0) or 0)
    assert [order.traceparent for order in step(half).loads] == [TRACE]


def test_a_version_of_vllm_without_trace_headers_leaves_those_of_the_parameters() -> None:
    half, request = new_half(), Request("r", list(range(40)), PREFILL | {"traceparent": TRACE}, Status.FINISHED_STOPPED)
    del request.trace_headers
    assert half.finished(SimpleNamespace(**vars(request), num_prompt_tokens=40), [[1, 2, 3]])[0]
    assert step(half).finishes[0].traceparent == TRACE


def test_a_prompt_that_must_be_computed_here_is_not_fetched() -> None:
    half, request = new_half(), Request("r", list(range(33)), handed_over(ID, ("p",), "x", 32))
    request.skip_reading_prefix_cache = True
    half.on_new_request(request)
    assert half.matched(request, 0) == 0
    half.allocated(request, [[1, 2, 3]], 0)
    orders = step(half)
    assert (orders.loads, len(orders.releases)) == ((), 1)


def image(identifier: str, offset: int) -> SimpleNamespace:
    return SimpleNamespace(modality="image", identifier=identifier, mm_position=SimpleNamespace(offset=offset))


def test_content_digest_depends_on_adapter_and_images() -> None:
    adapters = (None, SimpleNamespace(lora_path="a"), SimpleNamespace(lora_path="b"))
    pictures = ([], [image("x", 3)], [image("y", 3)], [image("x", 4)], [image("x", 3), image("y", 3)])
    contents = []
    for adapter, images in itertools.product(adapters, pictures):
        both = []
        for params in (concurrent("decode"), {**concurrent("prefill"), "source": {"agent_id": "p", "ranks": 2}}):
            half, request = new_half(), Request("r", list(range(40)), params, lora_request=adapter, mm_features=images)
            half.on_new_request(request)
            half.stands([Standing("r", True, is_over=True)])
            half.allocated(request, [[1, 2, 3]], half.matched(request, 0) or 0)
            orders = step(half, {"r": ([1, 2, 3], 0, 40)})
            both += [order.content_digest for order in (*orders.opens, *orders.loads)]
        assert len(both) == 2
        assert len(set(both)) == 1
        contents += both[:1]
    assert len(set(contents)) == len(contents) == 15


@pytest.mark.parametrize("ids", [None, list(range(40))])
def test_embeddings_instead_of_tokens_are_computed_where_they_are_wanted(ids: list[int] | None) -> None:
    half = new_half()
    embeds = SimpleNamespace(prompt_token_ids=ids, prompt_embeds="e", num_prompt_tokens=40, status=Status.RUNNING)
    request = SimpleNamespace(**vars(embeds), request_id="p", kv_transfer_params=concurrent("decode"))
    half.on_new_request(request)
    assert step(half, {"p": ([1, 2, 3], 0, 40)}) == StepOrders(has_forward=True)
    request.status = Status.FINISHED_LENGTH_CAPPED
    assert half.finished(request, [[1, 2, 3]]) == (False, None)
    assert [close.will_resume for close in step(half).closes] == [False]
    wanted = SimpleNamespace(**vars(embeds), request_id="d", kv_transfer_params=handed_over(ID, ("p",), "x", 39))
    half.on_new_request(wanted)
    assert half.matched(wanted, 0) == 0
    orders = step(half)
    assert ([remote.request_id for remote in orders.releases], orders.keeps) == (["d"], ())


def test_a_prompt_of_one_token_has_nothing_to_hand_over() -> None:
    half, request = new_half(), Request("r", [1], PREFILL, Status.FINISHED_STOPPED)
    assert half.finished(request, [[1]]) == (False, None)
    assert step(half) == StepOrders()


def test_a_chunk_completes_blocks_and_the_last_one_the_rest() -> None:
    half, request = new_half(), Request("r", list(range(60)), concurrent("decode"))
    half.on_new_request(request)
    first = step(half, {"r": ([1, 2, 3], 16, 20)})
    assert [(order.total, order.reader) for order in first.opens] == [(4, "d")]
    assert [order.blocks for order in first.chunks] == [(1, 2)]
    assert step(half, cached={"r": ([], 36, 2)}).chunks == ()
    assert [order.blocks for order in step(half, cached={"r": ([4], 38, 22)}).chunks] == [(3, 4)]


def test_a_block_that_the_last_token_will_be_written_to_is_not_final() -> None:
    half, request = new_half(), Request("r", list(range(60)), concurrent("decode"))
    half.on_new_request(request)
    assert [order.blocks for order in step(half, {"r": ([1, 2, 3, 4], 0, 59)}).chunks] == [(1, 2, 3)]
    assert [order.blocks for order in step(half, cached={"r": ([], 59, 1)}).chunks] == [(4,)]


def test_a_preempted_prefill_is_closed_in_that_step_and_opened_again() -> None:
    half, request = new_half(), Request("r", list(range(60)), concurrent("decode"), Status.RUNNING)
    half.on_new_request(request)
    step(half, {"r": ([1, 2], 0, 32)})
    request.status = Status.PREEMPTED
    assert [(close.request_id, close.will_resume) for close in step(half).closes] == [("r", True)]
    assert step(half).closes == ()
    request.status = Status.RUNNING
    again = step(half, cached={"r": ([5, 6, 7, 8], 16, 44)}, resumed={"r"})
    assert [order.total for order in again.opens] == [4]
    assert [order.blocks for order in again.chunks] == [(5, 6, 7, 8)]
    request.status = Status.FINISHED_LENGTH_CAPPED
    assert half.finished(request, [[5, 6, 7, 8]])[0]


def test_a_prefill_that_never_began_is_closed_when_it_ends() -> None:
    half, request = new_half(), Request("r", list(range(60)), concurrent("decode"))
    half.on_new_request(request)
    request.status = Status.FINISHED_ABORTED
    assert half.finished(request, [[]]) == (False, None)
    assert [close.will_resume for close in step(half).closes] == [False]


def test_a_load_is_the_missing_tail_without_the_last_token() -> None:
    half, request = new_half(), Request("r", list(range(49)), handed_over(ID, ("p", "p.1"), "x", 48))
    half.on_new_request(request)
    assert [keep.sources for keep in step(half).keeps] == [("p", "p.1")]
    assert half.matched(request, 16) == 32
    half.allocated(request, [[9, 8, 7, 6]], 32)
    (load,) = step(half).loads
    assert (load.first, load.blocks, load.has_direct, load.content_digest) == (
        1,
        (8, 7),
        True,
        content_of(range(48), 2, [""]),
    )
    half.allocated(request, [[9, 8, 7, 6]], 0)
    half.reported([report("r", "")])
    half.received({"r"})
    assert half.matched(request, 0) == 0
    assert step(half) == StepOrders()
    is_kept, answer = half.finished(request, [[9, 8, 7, 6]])
    assert not is_kept
    assert answer is not None
    assert answer["kvxfer"]["bytes"] == 7
    assert answer["kvxfer"]["cached_tokens"] == 16


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_load_is_counted_once_when_all_its_ranks_have_said_how_it_ended(is_aborted: bool) -> None:
    half, request = new_half(), Request("r", list(range(49)), handed_over(ID, ("p", "p.1"), "x", 48))
    half.on_new_request(request)
    half.allocated(request, [[9, 8, 7, 6]], half.matched(request, 0) or 0)
    half.reported([report("r", "")])
    half.received(())
    assert half.take_ended() == []
    if is_aborted:
        half.finished(request, [[9, 8, 7, 6]])
    half.reported([report("r", "checksum")])
    half.received({"r"})
    assert [(ended.code, ended.bytes, ended.seconds) for ended in half.take_ended()] == [("checksum", 14, 0.5)]
    assert half.take_ended() == []


def test_a_full_local_hit_is_released() -> None:
    half, request = new_half(), Request("r", list(range(33)), handed_over(ID, ("p",), "x", 32))
    half.on_new_request(request)
    assert half.matched(request, 32) == 0
    half.allocated(request, [[1, 2, 3]], 0)
    assert [remote.transfer_id for remote in step(half).releases] == [ID]
    half.finished(request, [[1, 2, 3]])
    assert step(half) == StepOrders()


def test_a_prefill_that_is_back_in_the_step_that_preempted_it_is_closed_too() -> None:
    half, request = new_half(), Request("r", list(range(60)), concurrent("decode"), Status.RUNNING)
    half.on_new_request(request)
    step(half, {"r": ([1, 2], 0, 32)})
    orders = step(half, cached={"r": ([5, 6, 7, 8], 0, 60)}, resumed={"r"})
    assert [close.request_id for close in orders.closes] == ["r"]
    assert [order.total for order in orders.opens] == [4]
    assert [order.blocks for order in orders.chunks] == [(5, 6, 7, 8)]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_decode_that_ends_before_it_began_is_released(is_known: bool) -> None:
    half, request = new_half(), Request("r", list(range(33)), handed_over(ID, ("p",), "x", 32))
    if is_known:
        half.on_new_request(request)
    half.finished(request, [[]])
    assert len(step(half).releases) == 1


@pytest.mark.parametrize("is_aborted", [True, False])
def test_of_several_requests_for_one_prompt_the_first_fetches_and_the_others_wait_for_it(is_aborted: bool) -> None:
    half, params = new_half(), handed_over(ID, ("p",), "x", 32)
    first, second = (Request(name, list(range(33)), params) for name in ("0_r", "1_r"))
    half.on_new_request(first)
    half.on_new_request(second)
    half.allocated(first, [[1, 2, 3]], half.matched(first, 0) or 0)
    assert half.matched(second, 0) is None
    assert [load.request_id for load in step(half).loads] == ["0_r"]
    assert half.matched(second, 0) is None
    if is_aborted:
        half.finished(first, [[1, 2, 3]])
    else:
        half.received({"0_r"})
    assert half.matched(second, 16) == 0
    half.allocated(second, [[1, 4, 5]], 0)
    half.finished(second, [[1, 4, 5]])
    orders = step(half)
    assert (orders.loads, orders.releases) == ((), ())


def test_of_several_prefills_under_one_id_the_first_keeps_the_prompt() -> None:
    half = new_half()
    requests = [Request(name, list(range(33)), concurrent("decode")) for name in ("0_r", "1_r")]
    for request in requests:
        half.on_new_request(request)
    orders = step(half, {"0_r": ([1, 2, 3], 0, 33), "1_r": ([4, 5, 6], 0, 33)})
    assert [begun.request_id for begun in orders.opens] == ["0_r"]
    for request in requests:
        request.status = Status.FINISHED_LENGTH_CAPPED
    assert [half.finished(request, [[1, 2, 3]])[0] for request in requests] == [True, False]
    assert [finish.request_id for finish in step(half).finishes] == ["0_r"]


def test_an_abort_while_loading_cancels() -> None:
    half, request = new_half(), Request("r", list(range(33)), handed_over(ID, ("p",), "x", 32))
    half.on_new_request(request)
    half.allocated(request, [[1, 2, 3]], half.matched(request, 0) or 0)
    step(half)
    assert half.finished(request, [[1, 2, 3]]) == (False, None)
    orders = step(half)
    assert (orders.cancels, orders.releases) == (("r",), ())


def test_another_prompt_than_the_prefill_had_is_computed_here() -> None:
    half, request = new_half(), Request("r", list(range(33)), handed_over(ID, ("p",), "x", 31))
    half.on_new_request(request)
    assert half.matched(request, 0) == 0
    assert len(step(half).releases) == 1


def test_parameters_without_sense_are_computed_here(caplog: pytest.LogCaptureFixture) -> None:
    half, request = new_half(), Request("r", list(range(33)), {"do_remote_prefill": True, "transfer_id": 7})
    half.on_new_request(request)
    assert [half.matched(request, 0) for _ in range(3)] == [0, 0, 0]
    half.allocated(request, [[1, 2, 3]], 0)
    assert half.finished(request, [[1, 2, 3]]) == (False, None)
    assert step(half) == StepOrders()
    assert len(caplog.records) == 1
    half.on_new_request(Request("r", list(range(33)), {"do_remote_prefill": True, "transfer_id": 7}))
    assert len(caplog.records) == 2


def report(request_id: str, code: str) -> Report:
    return Report(request_id, str(ID), code, "", "cma", 2, 7, 1, 0.5, 0.4, 0, 1)


class Prefills(RuleBasedStateMachine):
    """Concurrent prefills over a pool of blocks that vLLM gives away at once when a request is preempted or aborted.

    ``promised`` is what the worker half would have granted after the orders of the last step.
    """

    POOL = 24

    def __init__(self) -> None:
        super().__init__()
        self.half = new_half()
        self.free = list(range(1, self.POOL))
        self.tables: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.requests: dict[str, Request] = {}
        self.kept: dict[str, list[int]] = {}
        self.promised: dict[str, list[int]] = {}
        self.finished: list[str] = []
        self.count = 0

    @precondition(lambda self: len(self.requests) < 4)
    @rule(length=st.integers(1, 90))
    def arrive(self, length: int) -> None:
        self.count += 1
        ends = {"destination": {"agent_id": "d"}, "transfer_id": f"{self.count:032x}"}
        request = Request(f"r{self.count}", list(range(length)), {**PREFILL, **ends})
        self.requests[request.request_id] = request
        self.half.on_new_request(request)

    @rule(budget=st.integers(1, 70), draw=st.data())
    def schedule(self, budget: int, draw: st.DataObject) -> None:
        new, cached, resumed = {}, {}, set()
        for name, request in self.requests.items():
            left = request.num_prompt_tokens - self.computed.get(name, 0)
            count = min(budget, left)
            if count <= 0:
                continue
            table = self.tables.setdefault(name, [])
            need = blocks_for(self.computed.get(name, 0) + count, BLOCK) - len(table)
            if need > len(self.free):
                continue
            budget -= count
            added = [self.free.pop(draw.draw(st.integers(0, len(self.free) - 1))) for _ in range(need)]
            table += added
            before = self.computed.get(name, 0)
            if request.status is Status.WAITING:
                new[name] = (added, before, count)
            else:
                cached[name] = (added, before, count)
                if request.status is Status.PREEMPTED:
                    resumed.add(name)
            request.status = Status.RUNNING
            self.computed[name] = before + count
        self.obey(step(self.half, new, cached, resumed))

    @precondition(lambda self: any(r.status is Status.RUNNING for r in self.requests.values()))
    @rule(draw=st.data())
    def preempt(self, draw: st.DataObject) -> None:
        """It may be back in the very next step."""
        name = draw.draw(st.sampled_from([n for n, r in self.requests.items() if r.status is Status.RUNNING]))
        self.requests[name].status = Status.PREEMPTED
        self.free += self.tables.pop(name)
        self.computed[name] = 0

    @precondition(lambda self: self.requests)
    @rule(draw=st.data())
    def end(self, draw: st.DataObject) -> None:
        name = draw.draw(st.sampled_from(list(self.requests)))
        request = self.requests.pop(name)
        table, computed = self.tables.pop(name, []), self.computed.pop(name, 0)
        is_done = computed == request.num_prompt_tokens
        request.status = Status.FINISHED_LENGTH_CAPPED if is_done else Status.FINISHED_ABORTED
        is_kept, _ = self.half.finished(request, [table])
        if is_kept:
            assert is_done
            self.kept[name] = table
        else:
            self.free += table

    @precondition(lambda self: self.finished)
    @rule()
    def fetched(self) -> None:
        name = self.finished.pop()
        self.free += self.kept.pop(name)
        del self.promised[name]

    def obey(self, orders: StepOrders) -> None:
        for close in orders.closes:
            self.promised.pop(close.request_id, None)
        for begun in orders.opens:
            assert begun.request_id not in self.promised
            self.promised[begun.request_id] = []
        for finish in orders.finishes:
            promised = self.promised.setdefault(finish.request_id, list(finish.blocks))
            assert promised == list(finish.blocks)
            self.finished.append(finish.request_id)
        for chunk in orders.chunks:
            self.promised[chunk.request_id] += chunk.blocks
        for name, blocks in self.promised.items():
            owned = self.tables.get(name) or self.kept.get(name) or []
            assert blocks == owned[: len(blocks)], "a block is promised that vLLM gave away"

    @invariant()
    def every_block_has_one_owner(self) -> None:
        owned = [block for table in (*self.tables.values(), *self.kept.values()) for block in table]
        assert sorted(owned + self.free) == list(range(1, self.POOL))


Prefills.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPrefills = Prefills.TestCase


def test_fewer_tokens_than_were_offered_are_fetched_from_where_they_begin() -> None:
    """vLLM may take less than it was told is there; what it takes begins after what it has, not before the end."""
    half, request = new_half(), Request("r", list(range(65)), handed_over(ID, ("p",), "x", 64))
    half.on_new_request(request)
    assert half.matched(request, 16) == 48
    half.allocated(request, [[9, 8, 7, 6]], 16)
    (load,) = step(half).loads
    assert (load.first, load.blocks, load.has_direct) == (1, (8,), False)


@pytest.mark.parametrize(("cached", "is_told"), [(0, True), (16, True), (48, False)])
def test_a_load_that_vllm_did_not_want_is_told_unless_its_own_cache_had_all(cached: int, is_told: bool) -> None:
    """Under MultiConnector the first connector with a part of the prompt loads it, and the others are asked too."""
    half = new_half()
    answer = half.finished(Request("r", list(range(40)), PREFILL, Status.FINISHED_STOPPED), [[1, 2, 3]])[1]
    decode = Request("d", list(range(40)), answer)
    half.on_new_request(decode)
    assert bool(half.matched(decode, cached)) is is_told
    half.allocated(decode, [[4, 5, 6]], 0)
    assert [release.request_id for release in step(half, {"d": ([4, 5, 6], cached, 24)}).releases] == ["d"]
    decode.status = Status.FINISHED_STOPPED
    stays, told = half.finished(decode, [[4, 5, 6]])
    assert not stays
    if not is_told:
        assert told is None
        return
    assert told is not None
    assert (told["kvxfer"]["code"], told["kvxfer"]["bytes"]) == ("", 0)
    assert "another connector" in told["kvxfer"]["text"]
    assert half.take_ended() == []
