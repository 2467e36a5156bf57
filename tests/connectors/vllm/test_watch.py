"""What is put around vLLM's own loading, against stand-ins for its classes: what is told, and that nothing of vLLM's
behaves otherwise. tests/vllm tries the classes of the installed version."""

from __future__ import annotations

import gc
import os
import pathlib
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.vllm import watch
from kvxfer.connectors.vllm.loaded import Loaded


class Model:
    def __init__(self) -> None:
        self.weights: list[str] = []

    def load_weights(self, weights: list[str]) -> int:
        self.weights += weights
        return len(weights)


class Extension:
    def receive_from_trainer(self) -> str:
        return "received"


class Worker(Extension):
    def __init__(self, extension: str = "") -> None:
        self.model_runner = SimpleNamespace(model=Model(), drafter=SimpleNamespace(model=Model()))
        self.parallel_config = SimpleNamespace(worker_extension_cls=extension)
        self.asleep = 0

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.model_runner.model.load_weights(["from files"])

    def sleep(self, level: int = 1) -> None:
        self.asleep = level

    def update_weights(self, info: str) -> str:
        return info

    def execute_model(self) -> str:
        return "tokens"


@pytest.fixture
def loaded() -> Loaded:
    return Loaded()


@pytest.fixture
def told(loaded: Loaded) -> list[str]:
    told: list[str] = []
    loaded.listen(told.append)
    return told


@pytest.fixture
def worker(loaded: Loaded) -> Worker:
    worker = Worker()
    watch.watch_worker(worker, loaded)
    return worker


def test_loading_a_model_from_its_files_changes_nothing_and_loading_into_it_later_does(
    worker: Worker, told: list[str]
) -> None:
    worker.load_model()
    assert told == []
    assert worker.model_runner.model.load_weights(["from a trainer"]) == 1
    assert worker.model_runner.model.weights == ["from files", "from a trainer"]
    assert told == ["load_weights was called: weights in memory are no longer those of the files"]
    worker.model_runner.drafter.model.load_weights([])
    assert len(told) == 2


def test_methods_that_change_weights_are_told_of_and_answer_as_before(worker: Worker, told: list[str]) -> None:
    assert worker.update_weights("chunk") == "chunk"
    assert told == ["update_weights was called: weights in memory are no longer those of the files"]
    assert worker.execute_model() == "tokens"
    assert len(told) == 1


@pytest.mark.parametrize(
    ("arguments", "named", "is_told"),
    [((), {}, False), ((1,), {}, False), ((2,), {}, True), ((), {"level": 2}, True)],
)
def test_a_sleep_that_throws_weights_away_is_told_of(
    arguments: tuple[int, ...], named: dict[str, int], is_told: bool, worker: Worker, told: list[str]
) -> None:
    worker.sleep(*arguments, **named)
    assert worker.asleep == (2 if is_told else 1)
    assert bool(told) is is_told


def test_unknown_worker_method_counts_as_a_change_of_weights(loaded: Loaded, told: list[str]) -> None:
    worker = Worker(f"{Extension.__module__}.{Extension.__qualname__}")
    watch.watch_worker(worker, loaded)
    assert worker.receive_from_trainer() == "received"
    assert told == ["receive_from_trainer was called: weights in memory are no longer those of the files"]


def test_a_function_that_is_run_in_the_workers_is_told_of_unless_it_is_vllms(
    loaded: Loaded, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def untyped(worker: Any) -> None: ...

    def own(worker: Any) -> None: ...

    own.__module__ = "vllm.distributed.somewhere"
    monkeypatch.setattr(watch, "LOADED", loaded)
    for method in ("execute_model", own):
        assert watch._around_collective_rpc(lambda _, method: method, None, method) is method
    assert told == []
    watch._around_collective_rpc(lambda _, method: method, None, untyped)
    assert told == ["a function of its own was run in the workers, which may change weights"]


def test_a_worker_is_watched_once(worker: Worker, loaded: Loaded, told: list[str]) -> None:
    watch.watch_worker(worker, loaded)
    worker.load_model()
    worker.load_model()
    worker.update_weights("chunk")
    worker.model_runner.model.load_weights([])
    assert len(told) == 3  # with the second load, which the first one guards


def test_a_worker_of_another_kind_is_left_alone(loaded: Loaded, told: list[str]) -> None:
    worker = SimpleNamespace(load_model=lambda: "loaded", model_runner=None)
    watch.watch_worker(worker, loaded)
    assert worker.load_model() == "loaded"
    assert told == []


# --- weight files ---


def test_files_are_looked_at_between_being_found_and_being_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, loaded: Loaded
) -> None:
    class BaseModelLoader:
        pass

    class Loader(BaseModelLoader):
        def _prepare_weights(self, name: str) -> tuple[str, list[str], bool]:
            (tmp_path / "model.safetensors").write_bytes(b"fetched")
            return str(tmp_path), [str(tmp_path / "model.safetensors"), name], True

    (tmp_path / "other.bin").write_bytes(b"not read by it, and a weight file")
    (tmp_path / "config.json").touch()
    package = ModuleType("vllm.model_executor.model_loader")
    package.BaseModelLoader = BaseModelLoader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    watch.watch_worker(SimpleNamespace(), loaded)
    watch.watch_worker(SimpleNamespace(), loaded)
    assert Loader()._prepare_weights("org/model")[2] is True
    for name, is_seen in (("model.safetensors", True), ("other.bin", True), ("config.json", False)):
        assert (loaded.read_as(str(tmp_path / name)) is not None) is is_seen
    loaded.begin()
    assert loaded.read_as(str(tmp_path / "model.safetensors")) is None


# --- adapters ---


class Manager:
    """vLLM's WorkerLoRAManager."""

    during: Any = None

    def _load_adapter(self, lora_request: Any) -> str:
        if self.during is not None:
            self.during()
        return f"loaded {lora_request.lora_path}"


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch, loaded: Loaded) -> Any:
    kind = type("WorkerLoRAManager", (Manager,), {"_load_adapter": Manager._load_adapter})
    module, utils = ModuleType("vllm.lora.worker_manager"), ModuleType("vllm.lora.utils")
    module.WorkerLoRAManager = kind  # type: ignore[attr-defined]
    utils.get_adapter_absolute_path = lambda path: path  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for each in (module, utils):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    watch.watch_adapters(loaded)
    watch.watch_adapters(loaded)
    return kind()


@pytest.fixture
def adapter(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A request for one whose files were left alone for long, as the watch's clock goes."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"w")
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    now_ns = time.time_ns() + 10**10
    monkeypatch.setattr(watch.time, "time_ns", lambda: now_ns)
    return SimpleNamespace(lora_int_id=3, lora_path=str(tmp_path), lora_name="a")


def test_a_load_of_an_adapter_is_told_with_the_state_of_its_files(manager: Any, adapter: Any, loaded: Loaded) -> None:
    assert loaded.is_watching
    assert manager._load_adapter(adapter) == f"loaded {adapter.lora_path}"
    (load,) = loaded.loads_of(3)
    assert load.why == ""
    assert [os.path.basename(path) for path, _ in load.files] == ["adapter_config.json", "adapter_model.safetensors"]


def test_an_adapter_whose_files_change_while_it_is_loaded_is_told_as_unknown(
    manager: Any, adapter: Any, loaded: Loaded
) -> None:
    manager.during = lambda: os.utime(os.path.join(adapter.lora_path, "adapter_model.safetensors"), ns=(1, 1))
    manager._load_adapter(adapter)
    assert loaded.loads_of(3)[0].why == "its files were changed while they were loaded"


@pytest.fixture
def clock(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The watch's own; it begins just after the adapter was written."""
    clock = SimpleNamespace(now_ns=os.stat(os.path.join(adapter.lora_path, "adapter_config.json")).st_ctime_ns + 1)
    monkeypatch.setattr(watch.time, "time_ns", lambda: clock.now_ns)
    return clock


def test_an_adapter_written_just_before_it_is_loaded_waits_for_its_tick(
    manager: Any, adapter: Any, loaded: Loaded, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now_ns += round(seconds * 1e9)

    monkeypatch.setattr(watch.time, "sleep", sleep)
    manager._load_adapter(adapter)
    assert loaded.loads_of(3)[0].why == ""
    manager._load_adapter(adapter)
    assert len(slept) == 1
    assert 0 < slept[0] <= 0.1


def test_an_adapter_written_just_before_it_was_loaded_is_told_as_unknown(
    manager: Any, adapter: Any, loaded: Loaded, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that keeps whole seconds: the engine does not wait for so long."""
    monkeypatch.setattr(watch.time, "sleep", lambda _: None)
    manager._load_adapter(adapter)
    assert loaded.loads_of(3)[0].why == "its files were written just before they were loaded"


def test_an_adapter_that_is_no_directory_is_told_as_unknown(manager: Any, adapter: Any, loaded: Loaded) -> None:
    adapter.lora_path = "/nowhere"
    assert manager._load_adapter(adapter) == "loaded /nowhere"
    assert "could not be looked at" in loaded.loads_of(3)[0].why


def test_a_load_that_fails_fails_as_before_and_is_not_told(manager: Any, adapter: Any, loaded: Loaded) -> None:
    def fails() -> None:
        raise FileNotFoundError("as vLLM says it")

    manager.during = fails
    with pytest.raises(FileNotFoundError, match="as vLLM says it"):
        manager._load_adapter(adapter)
    assert loaded.loads_of(3) == ()


def test_a_manager_that_is_no_more_has_loaded_nothing(manager: Any, adapter: Any, loaded: Loaded) -> None:
    other = type(manager)()
    other._load_adapter(adapter)
    manager._load_adapter(adapter)
    manager._load_adapter(adapter)
    assert len(loaded.loads_of(3)) == 2
    del other
    gc.collect()
    assert len(loaded.loads_of(3)) == 1
