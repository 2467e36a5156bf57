"""Keeps the table of workers up to date, from every source that the options name, and has the workers probed.

Decides which sources run and in which order they begin. It must never know a request.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

from kvxfer.router.fleet.probe import ProbeOptions, Prober
from kvxfer.router.fleet.sources.coordinator import CoordinatorSource
from kvxfer.router.fleet.sources.flags import workers_from_flags
from kvxfer.router.fleet.worker import Worker, WorkerSource
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.options import RouterOptions
from kvxfer.router.worker_key import Headers, followed_worker_key, leg_headers
from kvxfer.rpc import coordinator_tls
from kvxfer.serving.leg_keys import followed_leg_keys

FIRST_MEMBERSHIP_WAIT_S = 1.0
"""How long the start waits for a first membership, so that a router that says it is ready usually knows its workers."""


def check_workers(options: RouterOptions, workers: Workers) -> None:
    """Put the workers of the flags and of the file into ``workers``. Raises ConfigError for what is wrong there."""
    given = _given(options)
    if given:
        workers.replace(WorkerSource.FLAGS, given)
    if options.workers_file:
        from kvxfer.router.fleet.sources.file import FileSource

        FileSource(options.workers_file, workers).load()


def _given(options: RouterOptions) -> tuple[Worker, ...]:
    return tuple(
        workers_from_flags(
            prefill=options.prefill, decode=options.decode, engine=options.engine, dialect=options.dialect
        )
    )


@contextlib.asynccontextmanager
async def following(options: RouterOptions, workers: Workers, token: bytes) -> AsyncIterator[None]:
    """Follow all sources within the block.

    Raises ConfigError for an address or a file that is wrong at the start, AuthenticationError where the coordinator
    does not take ``token``. A source that fails later leaves its last list, and is come back to.
    """
    given = _given(options)
    async with contextlib.AsyncExitStack() as stack:
        if given:
            workers.replace(WorkerSource.FLAGS, given)
        if options.workers_file:
            from kvxfer.router.fleet.sources.file import FileSource  # PyYAML only where a file is read

            await stack.enter_async_context(FileSource(options.workers_file, workers))
        if options.kubernetes_selector:
            from kvxfer.router.fleet.sources.kubernetes import KubernetesOptions, KubernetesSource

            kubernetes = KubernetesOptions(
                api=options.kubernetes_api,
                token_file=options.kubernetes_token_file,
                ca_file=options.kubernetes_ca_file,
                namespace=options.kubernetes_namespace,
                selector=options.kubernetes_selector,
                dialect=options.dialect,
            )
            await stack.enter_async_context(KubernetesSource(kubernetes.completed(os.environ), workers))
        if options.coordinator:
            workers.is_connected = False
            tls = coordinator_tls(
                options.coordinator_ca_file, options.coordinator_cert_file, options.coordinator_key_file
            )
            source = await stack.enter_async_context(CoordinatorSource(options.coordinator, token, workers, tls=tls))
            await source.wait_first(FIRST_MEMBERSHIP_WAIT_S)
        key = await stack.enter_async_context(followed_worker_key(options.worker_api_key_file))
        file = await stack.enter_async_context(followed_leg_keys(options.leg_key_file))

        def shown(worker: Worker) -> Headers:
            return (*key.headers, *leg_headers(worker, file))

        probes = Prober(workers, ProbeOptions(probe_interval_s=options.probe_s), headers=shown)
        await stack.enter_async_context(probes)
        yield
