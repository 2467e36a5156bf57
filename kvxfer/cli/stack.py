"""The whole service on one machine: coordinator, workers, router, each its own process on loopback.

Decides which services are started with which flags, in which order, and when the whole is ready: not before the router
sees every worker. What people are shown of it is the caller's."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import socket
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from kvxfer.cli import asking
from kvxfer.cli.flags import to_flags
from kvxfer.cli.supervise import Child, ChildSpec, Supervisor
from kvxfer.config import check_positive
from kvxfer.errors import ConfigError, DeadlineExceededError, TransportError

POLL_S = 0.1
READY = "/ready"
"""Where workers and router say whether a request would be served."""


@dataclasses.dataclass(frozen=True)
class StackOptions:
    """How the whole service is laid out on this machine."""

    model: str = dataclasses.field(
        default="smollm2-135m-instruct",
        metadata={"help": "name of a known model, hub id, or directory of a Llama-family model"},
    )
    prefill: int = dataclasses.field(default=1, metadata={"help": "prefill workers", "metavar": "N"})
    decode: int = dataclasses.field(default=1, metadata={"help": "decode workers", "metavar": "N"})
    port: int = dataclasses.field(default=8000, metadata={"help": "the router's port on 127.0.0.1; 0: any free one"})
    threads: int = dataclasses.field(
        default=0,
        metadata={"help": "compute threads of each worker; 0 shares the cores out", "metavar": "N"},
    )
    token_file: str = dataclasses.field(
        default="", metadata={"help": "cluster token (0600, made where missing); empty takes the default path"}
    )
    timeout_s: float = dataclasses.field(
        default=180.0,
        metadata={"help": "how long a process that is not ready yet may do nothing", "metavar": "SECONDS"},
    )

    def __post_init__(self) -> None:
        if not 0 <= self.prefill <= 64:
            raise ConfigError(f"prefill must be 0 to 64, not {self.prefill}")
        check_positive("decode", self.decode, maximum=64)
        check_positive("timeout_s", self.timeout_s, maximum=86400)
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be 0 to 65535, not {self.port}")
        if self.threads < 0:
            raise ConfigError(f"threads must be 0 or more, not {self.threads}")


def check_port(port: int) -> None:
    """Raise ConfigError where the router's port is taken: better said before the workers load their models."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on 127.0.0.1:{port}: {error.strerror}; --port names another one, 0: any free one"
            ) from None


def names(options: StackOptions) -> list[str]:
    """Names of the processes, in the order in which they are started."""
    workers = [f"prefill-{n}" for n in range(options.prefill)] + [f"decode-{n}" for n in range(options.decode)]
    return ["coordinator", *workers, "router"]


def threads_each(options: StackOptions, workers: int) -> int:
    """Compute threads of one of ``workers`` workers: the asked number, or an equal share of the cores we may use."""
    return options.threads or max(1, len(os.sched_getaffinity(0)) // workers)


def worker_environment(threads: int) -> dict[str, str]:
    """Environment that keeps numeric libraries to ``threads`` threads and off the network."""
    count = str(threads)
    return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false"}


def worker_spec(name: str, role: str, model: pathlib.Path | str, threads: int, **flags: Any) -> ChildSpec:
    """A worker child; ``flags`` are more fields of WorkerOptions."""
    values = {"role": role, "model": str(model), "threads": threads, "port": 0, **flags}
    words = ["worker", *to_flags(values), "--log-level=info"]
    return ChildSpec(name, words, worker_environment(threads), ready_path=READY)


async def start(
    supervisor: Supervisor,
    options: StackOptions,
    model: pathlib.Path | str,
    *,
    router_flags: Mapping[str, Any] | None = None,
    worker_flags: Mapping[str, Any] | None = None,
) -> Child:
    """Start everything and return the router's child once the router sees every worker. ``router_flags`` and
    ``worker_flags`` are more fields of RouterOptions and WorkerOptions.

    Raises what :meth:`Supervisor.start` raises, and DeadlineExceededError where the workers do not show up at the
    router.
    """
    shared: dict[str, Any] = {"token_file": options.token_file or None}
    coordinator = await supervisor.start(
        ChildSpec("coordinator", ["coordinator", *to_flags({"port": 0, **shared})]), timeout_s=options.timeout_s
    )
    shared["coordinator"] = coordinator.address
    worker_names = names(options)[1:-1]
    threads = threads_each(options, len(worker_names))
    specs = [
        worker_spec(name, name.partition("-")[0], model, threads, agent_id=name, **shared, **(worker_flags or {}))
        for name in worker_names
    ]
    await _all([supervisor.start(spec, timeout_s=options.timeout_s) for spec in specs])
    router_values = {"port": options.port, **shared, **(router_flags or {})}
    router = await supervisor.start(
        ChildSpec("router", ["router", *to_flags(router_values)], ready_path=READY), timeout_s=options.timeout_s
    )
    await wait_workers(router, {name: name for name in worker_names}, timeout_s=30.0)
    return router


async def _all(starts: list[Coroutine[Any, Any, Child]]) -> None:
    """Run all of them at once; the first failure cancels the others and is the one that is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for start_one in starts:
                group.create_task(start_one)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def wait_workers(router: Child, wanted: Mapping[str, str], *, timeout_s: float) -> None:
    """Return once the router would place requests at all of them. ``wanted``: names by ``agent_id`` or ``http_url``.

    Raises DeadlineExceededError after ``timeout_s``, with the names that are missing.
    """
    deadline_s = time.monotonic() + timeout_s
    missing, why = list(wanted.values()), ""
    while True:
        try:
            answer = await asking.get_object(router.http_url, "/v1/workers", timeout_s=5.0)
            ready = [worker for worker in answer["data"] if worker["is_ready"]]
            seen = {str(worker[member]) for worker in ready for member in ("agent_id", "http_url")}
            missing, why = [name for key, name in wanted.items() if key not in seen], ""
        except (TransportError, KeyError, TypeError) as error:  # it is busy
            why = f"; its last answer: {error}"
        if not missing and not why:
            return
        if time.monotonic() > deadline_s:
            raise DeadlineExceededError(f"the router did not see {', '.join(missing)} within {timeout_s:g} s{why}")
        await asyncio.sleep(POLL_S)
