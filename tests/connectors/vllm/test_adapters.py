"""Which adapter a request is computed with: what was loaded, as long as its files are what they were then."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from kvxfer.connectors.common.digest_cache import DigestCache
from kvxfer.connectors.vllm import adapters as adapters_module
from kvxfer.connectors.vllm.adapters import Adapters, adapter_digest, adapter_files
from kvxfer.connectors.vllm.loaded import ADAPTERS_MAX, AdapterLoad, Loaded, source_of
from kvxfer.types import why_unknown

REQUEST = SimpleNamespace(lora_int_id=7, lora_name="poet", lora_path="ignored")
WAIT_S = 10.0

Load = Callable[..., None]


def write(directory: pathlib.Path, weights: bytes = b"w" * 5000) -> pathlib.Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text('{"r": 8}')
    (directory / "adapter_model.safetensors").write_bytes(weights)
    (directory / "README.md").write_text("about it")
    return directory


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> pathlib.Path:
    return write(tmp_path / "adapter")


@pytest.fixture
def loaded() -> Loaded:
    return Loaded()


@pytest.fixture
def load(loaded: Loaded, directory: pathlib.Path) -> Load:
    """One worker loads what is there now."""

    def call(source: str = "worker", why: str = "", place: pathlib.Path = directory) -> None:
        loaded.adapter(source, 7, str(place), adapter_files(str(place)), why)

    return call


@pytest.fixture
def adapters(loaded: Loaded) -> Iterator[Adapters]:
    adapters = Adapters(1, "f32", loaded=loaded, cache=DigestCache(None))
    yield adapters
    adapters.stop()


def known(adapters: Adapters) -> str:
    """Once it was read in the background."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        found = adapters.fingerprint(REQUEST)
        if why_unknown(found) is None:
            return found
        assert "still being read" in found, found
    raise AssertionError("it was never read")


def why(adapters: Adapters) -> str:
    found = why_unknown(adapters.fingerprint(REQUEST))
    assert found is not None
    return found


def test_adapter_is_fingerprinted_as_it_was_loaded(adapters: Adapters, load: Load, directory: pathlib.Path) -> None:
    load()
    assert known(adapters) == f"{adapter_digest(dict(adapter_files(str(directory))), DigestCache(None))} f32"


def test_adapter_whose_load_was_not_seen_is_unknown(adapters: Adapters, loaded: Loaded) -> None:
    assert "'poet' was not seen loaded by any worker" in why(adapters)
    loaded.is_watching = True
    assert "'poet' has not been loaded by all workers yet" in why(adapters)
    assert adapters.fingerprint(REQUEST) != adapters.fingerprint(REQUEST)


def test_an_adapter_replaced_in_place_is_unknown_until_it_is_loaded_again(
    adapters: Adapters, load: Load, directory: pathlib.Path
) -> None:
    load()
    before = known(adapters)
    write(directory, b"v" * 5000)
    assert "changed after they were loaded" in why(adapters)
    write(directory, b"w" * 5000)  # back: but another state of the files
    assert "changed after they were loaded" in why(adapters)
    load()
    assert known(adapters) == before
    write(directory, b"v" * 5000)
    load()
    assert known(adapters) != before


@pytest.mark.parametrize("change", ["another file", "one file less", "gone"])
def test_an_adapter_whose_directory_changed_is_unknown(
    change: str, adapters: Adapters, load: Load, directory: pathlib.Path
) -> None:
    load()
    known(adapters)
    if change == "another file":
        (directory / "adapter_extra.bin").touch()
    elif change == "one file less":
        (directory / "adapter_config.json").unlink()
    else:
        directory.rename(directory.with_name("away"))
    assert "changed after they were loaded" in why(adapters)


def test_a_name_remembers_that_it_was_anothers(
    adapters: Adapters, loaded: Loaded, load: Load, directory: pathlib.Path
) -> None:
    for number in (7, 8):  # loaded, pushed out, and loaded again
        loaded.adapter("worker", number, str(directory), adapter_files(str(directory)), name="poet")
    assert not adapters.was_another(REQUEST)
    write(directory, b"v" * 5000)
    loaded.adapter("worker", 9, str(directory), adapter_files(str(directory)), name="poet")
    assert adapters.was_another(REQUEST)
    assert not adapters.was_another(SimpleNamespace(lora_name="clerk"))


def test_other_files_beside_an_adapter_do_not_count(adapters: Adapters, load: Load, directory: pathlib.Path) -> None:
    load()
    before = known(adapters)
    (directory / "README.md").write_text("more about it")
    assert known(adapters) == before


def test_an_adapter_changed_while_it_was_loaded_is_unknown(adapters: Adapters, load: Load) -> None:
    load(why="its files were changed while they were loaded")
    assert why(adapters) == "LoRA adapter 'poet': its files were changed while they were loaded"


def test_an_adapter_is_known_when_all_ranks_loaded_the_same(
    loaded: Loaded, load: Load, tmp_path: pathlib.Path, directory: pathlib.Path
) -> None:
    adapters = Adapters(2, loaded=loaded, cache=DigestCache(None))
    load("rank 0")
    assert "by any worker" in why(adapters)
    load("rank 1", place=write(tmp_path / "other", b"x"))
    assert "not all workers have loaded the same" in why(adapters)
    load("rank 1")
    known(adapters)
    load("rank 1", why="it was changed")
    assert "it was changed" in why(adapters)
    adapters.stop()


def test_an_adapter_whose_files_change_before_they_are_read_is_unknown(
    adapters: Adapters, loaded: Loaded, directory: pathlib.Path
) -> None:
    files = adapter_files(str(directory))
    write(directory, b"other, and of another length")
    loaded.adapter("worker", 7, str(directory), files)
    assert "changed" in why(adapters)


def test_an_adapter_whose_reading_breaks_is_unknown_and_says_why(
    adapters: Adapters, load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(*_: object) -> str:
        raise ValueError("of no kind that was thought of")

    monkeypatch.setattr(adapters_module, "adapter_digest", breaks)
    load()
    end_s = time.monotonic() + WAIT_S
    while "still being read" in why(adapters):
        assert time.monotonic() < end_s
    assert "ValueError('of no kind that was thought of')" in why(adapters)
    assert "Traceback" in caplog.text


def test_loads_that_are_told_twice_or_late_count_once(loaded: Loaded) -> None:
    loads = [AdapterLoad("a", number, 7, f"/{number}", ()) for number in (1, 2)]
    loaded.take(loads)
    loaded.take(loads[:1])
    assert [load.path for load in loaded.loads_of(7)] == ["/2"]
    heard: list[str] = []
    end = loaded.listen_adapters(lambda load: heard.append(load.path))
    loaded.take(loads)
    loaded.take([AdapterLoad("a", 3, 7, "/3", ())])
    end()
    end()
    loaded.take([AdapterLoad("a", 4, 7, "/4", ())])
    assert heard == ["/2", "/3"]


def test_loads_of_this_process_are_told_once_to_others(loaded: Loaded) -> None:
    mine = source_of(loaded)
    loaded.take([AdapterLoad("another process", 9, 1, "/far", ())])
    loaded.adapter(mine, 1, "/one", ())
    loaded.adapter(mine, 2, "/two", ())
    first = loaded.adapters_since(0)
    assert [load.path for load in first] == ["/one", "/two"]
    assert loaded.adapters_since(first[-1].number) == ()
    loaded.forget_source(mine)
    assert loaded.adapters_since(0) == ()


def test_so_many_loads_are_remembered_and_no_more(loaded: Loaded) -> None:
    loaded.take(AdapterLoad("a", number, number, "/", ()) for number in range(1, ADAPTERS_MAX + 2))
    assert loaded.loads_of(1) == ()
    assert len(loaded.loads_of(2)) == len(loaded.loads_of(ADAPTERS_MAX + 1)) == 1
