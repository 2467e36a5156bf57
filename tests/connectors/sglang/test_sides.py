"""What each role knows of the other before a transfer: which rank may be told what about a room."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.sglang import prefill_side
from kvxfer.connectors.sglang.decode_side import DecodeSide
from kvxfer.connectors.sglang.destination import RoomSource
from kvxfer.connectors.sglang.greetings import Abort, Refused, Register, Registered, RoomFailed, RoomRequest
from kvxfer.connectors.sglang.limits import Identity, Layout
from kvxfer.connectors.sglang.prefill_side import PrefillSide, Wanted
from kvxfer.connectors.sglang.shape import KvShape
from kvxfer.errors import IncompatibleError
from kvxfer.types import CompatibilityRecord, TransferId

RECORD = CompatibilityRecord("m", "c", "w", "float32", 3, 2, 16, 16, "page", "6 x 256", "config", "torch_native")
LAYOUT = Layout((256,) * 6, (64, 512))
SHAPE = KvShape((0, 1, 2) * 2, ("k",) * 3 + ("v",) * 3, (8,) * 6, 16, 0, 1, 2)
HERE = ("127.0.0.1", 7)
PLACE = {"rank_ip": "127.0.0.1", "rank_port": 9, "is_dummy": False}


class Calls:
    """Records every method that is called, as (name, arguments)."""

    def __init__(self, **values: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.__dict__ |= values

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in names]


class Engine(Calls):
    def __init__(self) -> None:
        super().__init__(unknown=None, shape=None)

    def why_unknown(self) -> str | None:
        why: str | None = self.unknown
        return why

    def identity(self) -> Identity:
        return Identity(RECORD, LAYOUT, self.shape)


def make_core() -> Any:
    return Calls(agent_id="p", sources=Calls(), destinations=Calls(), export_metadata=lambda: "metadata of p")


def room(number: int, agent_id: str = "d", **changes: Any) -> RoomRequest:
    values = {"pages": 2, "required": 1, "prefix_tokens": 0, "is_dummy": False, "rank": int(agent_id == "e")} | changes
    transfer_id = TransferId(agent_id.encode().rjust(8, b"-") + number.to_bytes(8, "big"))
    return RoomRequest(number, transfer_id, agent_id, **values)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def core() -> Any:
    return make_core()


@pytest.fixture
def side(engine: Engine, core: Any) -> PrefillSide:
    side = PrefillSide(engine, core, 0)
    for rank, agent_id in enumerate(("d", "e")):
        side.register(Register(agent_id, rank, "metadata", RECORD, LAYOUT, None), HERE)
    engine.calls.clear()
    return side


def told(engine: Engine) -> list[Any]:
    return [greeting for _, _, greeting in engine.named("tell")]


def test_register_is_answered_with_the_prefill_agent(engine: Engine, core: Any) -> None:
    side = PrefillSide(engine, core, 3)
    side.register(Register("d", 0, "metadata of d", RECORD, LAYOUT, None), HERE)
    assert core.named("add_remote_agent") == [("add_remote_agent", "metadata of d", "d")]
    assert engine.calls == [("tell", HERE, Registered("p", 3, "metadata of p", None))]


def test_a_decode_rank_that_does_not_match_is_refused(engine: Engine, core: Any) -> None:
    side = PrefillSide(engine, core, 0)
    side.register(Register("d", 0, "metadata", RECORD, Layout((256,) * 6, (64,)), None), HERE)
    (refused,) = told(engine)
    assert isinstance(refused, Refused)
    assert "aux_item_lens is '64, 512' here and '64' there" in refused.text
    side.want(room(1), HERE)
    assert told(engine)[-1].code == "peer_gone"


@pytest.mark.parametrize("sender_first", [True, False])
def test_a_room_begins_when_both_are_there(side: PrefillSide, engine: Engine, core: Any, sender_first: bool) -> None:
    acts = [lambda: side.open(1), lambda: side.want(room(1, prefix_tokens=32), HERE)]
    for act in acts if sender_first else reversed(acts):
        assert not engine.named("ready")
        act()
    ((_, number, wanted),) = engine.named("ready")
    assert (number, wanted[0].decode_prefix_len) == (1, 32)
    assert [call[0] for call in core.sources.calls] == ["accept", "reader"]


def test_a_room_waits_for_every_decode_rank(side: PrefillSide, engine: Engine, core: Any) -> None:
    side.open(1)
    side.want(room(1, required=2), HERE)
    assert not engine.named("ready")
    side.want(room(1, "e", required=2, is_dummy=True), HERE)
    assert engine.named("ready")
    assert len(core.sources.named("reader")) == 1


def test_a_room_in_use_is_refused_to_others(side: PrefillSide, engine: Engine) -> None:
    side.open(1)
    side.want(room(1), HERE)
    side.want(room(1, "e"), HERE)
    (failed,) = told(engine)
    assert (failed.code, failed.transfer_id) == ("refused", room(1, "e").transfer_id)
    assert len(engine.named("ready")) == 1


def test_an_abort_must_know_the_transfer_id(side: PrefillSide, engine: Engine, core: Any) -> None:
    side.open(1)
    side.want(room(1), HERE)
    side.abort(Abort(1, "", "x"))
    side.abort(Abort(1, str(room(2).transfer_id), "x"))
    assert not engine.named("fail")
    side.abort(Abort(1, str(room(1).transfer_id), "x"))
    assert engine.named("fail")
    assert core.sources.named("abort")


def test_an_abort_may_come_before_the_prompt(side: PrefillSide, engine: Engine) -> None:
    side.abort(Abort(1, "", "the client left"))
    side.open(1)
    assert "the client left" in engine.named("fail")[0][2]


def test_request_for_a_failed_room_is_answered_with_its_reason(side: PrefillSide, engine: Engine) -> None:
    side.open(1)
    side.close(1, "Aborted by AbortReq.")
    side.want(room(1), HERE)
    assert told(engine)[0].text == "Aborted by AbortReq."
    side.open(1)
    side.want(room(1), HERE)
    assert engine.named("ready")


def test_readers_of_a_room_that_never_began_are_told(side: PrefillSide, engine: Engine) -> None:
    side.open(1)
    side.want(room(1, required=2), HERE)
    side.close(1, "timed out")
    assert [(failed.room, failed.text) for failed in told(engine)] == [(1, "timed out")]


def test_unknown_weights_refuse_rooms(side: PrefillSide, engine: Engine) -> None:
    engine.unknown = "they were updated"
    side.want(room(1), HERE)
    assert told(engine)[0].code == "weights_unknown"


def test_wishes_for_rooms_that_never_come_are_bounded(side: PrefillSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_side, "EARLY_MAX", 10)
    for number in range(1, 30):
        side.want(room(number), HERE)
    assert len(side._wanted) == len(side._early) == 10


def test_rooms_that_are_over_leave_nothing(side: PrefillSide) -> None:
    for number in range(5):
        side.open(number)
        side.want(room(number), HERE)
        side.close(number, None)
        side.close(number, None)
    for left in (side._open, side._wanted, side._entered, side._early, side._over):
        assert not left


# --- where pages may be cut differently ---


def cut_side(engine: Engine, core: Any, *, decode_tp: int, page_tokens: int = 16) -> PrefillSide:
    """A rank of one that has two decode ranks introduced, of an engine of ``decode_tp``."""
    engine.shape = SHAPE
    side = PrefillSide(engine, core, 0)
    for rank, agent_id in enumerate(("d", "e")[:decode_tp]):
        shape = dataclasses.replace(SHAPE, tp_rank=rank, tp_size=decode_tp, page_tokens=page_tokens)
        layout = dataclasses.replace(LAYOUT, kv_item_lens=tuple(shape.page_bytes(at) for at in range(6)))
        side.register(Register(agent_id, rank, "metadata", RECORD, layout, shape), HERE)
    assert [type(greeting) for greeting in told(engine)] == [Registered] * min(decode_tp, 2)
    assert all(greeting.shape == SHAPE for greeting in told(engine))
    engine.calls.clear()
    return side


def test_both_sides_know_how_many_ranks_ask(engine: Engine, core: Any) -> None:
    side = cut_side(engine, core, decode_tp=2)
    assert [call[1].tp_rank for call in core.named("share")] == [0, 1]
    side.open(1)
    side.want(room(1, required=2), HERE)
    side.want(room(1, "e", required=2), HERE)
    readers = [reader for _, _, reader in core.sources.named("reader")]
    assert [(reader.rank, reader.shape.tp_rank, reader.lead) for reader in readers] == [(0, 0, 0), (1, 1, 0)]
    for wrong in ({"required": 1}, {"required": 3}, {"required": 2, "rank": 1}):
        side.want(room(2, **wrong), HERE)
        assert told(engine)[-1].code == "protocol"
    assert "it is rank 0, one of 2 that ask this rank, and says that it is rank 1, one of 2" in told(engine)[-1].text


def test_ranks_of_two_engines_are_not_mixed(side: PrefillSide, engine: Engine) -> None:
    side.register(Register("f", 0, "metadata", RECORD, LAYOUT, None), HERE)
    side.open(1)
    side.want(room(1, required=2), HERE)
    for wrong in (room(1, "f", required=2), room(1, "e", required=3), room(1, "e", required=2, prefix_tokens=16)):
        side.want(wrong, HERE)
        assert (told(engine)[-1].code, told(engine)[-1].transfer_id) == ("refused", wrong.transfer_id)
    side.want(room(1, "e", required=2), HERE)
    assert engine.named("ready")


def test_tokens_of_a_partial_page_at_decode_are_the_lead(engine: Engine, core: Any) -> None:
    side = cut_side(engine, core, decode_tp=1, page_tokens=4)
    side.open(1)
    side.want(room(1, prefix_tokens=40), HERE)
    ((_, _, reader),) = core.sources.named("reader")
    ((_, _, wanted),) = engine.named("ready")
    assert (wanted[0].decode_prefix_len, reader.lead) == (32, 8)


def test_a_decode_rank_that_has_nothing_in_common_is_refused(engine: Engine, core: Any) -> None:
    engine.shape = SHAPE

    def share(shape: KvShape) -> None:
        raise IncompatibleError("heads: 0-1 here, 2-3 there", field="heads")

    core.share = share
    PrefillSide(engine, core, 0).register(Register("d", 0, "metadata", RECORD, LAYOUT, SHAPE), HERE)
    assert told(engine) == [Refused("incompatible", "heads: 0-1 here, 2-3 there")]
    assert not core.named("add_remote_agent")


# --- decode ---


@pytest.fixture
def decode(engine: Engine, core: Any) -> DecodeSide:
    return DecodeSide(engine, core)


def test_a_prefill_rank_is_waited_for_until_it_answered(decode: DecodeSide, core: Any) -> None:
    assert decode.waits_for([PLACE]) == ("127.0.0.1", 9)
    decode.answered(Registered("p", 2, "metadata of p", None), ("127.0.0.1", 9))
    assert decode.waits_for([PLACE]) is None
    core.destinations.choose = lambda sources: tuple(sources)
    assert decode.sources([dict(PLACE), PLACE | {"is_dummy": True}]) == [("p", 2, None)]
    assert core.named("add_remote_agent") == [("add_remote_agent", "metadata of p", "p")]
    decode.forget([("127.0.0.1", 9)])
    assert decode.waits_for([PLACE]) is not None


def test_rank_without_a_share_is_marked_dummy(decode: DecodeSide, core: Any) -> None:
    """And stays so: SGLang keeps what it knows of a prefill rank."""
    infos = [PLACE | {"rank_port": port} for port in (9, 10)]
    for rank, info in enumerate(infos):
        shape = dataclasses.replace(SHAPE, tp_rank=rank, tp_size=4)
        decode.answered(Registered(f"p{rank}", rank, "metadata", shape), ("127.0.0.1", info["rank_port"]))
    heard: list[list[RoomSource]] = []

    def choose(sources: list[RoomSource]) -> tuple[RoomSource, ...]:
        heard.append(sources)
        return tuple(sources[:1])

    core.destinations.choose = choose
    for _ in range(2):
        assert [source.agent_id for source in decode.sources(infos)] == ["p0"]
        assert [info["is_dummy"] for info in infos] == [False, True]
    assert [[source.rank for source in sources] for sources in heard] == [[0, 1], [0]]
    assert heard[0][1].shape == dataclasses.replace(SHAPE, tp_rank=1, tp_size=4)


def test_a_room_fails_by_its_transfer_id_only(decode: DecodeSide, engine: Engine, core: Any) -> None:
    transfer_id = decode.begin(1, "a:1")
    decode.room_failed(RoomFailed(1, room(1).transfer_id, "refused", "x"))
    decode.room_failed(RoomFailed(2, transfer_id, "refused", "x"))
    assert not engine.calls
    decode.room_failed(RoomFailed(1, transfer_id, "peer_gone", "x"))
    assert engine.calls == [("fail", 1, "peer_gone: x"), ("forget", "a:1")]
    assert core.destinations.calls == [("abort", 1, "x")]


def test_a_prefill_engine_that_is_gone_is_forgotten(decode: DecodeSide, engine: Engine) -> None:
    decode.begin(1, "a:1")
    decode.failed(1, "grant_unknown", "x")
    assert not engine.named("forget")
    decode.failed(1, "peer_gone", "x")
    assert engine.named("forget") == [("forget", "a:1")]
    decode.end(1)
    decode.end(1)


def test_request_has_the_fields_that_sglang_reads() -> None:
    wanted = Wanted(1, "h", 2, False, 1, 0, SimpleNamespace(transfer_id=None))  # type: ignore[arg-type]
    assert (wanted.endpoint, wanted.dst_port, wanted.required_dst_info_num) == ("h", 2, 1)
