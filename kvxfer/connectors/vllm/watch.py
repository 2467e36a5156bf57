"""Watches vLLM load: puts a look at the files around its own loading of weights and LoRA adapters, and notes whatever
changes weights in memory. vLLM has no hook for that, so its classes are wrapped. What a version of vLLM does not have
is left out; then what it would have told is unknown, and prompts are computed where they are wanted.

Nothing here may make vLLM fail that would not have failed without it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import pathlib
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from kvxfer.clock import NS_PER_S
from kvxfer.connectors.common.checkpoint import is_weight_file
from kvxfer.connectors.common.stamps import COARSE_NS, FINE_NS, Stamp, stamp_of
from kvxfer.connectors.vllm.adapters import Files, adapter_files
from kvxfer.connectors.vllm.loaded import LOADED, Loaded, source_of

log = logging.getLogger("kvxfer.vllm")

CHANGING = (
    "apply_model",
    "checkpoint_restore",
    "discard",
    "load_weights",
    "reload_weights",
    "reset_weights",
    "start_draft_weight_update",
    "start_weight_update",
    "update_weights",
)
"""Methods of vLLM's workers after which weights in memory need not be those of the files."""
SLEEP_KEEPS_LEVEL = 1
"""vLLM's sleep of that level keeps the weights; a deeper one throws them away."""
_MARK = "_kvxfer_watched"


def watch_vllm() -> None:
    """Wrap what decides what is loaded. Callable twice; before workers are made."""
    try:
        from vllm.v1.worker.worker_base import WorkerBase
    except ImportError as error:
        log.warning("vLLM's workers cannot be watched: %s", error)
        return
    _wrap(WorkerBase, "__init__", _after_worker_init)
    for kind in _subclasses(WorkerBase):  # of workers that are there already
        for name in (*CHANGING, "sleep"):
            if name in vars(kind):
                _wrap(kind, name, functools.partial(_method_changes, name, LOADED))
    watch_adapters()
    core = sys.modules.get("vllm.v1.engine.core")
    if core is not None and hasattr(core, "EngineCore"):
        _wrap(core.EngineCore, "collective_rpc", _around_collective_rpc)
        _wrap(core.EngineCore, "sleep", functools.partial(_method_changes, "sleep", LOADED))


def watch_worker(worker: Any, loaded: Loaded = LOADED) -> None:
    """Wrap one worker's own methods, and the classes that load for it."""
    for name in CHANGING:
        if callable(getattr(worker, name, None)):
            _replace(worker, name, functools.partial(_changes, name, loaded))
    if callable(getattr(worker, "sleep", None)):
        _replace(worker, "sleep", functools.partial(_sleeps, loaded))
    if callable(getattr(worker, "load_model", None)):
        _replace(worker, "load_model", functools.partial(_loads_model, worker, loaded))
    for name in _extension_methods(worker):
        _replace(worker, name, functools.partial(_changes, name, loaded))
    _watch_loaders(loaded)
    watch_adapters(loaded)


def watch_adapters(loaded: Loaded = LOADED) -> None:
    """Wrap the function with which workers load an adapter from its files, once a worker has imported it."""
    module = sys.modules.get("vllm.lora.worker_manager")
    manager = getattr(module, "WorkerLoRAManager", None)
    if hasattr(manager, "_load_adapter"):
        _wrap(manager, "_load_adapter", functools.partial(_around_load_adapter, loaded))
        loaded.is_watching = True


# --- what is wrapped around ---


def _after_worker_init(original: Callable[..., Any], worker: Any, *arguments: Any, **more: Any) -> Any:
    result = original(worker, *arguments, **more)
    _quietly(watch_worker, worker)
    return result


def _around_collective_rpc(original: Callable[..., Any], core: Any, method: Any, *arguments: Any, **more: Any) -> Any:
    is_own = str(getattr(method, "__module__", "")).startswith("vllm.")  # it measures, when it starts
    if not isinstance(method, str) and not is_own:
        LOADED.changed("a function of its own was run in the workers, which may change weights")
    elif isinstance(method, str) and (method in CHANGING or _is_of_extension(core, method)):
        # where workers are other processes, what they see is not seen here
        LOADED.changed(f"{method} was called: weights in memory are no longer those of the files")
    return original(core, method, *arguments, **more)


def _is_of_extension(core: Any, method: str) -> bool:
    """Whether an operator put something into the worker's class that is no method of vLLM's own."""
    parallel = getattr(getattr(core, "vllm_config", None), "parallel_config", None)
    if not getattr(parallel, "worker_extension_cls", ""):
        return False
    from vllm.v1.worker.worker_base import WorkerBase

    kinds = (WorkerBase, *_subclasses(WorkerBase))
    return not any(method in vars(kind) for kind in kinds if kind.__module__.startswith("vllm."))


def _method_changes(
    name: str, loaded: Loaded, original: Callable[..., Any], worker: Any, *arguments: Any, **more: Any
) -> Any:
    around = functools.partial(_sleeps, loaded) if name == "sleep" else functools.partial(_changes, name, loaded)
    return around(functools.partial(original, worker), *arguments, **more)


def _changes(name: str, loaded: Loaded, original: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    loaded.changed(f"{name} was called: weights in memory are no longer those of the files")
    return original(*arguments, **more)


def _sleeps(loaded: Loaded, original: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    level = arguments[0] if arguments else more.get("level", SLEEP_KEEPS_LEVEL)
    if level not in (0, SLEEP_KEEPS_LEVEL):
        loaded.changed(f"the engine slept at level {level}, which throws weights away")
    return original(*arguments, **more)


def _loads_model(worker: Any, loaded: Loaded, original: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    loaded.begin()
    result = original(*arguments, **more)
    _quietly(_guard_models, worker, loaded)
    return result


def _guard_models(worker: Any, loaded: Loaded) -> None:
    """From now on whatever is loaded into the models does not come from the files."""
    runner = getattr(worker, "model_runner", None)
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    for model in (_model_of(runner), getattr(drafter, "model", None)):
        if callable(getattr(model, "load_weights", None)):
            _replace(model, "load_weights", functools.partial(_changes, "load_weights", loaded))


def _model_of(runner: Any) -> Any:
    find = getattr(runner, "get_model", None)
    return find() if callable(find) else getattr(runner, "model", None)


def _around_prepare_weights(
    loaded: Loaded, original: Callable[..., Any], loader: Any, *arguments: Any, **more: Any
) -> Any:
    """The files are there now, and none has been read yet."""
    result = original(loader, *arguments, **more)
    _quietly(_note_files, loaded, result)
    return result


def _note_files(loaded: Loaded, found: Any) -> None:
    _let_settle(stamps_in(_texts(found)).values(), COARSE_NS)  # as after a download
    loaded.read(stamps_in(_texts(found)))


def _let_settle(stamps: Iterable[Stamp], most_ns: int) -> None:
    """Wait until files that were written a moment ago can be told from what they may become; where that takes more than
    ``most_ns``, for nothing."""
    now_ns = time.time_ns()
    left_ns = max((stamp.unsettled_ns(now_ns) for stamp in stamps), default=0)
    if 0 < left_ns <= most_ns:
        time.sleep(left_ns / NS_PER_S)


def stamps_in(texts: Iterable[str]) -> dict[str, Stamp]:
    """Of the files that are named, and of the weight files in the directories that are named, or hold those files."""
    places = {pathlib.Path(os.path.abspath(text)) for text in texts if os.path.exists(text)}
    folders = {place if place.is_dir() else place.parent for place in places}
    beside = {path for folder in folders for path in folder.iterdir() if is_weight_file(path)}
    files = {place for place in places if place.is_file()} | {path for path in beside if path.is_file()}
    return {str(path): stamp_of(path) for path in files}


def _around_load_adapter(loaded: Loaded, original: Callable[..., Any], manager: Any, request: Any) -> Any:
    directory, before, why = "", None, ""
    try:
        directory = _adapter_directory(request)
        _let_settle((stamp for _, stamp in adapter_files(directory)), FINE_NS)  # the engine's step waits
        before = adapter_files(directory)
    except Exception as error:  # vLLM will say what is wrong, where it is wrong for vLLM
        why = f"its files could not be looked at before they were loaded: {error}"
    at_ns = time.time_ns()
    result = original(manager, request)
    _quietly(_note_adapter, loaded, manager, request, directory, before, why, at_ns)
    return result


def _note_adapter(
    loaded: Loaded, manager: Any, request: Any, directory: str, before: Files | None, why: str, at_ns: int
) -> None:
    if before is not None:
        try:
            after = adapter_files(directory)
        except OSError:
            after = ()
        if after != before:
            why = "its files were changed while they were loaded"
        elif not all(stamp.was_settled(at_ns) for _, stamp in before):
            why = "its files were written just before they were loaded"
    source = source_of(manager)
    name = str(getattr(request, "lora_name", ""))
    loaded.adapter(source, int(request.lora_int_id), directory, before or (), why, name)
    if not hasattr(manager, _MARK):
        setattr(manager, _MARK, weakref.finalize(manager, loaded.forget_source, source))


def _adapter_directory(request: Any) -> str:
    """Where vLLM will read it from. Raises whatever the hub's client does, ValueError."""
    if getattr(request, "tensorizer_config_dict", None):
        raise ValueError("it comes from tensorizer")
    from vllm.lora.utils import get_adapter_absolute_path

    directory = os.path.abspath(str(get_adapter_absolute_path(request.lora_path)))
    if not os.path.isdir(directory):
        raise ValueError(f"{directory} is no directory")
    return directory


# --- how ---


def _watch_loaders(loaded: Loaded) -> None:
    """Every loader class that finds its files by one method, before it reads them."""
    package = sys.modules.get("vllm.model_executor.model_loader")
    base = getattr(package, "BaseModelLoader", None)
    for loader in _subclasses(base) if base is not None else ():
        if "_prepare_weights" in vars(loader):
            _wrap(loader, "_prepare_weights", functools.partial(_around_prepare_weights, loaded))


def _subclasses(kind: type) -> Iterable[type]:
    child: type
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


def _extension_methods(worker: Any) -> list[str]:
    """What an operator put into the worker's class, to be called from outside: to load weights, as a rule."""
    name = getattr(getattr(worker, "parallel_config", None), "worker_extension_cls", "")
    if not name:
        return []
    found = [kind for kind in type(worker).__mro__ if f"{kind.__module__}.{kind.__qualname__}" == name]
    return [each for kind in found for each in dir(kind) if not each.startswith("__") and callable(getattr(kind, each))]


def _texts(found: Any) -> Iterable[str]:
    if isinstance(found, str):
        yield found
    elif isinstance(found, (list, tuple)):
        for item in found:
            yield from _texts(item)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Have ``around(original, self, ...)`` called for a method of a class. Again: nothing."""
    if inspect.isfunction(getattr(owner, name, None)):
        _replace(owner, name, around)


def _replace(thing: Any, name: str, around: Callable[..., Any]) -> None:
    """Have ``around(original, ...)`` called for a method of one object. Again: nothing."""
    original = getattr(thing, name)
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def wrapper(*arguments: Any, **more: Any) -> Any:
        return around(original, *arguments, **more)

    setattr(wrapper, _MARK, True)
    setattr(thing, name, wrapper)


def _quietly(function: Callable[..., Any], *arguments: Any) -> None:
    try:
        function(*arguments)
    except Exception:
        log.exception("vLLM could not be watched")
