"""The workers that the command line names. Decides which role and dialect a flag stands for; it must never know where
the flags came from."""

from __future__ import annotations

from collections.abc import Iterable

from kvxfer.errors import ConfigError
from kvxfer.protocol.http_url import without_user
from kvxfer.router.fleet.places import Places
from kvxfer.router.fleet.roster import WORKERS_MAX
from kvxfer.router.fleet.worker import EngineDialect, Worker, WorkerSource, read_worker
from kvxfer.types import Role


def workers_from_flags(
    *,
    prefill: Iterable[str] = (),
    decode: Iterable[str] = (),
    engine: Iterable[str] = (),
    dialect: str = EngineDialect.VLLM,
) -> tuple[Worker, ...]:
    """``--prefill``, ``--decode`` and ``--engine``, each an address as `fleet.worker.read_worker` reads it.

    ``dialect`` is that of P and D; an engine by itself is ``plain``. An address that is given as P and as D takes both
    parts. Raises ConfigError for an address that cannot be, and for two workers of one name or at one address.
    """
    given = [(text, Role.PREFILL, dialect, "prefill") for text in prefill]
    prefills, decodes = {text for text, *_ in given}, list(decode)
    both = prefills.intersection(decodes)
    given = [
        *((text, Role.BOTH if text in both else role, spoken, flag) for text, role, spoken, flag in given),
        *((text, Role.DECODE, dialect, "decode") for text in decodes if text not in both),
        *((text, Role.BOTH, EngineDialect.PLAIN.value, "engine") for text in engine),
    ]
    if len(given) > WORKERS_MAX:
        raise ConfigError(
            f"--prefill, --decode and --engine name {len(given)} workers, and at most {WORKERS_MAX} may be"
        )
    workers: list[Worker] = []
    names: set[str] = set()
    places: Places[bool] = Places()
    for text, role, spoken, flag in given:
        try:
            worker = read_worker(text, role, spoken, WorkerSource.FLAGS)
        except ConfigError as error:
            raise ConfigError(f"--{flag} {without_user(text):.200}: {error}") from None
        if worker.agent_id in names or places.find(worker):
            raise ConfigError(f"--{flag} {text:.200}: there is another worker of that name, or at that address")
        names.add(worker.agent_id)
        places.take(worker, True)
        workers.append(worker)
    return tuple(workers)
