"""Which weights an engine has: what was loaded counts, and what changed is not known any more."""

from __future__ import annotations

import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvxfer.connectors.common import weights as weights_module
from kvxfer.connectors.common.checkpoint import ModelName, NotKnown
from kvxfer.connectors.common.digest_cache import DigestCache
from kvxfer.connectors.common.stamps import COARSE_NS, Stamp, process_start_ns, stamp_of
from kvxfer.connectors.common.weights import PENDING, Weights
from kvxfer.connectors.vllm.identity import EngineWeights, share, unshare
from kvxfer.connectors.vllm.loaded import Loaded
from kvxfer.types import why_unknown

FUTURE_NS = time.time_ns() + 10**18
WAIT_S = 10.0

Make = Callable[..., Weights]


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights" * 1000)
    return tmp_path


@pytest.fixture
def loaded() -> Loaded:
    return Loaded()


@pytest.fixture
def make(model: pathlib.Path, loaded: Loaded) -> Iterator[Make]:
    """Weights of a process that began long after the files were written, unless it is said otherwise."""
    made = []

    def new(started_ns: int | None = FUTURE_NS, find: Callable[[], list[ModelName]] | None = None) -> Weights:
        names = find or (lambda: [ModelName(str(model))])
        weights = Weights(names, loaded=loaded, cache=DigestCache(None), started_ns=lambda: started_ns, watch_s=0.01)
        made.append(weights)
        return weights

    yield new
    for weights in made:
        weights.stop()
        weights._thread.join(WAIT_S)


def changed(weights: Weights) -> str:
    """Why it is not known any more, once it is not."""
    heard = threading.Event()
    weights.listen(heard.set)
    if weights.why is None:
        assert heard.wait(WAIT_S)
    assert weights.why is not None
    return weights.why


def known(weights: Weights) -> str:
    assert weights.wait(WAIT_S)
    assert weights.why is None, weights.why
    return weights.fingerprint


def unknown(weights: Weights) -> str:
    assert weights.wait(WAIT_S)
    assert weights.why is not None
    assert why_unknown(weights.fingerprint) == weights.why[:300]
    return weights.why


def waits_for(event: threading.Event, *names: ModelName) -> Callable[[], list[ModelName]]:
    def find() -> list[ModelName]:
        assert event.wait(WAIT_S)
        return list(names)

    return find


def test_weights_are_not_known_while_they_are_read_and_known_then(make: Make) -> None:
    may_go_on = threading.Event()
    weights = make(find=waits_for(may_go_on))
    assert weights.why == PENDING
    assert why_unknown(weights.fingerprint) == PENDING
    may_go_on.set()
    assert "no weight files" in unknown(weights)
    assert known(make()) == known(make())


def test_weights_younger_than_the_process_are_not_known(make: Make, model: pathlib.Path) -> None:
    stamp = stamp_of(model / "model.safetensors")
    newest_ns = stamp.newest_ns + (COARSE_NS if stamp.is_coarse else 0)
    assert "younger than this process" in unknown(make(newest_ns - 1))
    assert "younger than this process" in unknown(make(None))
    known(make(newest_ns))


def test_weights_that_a_worker_was_seen_reading_are_known_however_young(
    make: Make, model: pathlib.Path, loaded: Loaded
) -> None:
    """As after a download by the engine itself."""
    path = str(model / "model.safetensors")
    stamp = stamp_of(path)
    loaded.read({path: stamp}, at_ns=stamp.ctime_ns + 3 * 10**9)
    known(make(0))


def test_weights_written_just_before_a_worker_read_them_are_not_known(
    make: Make, model: pathlib.Path, loaded: Loaded
) -> None:
    path = str(model / "model.safetensors")
    loaded.read({path: stamp_of(path)}, at_ns=stamp_of(path).ctime_ns + 1000)
    assert "just before" in unknown(make())


def test_weights_changed_after_a_worker_began_to_read_them_are_not_known(
    make: Make, model: pathlib.Path, loaded: Loaded
) -> None:
    path = model / "model.safetensors"
    loaded.read({str(path): stamp_of(path)})
    path.write_bytes(b"others, and longer" * 1000)
    assert "was changed after the engine began to read it" in unknown(make())


@pytest.mark.parametrize("how", ["in place", "by another file", "by its time"])
def test_weights_whose_files_change_later_are_not_known_any_more(how: str, make: Make, model: pathlib.Path) -> None:
    weights, path = make(), model / "model.safetensors"
    fingerprint = known(weights)
    if how == "in place":
        with path.open("ab") as file:
            file.write(b"W")
    elif how == "by another file":
        (model / "new").write_bytes(path.read_bytes())
        (model / "new").rename(path)
    else:
        os.utime(path, ns=(1, 1))
    assert f"{path} was changed after it was loaded" in changed(weights)
    assert weights.fingerprint != fingerprint


def test_weights_whose_files_are_gone_are_known_until_others_come(make: Make, model: pathlib.Path) -> None:
    weights, path = make(), model / "model.safetensors"
    known(weights)
    path.unlink()
    assert not weights._thread.join(0.05)  # it looks meanwhile
    assert weights.why is None
    path.write_bytes(b"weights" * 1000)
    assert "was changed" in changed(weights)


def test_weights_changed_in_memory_are_not_known_for_good(make: Make, loaded: Loaded) -> None:
    weights = make()
    known(weights)
    loaded.changed("update_weights was called")
    assert weights.why == "update_weights was called"
    loaded.changed("something else")
    assert weights.why == "update_weights was called"
    assert unknown(make()) == "update_weights was called"
    loaded.begin()  # another engine loads
    known(make())


def test_weights_changed_in_memory_while_files_are_read_stay_unknown(
    make: Make, model: pathlib.Path, loaded: Loaded
) -> None:
    may_go_on = threading.Event()
    weights = make(find=waits_for(may_go_on, ModelName(str(model))))
    loaded.changed("the engine slept at level 2")
    may_go_on.set()
    weights.stop()
    weights._thread.join(WAIT_S)
    assert weights.why == "the engine slept at level 2"


def test_weights_of_a_loader_without_files_are_not_known(make: Make) -> None:
    def find() -> list[ModelName]:
        raise NotKnown("load_format 'dummy' reads no files")

    first, second = make(find=find), make(find=find)
    assert "dummy" in unknown(first)
    unknown(second)
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize("when", ["reading", "watching"])
def test_weights_of_which_reading_or_watching_breaks_are_not_known(
    when: str, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(*_: object) -> list[ModelName]:
        raise ValueError("line 1\nline 2")

    weights = make(find=breaks if when == "reading" else None)
    if when == "watching":
        known(weights)
        monkeypatch.setattr(weights_module, "stamp_of", breaks)
        changed(weights)
    assert "is not known: ValueError" in unknown(weights)
    assert why_unknown(weights.fingerprint) == weights.why
    weights._thread.join(WAIT_S)
    assert "Traceback" in caplog.text


def test_weights_whose_reason_has_lines_say_it_on_one(make: Make) -> None:
    def find() -> list[ModelName]:
        raise NotKnown("no snapshot: 404\n\nNot Found of /caf\udce9")

    weights = make(find=find)
    assert unknown(weights).endswith("no snapshot: 404 Not Found of /caf\\udce9")


def test_an_engine_knows_its_weights_when_all_of_its_workers_do(make: Make, loaded: Loaded) -> None:
    engine = EngineWeights(("e", "e.1"), loaded)
    assert engine.why_unknown() == PENDING
    here = make()
    share("e", here)
    known(here)
    assert engine.why_unknown() == PENDING
    engine.tell("e.1", None)
    assert engine.why_unknown() is None
    engine.tell("e.1", "it slept")
    assert engine.why_unknown() == "it slept"
    engine.tell("e.1", None)
    engine.tell("another process", "no")
    here.forget("changed")
    assert engine.why_unknown() == "changed"
    unshare("e", here)
    unshare("e", here)
    engine.tell("e", None)
    engine.listen()
    assert engine.why_unknown() is None
    loaded.changed("a function was run")
    loaded.changed("and what that called")
    assert engine.why_unknown() == "a function was run"
    engine.stop()


def test_a_process_knows_when_it_began() -> None:
    began_ns = process_start_ns()
    assert began_ns is not None
    assert 0 < time.time_ns() - began_ns < time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@pytest.mark.parametrize(
    ("ctime_ns", "age_ns", "is_settled"),
    [
        (10**18 + 1, 10**8, True),
        (10**18 + 1, 10**8 - 1, False),
        (10**18, 2 * 10**9, True),
        (10**18, 2 * 10**9 - 1, False),
    ],
)
def test_a_stamp_is_settled_when_its_tick_is_over(ctime_ns: int, age_ns: int, is_settled: bool) -> None:
    assert Stamp(1, 1, 1, 0, ctime_ns).was_settled(ctime_ns + age_ns) is is_settled


@pytest.mark.parametrize(("ctime_ns", "is_older"), [(10**18 + 1, True), (10**18, False)])
def test_a_stamp_of_whole_seconds_is_older_only_by_its_tick(ctime_ns: int, is_older: bool) -> None:
    stamp = Stamp(1, 1, 1, 0, ctime_ns)
    assert stamp.is_older(ctime_ns) is is_older
    assert stamp.is_older(ctime_ns + COARSE_NS)
    assert not stamp.is_older(ctime_ns - 1)
