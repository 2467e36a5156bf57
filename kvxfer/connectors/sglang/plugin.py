"""What SGLang calls at start in each of its processes (entry point group ``sglang.srt.plugins``): makes the transfer
backend known by its name, and watches for changed weights.

SGLang logs what a plugin raises and goes on. So the name is always registered, and where it cannot work that is said
where SGLang does not swallow it: when the main process checks its arguments, and again by the classes that it asks for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn

from kvxfer.connectors.sglang.limits import check_arguments
from kvxfer.connectors.sglang.one_answer import READ, refuse_several
from kvxfer.connectors.sglang.options import Options
from kvxfer.connectors.sglang.updates import UPDATES
from kvxfer.connectors.sglang.versions import adapter_of, installed_version
from kvxfer.errors import ConfigError

NAME = "kvxfer"
MEMBER = "KVXFER"
GET_CLASS = "sglang.srt.disaggregation.utils.get_kv_class"
CHECK_ARGUMENTS = "sglang.srt.arg_groups.validation_hook.check_server_args"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
PAUSE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.pause_generation"
UPDATES_OF = (
    *("update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor"),
    *("update_weights_from_ipc", "begin_weight_update"),
)
"""Methods of SGLang that change weights in memory."""
HOLD_UNTIL_DRAINED = {
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE": "1",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "86400",
}
"""So that decode asks :meth:`is_abort_release_safe` before it uses a failed request's pages anew, and believes it:
without the second it would not after 30 s. Each process inherits them from the main one."""

_registered: set[str] = set()
"""The hooks of this process: SGLang would call one that is registered twice twice."""


def register() -> None:
    """Callable twice."""
    add_choice()
    with contextlib.suppress(ImportError):  # the name is there; get_kv_class of such a version refuses it by name
        add_member()
    from sglang.srt.plugins.hook_registry import HookType

    hooks: list[tuple[str, Callable[..., Any], Any]] = [
        (GET_CLASS, find_class, HookType.AROUND),
        (CHECK_ARGUMENTS, check_first, HookType.BEFORE),
        (READ, refuse_several, HookType.AFTER),
        *((f"{UPDATER}.{name}", functools.partial(note_update, name), HookType.BEFORE) for name in UPDATES_OF),
    ]
    add_hooks(hooks)


def add_hooks(hooks: Iterable[tuple[str, Callable[..., Any], Any]]) -> None:
    """Register hooks (target, hook, type) that this process does not have yet."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    for target, hook, kind in hooks:
        if target not in _registered:
            _registered.add(target)
            HookRegistry.register(target, hook, kind)


def add_choice() -> None:
    """Let ``--disaggregation-transfer-backend kvxfer`` be an argument."""
    from sglang.srt import server_args

    if NAME not in server_args.DISAGG_TRANSFER_BACKEND_CHOICES:
        server_args.add_disagg_transfer_backend_choices([NAME])


def add_member() -> None:
    """Let ``TransferBackend("kvxfer")`` be a member of SGLang's closed enumeration."""
    from sglang.srt.disaggregation.utils import TransferBackend

    if NAME in TransferBackend._value2member_map_:
        return
    member = object.__new__(TransferBackend)
    member._name_, member._value_ = MEMBER, NAME
    member.__objclass__ = TransferBackend
    member._sort_order_ = len(TransferBackend)
    TransferBackend._member_map_[MEMBER] = member
    TransferBackend._member_names_.append(MEMBER)
    TransferBackend._value2member_map_[NAME] = member


def find_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    """``get_kv_class`` for every backend, ours among them."""
    if getattr(transfer_backend, "value", None) != NAME or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    try:
        adapter = importlib.import_module(adapter_of(installed_version()))
        Options.from_environment(os.environ)
    except ConfigError as error:
        return refusing(error)
    return adapter.CLASSES[class_type.value]


def refusing(error: ConfigError) -> type:
    """A class that raises ``error`` wherever SGLang makes an object of it."""

    class Refusing:
        def __init__(self, *_: Any, **__: Any) -> None:
            self._refuse()

        def _refuse(self) -> NoReturn:
            raise ConfigError(str(error)) from None

    return Refusing


def check_first(server_args: Any, *_: Any, **__: Any) -> None:
    """Before SGLang checks its arguments, in the main process: raise ConfigError where this backend is asked for and
    cannot work with them. What it needs in the environment of the other processes is put there."""
    from sglang.srt.arg_groups.overrides import resolving_view

    arguments = resolving_view(server_args)
    if arguments.disaggregation_transfer_backend != NAME or arguments.disaggregation_mode == "null":
        return
    adapter_of(installed_version())
    Options.from_environment(os.environ)
    check_arguments(arguments)
    for variable, value in HOLD_UNTIL_DRAINED.items():
        os.environ.setdefault(variable, value)
    if arguments.disaggregation_mode == "prefill":
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        add_hooks([(PAUSE, tell_schedulers, HookType.AROUND)])
        HookRegistry.apply_hooks()


async def tell_schedulers(pause: Callable[..., Awaitable[Any]], tokenizer: Any, request: Any) -> Any:
    """Around a pause in a prefill engine's main process, which keeps new prompts to itself until the pause is over. In
    mode ``abort`` SGLang tells no scheduler, so this does: decode engines that ask for such a prompt must wait."""
    if request.mode == "abort":
        await tokenizer._async_dispatch_to_scheduler(request)
    return await pause(tokenizer, request)


def note_update(name: str, *_: Any, **__: Any) -> None:
    """Before SGLang changes weights in memory."""
    UPDATES.changed(f"SGLang changed the weights in memory ({name})")
