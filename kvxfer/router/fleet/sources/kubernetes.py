"""Kubernetes' EndpointSlices as a source of workers: listed, then watched.

::

    list (in pages) -> watch from its resourceVersion -> the server ends the watch -> watch from the last one seen
         ^                       |
         +---- 410 Gone ---------+        any other error: wait, longer each time, then list again

Decides when the API server is asked. A server that is away leaves the last list. What a slice means is
`endpoint_slices`'; it must never write anything to the cluster: it needs `list` and `watch` of `endpointslices` alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import os
import pathlib
import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from kvxfer.errors import ConfigError, InvalidArgumentError, KvxferError, PeerError, ProtocolError, RefusedError
from kvxfer.policy.backoff import Backoff
from kvxfer.protocol.http_url import HttpUrl
from kvxfer.router.fleet.sources.endpoint_slices import slice_name, workers_of_slices
from kvxfer.router.fleet.worker import ENGINE_DIALECTS, EngineDialect, WorkerSource
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.upstream import UpstreamDeadlines, UpstreamLimits, UpstreamPool, UpstreamResponse

log = logging.getLogger("kvxfer.router")

ACCOUNT = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""What Kubernetes gives to a pod: ``token``, ``ca.crt``, ``namespace``."""
PAGE_SLICES = 100
PAGE_BYTES_MAX = 16 << 20
LINE_BYTES_MAX = 4 << 20
SLICES_MAX = 16384
TOKEN_BYTES_MAX = 65536
WATCH_S = 240
"""After so long the server ends a watch by itself, and another one begins."""
WATCH_MIN_S = 1.0
"""After a watch that ended sooner, so long passes before the next."""
GONE = 410


@dataclasses.dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """Where the API server is. Empty values stand for what a pod is given. Raises ConfigError for a bad value."""

    api: str = ""
    """``https://host:port``."""
    token_file: str = ""
    ca_file: str = ""
    namespace: str = ""
    selector: str = "kvxfer.io/role"
    """Of labels of EndpointSlices."""
    dialect: str = EngineDialect.VLLM
    """Of slices that have no label for it."""

    def __post_init__(self) -> None:
        if not self.selector or len(self.selector) > 2048 or not self.selector.isprintable():
            raise ConfigError("kubernetes_selector must be a label selector of at most 2048 characters")
        if self.dialect not in ENGINE_DIALECTS:
            raise ConfigError(
                f"kubernetes_dialect must be one of {', '.join(EngineDialect)}, not {self.dialect!r:.100}"
            )

    def completed(self, environ: Mapping[str, str], account: pathlib.Path = ACCOUNT) -> KubernetesOptions:
        """With what the pod was given where something is empty. Raises ConfigError where that is missing."""
        api = self.api
        if not api:
            host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
            if not host:
                raise ConfigError("kubernetes_api must be given outside of a pod: KUBERNETES_SERVICE_HOST is not set")
            api = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        in_pod = not self.api
        token_file = self.token_file or (str(account / "token") if in_pod else "")
        ca_file = self.ca_file or (str(account / "ca.crt") if in_pod else "")
        namespace = self.namespace or _text(account / "namespace", "kubernetes_namespace")
        try:
            url = HttpUrl.parse("kubernetes_api", api)
        except InvalidArgumentError as error:
            raise ConfigError(str(error)) from None
        if url.scheme == "http" and token_file:
            raise ConfigError("kubernetes_api must be https where there is a token: it would be sent in the clear")
        return dataclasses.replace(
            self, api=api.rstrip("/"), token_file=token_file, ca_file=ca_file, namespace=namespace
        )


class _GoneError(PeerError):
    """The server no longer knows the resourceVersion: everything is listed anew."""


class KubernetesSource:
    """An async context manager: slices are followed inside it."""

    def __init__(
        self,
        options: KubernetesOptions,
        workers: Workers,
        *,
        backoff: Backoff | None = None,
        draw: Callable[[], float] = random.random,
        watch_s: int = WATCH_S,
    ) -> None:
        """``options`` are completed. Raises ConfigError for a CA or a token that cannot be read."""
        self._options = options
        self._workers = workers
        self._backoff = backoff or Backoff(base_s=0.5, cap_s=30.0)
        self._draw = draw
        self._watch_s = watch_s
        self._deadlines = UpstreamDeadlines(first_byte_s=30.0, between_chunks_s=30.0, whole_s=120.0)
        self._watch_deadlines = UpstreamDeadlines(first_byte_s=30.0, between_chunks_s=watch_s + 30.0, whole_s=math.inf)
        self._tls = _tls(options)
        self._token()
        self._slices: dict[str, Mapping[str, Any]] = {}
        self._version = ""
        self._reasons: set[str] = set()
        self._failures = 0
        self._task: asyncio.Task[None] | None = None
        self._pool: UpstreamPool | None = None
        self.is_connected = False
        """Whether slices are being followed."""
        self.last_error = ""
        self.lists = 0
        """How often everything was listed."""

    async def __aenter__(self) -> KubernetesSource:
        self._pool = UpstreamPool(self._options.api, UpstreamLimits(connections_max=2), tls=self._tls)
        self._task = asyncio.create_task(self._run(), name="kvxfer router endpoint slices")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._pool is not None:
            await self._pool.close()

    async def _run(self) -> None:
        while True:
            try:
                await self._list()
                while True:
                    began_s = asyncio.get_running_loop().time()
                    await self._watch()
                    if asyncio.get_running_loop().time() - began_s < WATCH_MIN_S:
                        await asyncio.sleep(WATCH_MIN_S)
            except _GoneError:
                log.info("the list of endpoint slices is too old, and is taken anew")
                if not self._failures:
                    self._failures = 1
                    continue
            except (KvxferError, ValueError) as error:
                if str(error) != self.last_error:
                    log.warning("endpoint slices cannot be followed, the last list stays: %s", error)
                self.last_error = str(error)
            except Exception as error:
                log.exception("following endpoint slices broke")
                self.last_error = str(error)
            self.is_connected = False
            self._failures += 1
            await asyncio.sleep(self._backoff.delay_s(self._failures, random=self._draw()))

    async def _list(self) -> None:
        slices: dict[str, Mapping[str, Any]] = {}
        following = ""
        while True:
            query = {"limit": str(PAGE_SLICES)} | ({"continue": following} if following else {})
            async with await self._get(query, self._deadlines) as response:
                page = _object(await response.read(PAGE_BYTES_MAX))
            for one in page.get("items") or ():
                if isinstance(one, dict) and slice_name(one):
                    slices[slice_name(one)] = one
            if len(slices) > SLICES_MAX:
                raise ProtocolError(f"more than {SLICES_MAX} endpoint slices match")
            metadata = page.get("metadata")
            metadata = metadata if isinstance(metadata, dict) else {}
            following = str(metadata.get("continue") or "")
            if not following:
                break
        self._version = str(metadata.get("resourceVersion") or "")
        self._slices = slices
        self.lists += 1
        self._publish()
        self.is_connected = True
        self.last_error = ""

    async def _watch(self) -> None:
        """One watch, to the end that the server gives it."""
        query = {
            "watch": "1",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(self._watch_s),
        }
        async with await self._get(query, self._watch_deadlines) as response:
            async for line in _lines(response):
                if self._take(_object(line)):
                    self._publish()

    def _take(self, event: Mapping[str, Any]) -> bool:
        """One event of a watch. Returns whether slices changed."""
        kind, value = event.get("type"), event.get("object")
        value = value if isinstance(value, dict) else {}
        if kind == "ERROR":
            if value.get("code") == GONE:
                raise _GoneError("resourceVersion is too old")
            raise RefusedError(f"the watch ended: {value.get('message')!s:.500}")
        metadata = value.get("metadata")
        version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
        if isinstance(version, str) and version:
            self._version = version
        self._failures = 0
        name = slice_name(value)
        if kind in ("ADDED", "MODIFIED") and name:
            if name not in self._slices and len(self._slices) >= SLICES_MAX:
                raise ProtocolError(f"more than {SLICES_MAX} endpoint slices match")
            self._slices[name] = value
        elif kind == "DELETED" and name:
            self._slices.pop(name, None)
        else:
            return False
        return True

    def _publish(self) -> None:
        workers, reasons = workers_of_slices(self._slices.values(), dialect=self._options.dialect)
        for reason in sorted(set(reasons) - self._reasons):
            log.warning("an endpoint slice makes no workers: %s", reason)
        self._reasons = set(reasons)
        self._workers.replace(WorkerSource.KUBERNETES, workers)

    async def _get(self, query: Mapping[str, str], deadlines: UpstreamDeadlines) -> UpstreamResponse:
        """Raises RefusedError for an answer that is not a 200, and _GoneError for a 410."""
        assert self._pool is not None
        namespace = quote(self._options.namespace, safe="")
        target = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?"
        target += urlencode({"labelSelector": self._options.selector, **query})
        response = await self._pool.request("GET", target, self._headers(), (), deadlines)
        if response.status == 200:
            return response
        async with response:
            content = await response.read(PAGE_BYTES_MAX)
        if response.status == GONE:
            raise _GoneError("resourceVersion is too old")
        message = _message(content)
        raise RefusedError(f"{self._options.api} answered {response.status} for endpoint slices{message}")

    def _headers(self) -> list[tuple[bytes, bytes]]:
        token = self._token()
        headers = [(b"accept", b"application/json"), (b"user-agent", b"kvxfer-router")]
        return [*headers, (b"authorization", b"Bearer " + token.encode("latin-1"))] if token else headers

    def _token(self) -> str:
        """Read each time, because Kubernetes replaces it."""
        return _text(pathlib.Path(self._options.token_file), "the token") if self._options.token_file else ""

    def __repr__(self) -> str:
        return f"KubernetesSource({self._options.api}, slices={len(self._slices)}, is_connected={self.is_connected})"


async def _lines(response: UpstreamResponse) -> AsyncIterator[bytes]:
    """Raises ProtocolError for a line that is too long."""
    kept = bytearray()
    async for chunk in response:
        kept += chunk
        while (end := kept.find(b"\n")) >= 0:
            line = bytes(kept[:end])
            del kept[: end + 1]
            _check_length(line)
            if line.strip():
                yield line
        _check_length(kept)


def _check_length(line: bytes | bytearray) -> None:
    if len(line) > LINE_BYTES_MAX:
        raise ProtocolError(f"an event of the watch has more than {LINE_BYTES_MAX} bytes")


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise ProtocolError("the API server answered what is no JSON") from None
    if not isinstance(value, dict):
        raise ProtocolError("the API server answered JSON that is no object")
    return value


def _message(content: bytes) -> str:
    try:
        return f": {_object(content).get('message')!s:.500}"
    except ProtocolError:
        return ""


def _tls(options: KubernetesOptions) -> ssl.SSLContext | None:
    if not options.api.startswith("https://"):
        return None
    try:
        return ssl.create_default_context(cafile=options.ca_file or None)
    except OSError as error:
        raise ConfigError(f"the CA of Kubernetes, {options.ca_file}: {error.strerror or error}") from None


def _text(path: pathlib.Path, what: str) -> str:
    try:
        if os.path.getsize(path) > TOKEN_BYTES_MAX:
            raise ConfigError(f"{what}: {path} has more than {TOKEN_BYTES_MAX} bytes")
        text = path.read_text("ascii").strip()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"{what}: {path} cannot be read: {reason}") from None
    if not text or not text.isprintable():
        raise ConfigError(f"{what}: {path} is empty, or not one line of text")
    return text
