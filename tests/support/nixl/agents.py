"""What the tests of the NIXL connector share: memory, waiting, and the surface of a package."""

from __future__ import annotations

import contextlib
import inspect
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from kvxfer.connectors.nixl import nixl_agent, nixl_xfer_handle

MakeAgent: TypeAlias = Callable[..., nixl_agent]
PATIENCE_S = 30.0
POISON = 0xA5


def memory(length: int, seed: int | None = None) -> npt.NDArray[np.uint8]:
    """``length`` bytes: poisoned, or random by ``seed``."""
    if seed is None:
        return np.full(length, POISON, np.uint8)
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def row(array: npt.NDArray[np.uint8], begin: int = 0, length: int | None = None) -> tuple[int, int, int]:
    return (int(array.ctypes.data) + begin, len(array) - begin if length is None else length, 0)


def register(agent: nixl_agent, *arrays: npt.NDArray[np.uint8]) -> Any:
    return agent.register_memory([(*row(array), "") for array in arrays], "DRAM")


def rows(array: npt.NDArray[np.uint8], block: int) -> npt.NDArray[np.uint64]:
    """Every block of ``array``, shape [n, 3]."""
    table = np.zeros((len(array) // block, 3), np.uint64)
    table[:, 0] = int(array.ctypes.data) + np.arange(len(table)) * block
    table[:, 1] = block
    return table


def until(condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """What ``condition`` says as soon as it says something."""
    end_s = time.monotonic() + patience_s
    while not (said := condition()):
        assert time.monotonic() < end_s, f"{condition} said nothing within {patience_s} s"
        time.sleep(0.001)
    return said


def finish(agent: nixl_agent, handle: nixl_xfer_handle, state: str | None = None) -> None:
    """Post (where no state is given) and wait for the end; raises what ended it."""
    state = agent.transfer(handle) if state is None else state
    assert until(lambda: state == "DONE" or agent.check_xfer_state(handle) == "DONE")


def notifications(agent: nixl_agent, count: int = 1) -> dict[str, list[bytes]]:
    """At least ``count`` of them."""
    found: dict[str, list[bytes]] = {}

    def look() -> bool:
        for name, messages in agent.get_new_notifs().items():
            found.setdefault(name, []).extend(messages)
        return sum(map(len, found.values())) >= count

    until(look)
    return found


@contextlib.contextmanager
def held_port(host: str = "127.0.0.1") -> Iterator[int]:
    """One without a listener, which the kernel gives only to a process that asks for it by its number."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])


@contextlib.contextmanager
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What goes to NIXL's loggers, which tell no others."""
    logger = logging.getLogger("nixl")
    logger.addHandler(caplog.handler)
    try:
        yield caplog
    finally:
        logger.removeHandler(caplog.handler)


CLASSES = ("nixl_agent", "nixl_agent_config", "nixl_prepped_dlist_handle", "nixl_xfer_handle")
BOUND = ("nixlAgent", "nixlAgentConfig", "nixlXferDList", "nixlRegDList", "nixlRemoteDList", "nixlXferTelemetry")
ENUMS = ("nixl_mem_t", "nixl_xfer_op_t", "nixl_status_t", "nixl_thread_sync_t", "nixl_cost_t")


def surface(api: Any, bindings: Any, utils: Any) -> dict[str, Any]:
    """What a program can see of NIXL's package, as JSON: parameters with kinds and defaults, names, numbers."""
    calls: dict[str, Any] = {}
    for name in CLASSES:
        kind = getattr(api, name)
        for method, function in inspect.getmembers(kind, callable):
            if method == "__init__" or not method.startswith("_"):
                calls[f"{name}.{method}"] = _parameters(function)
    names = sorted(name for name in dir(bindings) if not name.startswith("_"))
    bound = {name: _bound_names(getattr(bindings, name)) for name in BOUND}
    enums = {name: {m: int(v) for m, v in getattr(bindings, name).__members__.items()} for name in ENUMS}
    return {
        "calls": calls,
        "names": names,
        "bound": bound,
        "enums": enums,
        "exceptions": sorted(name for name in names if name.startswith("nixl") and name.endswith("Error")),
        "constants": {name: getattr(bindings, name) for name in ("DEFAULT_COMM_PORT", "NIXL_INIT_AGENT")},
        "utils": sorted(name for name in dir(utils) if not name.startswith("_") and callable(getattr(utils, name))),
    }


def _parameters(function: Any) -> list[list[str]]:
    found = []
    for parameter in inspect.signature(function).parameters.values():
        default = "" if parameter.default is inspect.Parameter.empty else repr(parameter.default)
        found.append([parameter.name, parameter.kind.name, default])
    return found


def _bound_names(kind: Any) -> list[str]:
    instance_names = set(vars(kind()) if kind.__name__ == "nixlAgentConfig" and hasattr(kind(), "__dict__") else ())
    names = {name for name in dir(kind) if not name.startswith("_")} | instance_names
    return sorted(names)
