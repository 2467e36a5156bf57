"""One ``kvxfer tier`` process: its agent, its pool, its HTTP port. Decides the order of starting and stopping, and what
a metric is called; what is kept is the keeper's.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from threading import Thread
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvxfer.agent import Agent
from kvxfer.connectors.tier.keeper import BlockKeeper, unit_record
from kvxfer.connectors.tier.service_options import TierServiceOptions
from kvxfer.errors import ClosedError, ConfigError
from kvxfer.observe import hide
from kvxfer.one_host import OneHostHandler
from kvxfer.rpc.token import default_token_path, load_or_create_token

log = logging.getLogger("kvxfer.tier")

REQUEST_S = 5.0
"""A client of the HTTP port that is silent for so long is dropped."""
COUNTERS = {
    "hits": "Blocks that engines asked for and that were there.",
    "misses": "Blocks that engines asked for and that were not there.",
    "evictions": "Blocks that were evicted.",
    "stored_blocks": "Blocks that came from engines.",
    "stored_bytes": "Bytes that came from engines.",
    "served_blocks": "Blocks that went back to engines.",
    "served_bytes": "Bytes that went back to engines.",
}
GAUGES = {
    "blocks": "Blocks that are kept.",
    "used_bytes": "Bytes that they take, with those that are on their way.",
    "capacity_bytes": "Bytes that they may take.",
    "pinned": "Blocks that are being read or written.",
}


class KeeperMetrics:
    """A collector of a prometheus registry."""

    def __init__(self, keeper: BlockKeeper) -> None:
        self._keeper = keeper

    def collect(self) -> Iterator[Metric]:
        """The keeper's counts of now."""
        counts = self._keeper.counts
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"kvxfer_tier_{name}", text, value=getattr(counts, name))
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"kvxfer_tier_{name}", text, value=getattr(self._keeper, name))
        errors = CounterMetricFamily(
            "kvxfer_tier_errors", "What engines wanted and did not get, by code.", labels=["wanted", "code"]
        )
        for labels, count in dict(counts.errors).items():
            errors.add_metric(list(labels), count)
        yield errors


async def serve(
    options: TierServiceOptions, *, on_ready: Callable[[dict[str, Any]], None], stop: asyncio.Event
) -> None:
    """Run until ``stop`` is set. Raises ConfigError, LimitExceededError where the host lacks the memory, and what
    entering an agent raises."""
    token = b""
    if not (options.coordinator and options.coordinator_cert_file):
        token = load_or_create_token(options.token_file or default_token_path())
        hide(token)
    registry = CollectorRegistry()
    agent = Agent(
        options.agent_id,
        coordinator=options.coordinator or None,
        token=token,
        config=options.agent_config,
        registry=registry,
    )
    pool = agent.allocate_pool(
        unit_record(options.unit_bytes),
        block_count=options.capacity_bytes // options.unit_bytes,
        block_bytes=options.unit_bytes,
        exposure=options.exposure,
        checksum=options.checksum,
    )
    keeper = BlockKeeper(agent, pool, deadline_s=options.deadline_s, can_discover=not options.coordinator)
    registry.register(KeeperMetrics(keeper))
    async with agent:
        metadata = "" if options.coordinator else agent.export_metadata()
        http = TierHttp(options.http_host, options.http_port, registry, metadata)
        serving = asyncio.ensure_future(keeper.serve())
        stopping = asyncio.ensure_future(stop.wait())
        try:
            on_ready(
                {
                    "event": "ready",
                    "role": "tier",
                    "agent_id": options.agent_id,
                    "http_url": http.url,
                    "capacity_bytes": keeper.capacity_bytes,
                    "pid": os.getpid(),
                }
            )
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
                raise ClosedError("the agent closed by itself")
        finally:
            for task in (serving, stopping):
                task.cancel()
            await asyncio.gather(serving, stopping, return_exceptions=True)
            await asyncio.to_thread(http.close)


class TierHttp:
    """``/metrics``, ``/health`` and ``/metadata``, on threads of its own."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, metadata: str) -> None:
        """Raises ConfigError if the port cannot be had."""

        class Handler(OneHostHandler):
            timeout = REQUEST_S

            def do_GET(self) -> None:
                body = b""
                if self.path == "/metrics":
                    body = generate_latest(registry)
                elif self.path == "/health":
                    body = b"ok\n"
                elif self.path == "/metadata":
                    body = metadata.encode()
                self.send_response(200 if body else 404)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *arguments: object) -> None:
                log.debug(format, *arguments)

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigError(f"the tier cannot listen on {host}:{port}: {error.strerror or error}") from error
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = Thread(target=self._server.serve_forever, name="kvxfer tier http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
