"""Spans on their way to a collector: what is exported of real requests, what is dropped, which settings count."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from typing import Any

import pytest

from kvxfer.errors import ConfigError
from kvxfer.router.options import RouterOptions
from kvxfer.router.otlp import OtlpExporter, OtlpSettings, settings
from kvxfer.router.record import RequestRecord
from kvxfer.router.tracing import EndedRequest, Tracer
from kvxfer.types import Role
from tests.support.child import environment
from tests.support.collector import Collector, attributes, collecting
from tests.support.fake_workers import FakeWorker, eventually, failing, free_port, router_over
from tests.support.router_bodies import TRACE


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "HEADERS", "TIMEOUT", "COMPRESSION", "PROTOCOL", "CERTIFICATE"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)


def ended() -> EndedRequest:
    trace = Tracer(lambda ended: None).begin(None, 1.0)
    return EndedRequest(trace, RequestRecord("/v1/completions", "r", 1.0), "ok", 200, 1, 2.0)


class Counts(dict[str, int]):
    def __call__(self, result: str, count: int) -> None:
        self[result] = self.get(result, 0) + count


def exporter(url: str, counts: Counts, **more: Any) -> OtlpExporter:
    return OtlpExporter(OtlpSettings(url), counts, **{"interval_s": 0.01, "retry_s": 0.001, **more})


async def spans_of_one(collector: Collector, count: int) -> dict[str, dict[str, Any]]:
    await eventually(lambda: len(collector.spans) >= count)
    return {span["name"]: span for span in collector.spans}


async def test_a_request_is_one_trace_that_each_engine_joins_by_its_own_span() -> None:
    prefiller, decoder = FakeWorker("p", Role.PREFILL), FakeWorker("d")
    decoder.account = {"bytes_moved": 7, "seconds": {"wire": 0.001}, "lane": "unix", "prefill": "remote"}
    with collecting() as collector:
        async with router_over(prefiller, decoder, otlp_endpoint=collector.url) as running:
            answer = await running.complete(stream=True, max_tokens=3, headers={"traceparent": TRACE})
            assert answer.status_code == 200
            spans = await spans_of_one(collector, 5)
            await running.wait_metric('kvxfer_router_traces_total{result="exported"}', 1)
        assert set(spans) == {"route", "prefill", "queue", "decode", "transfer"}
        assert {span["traceId"] for span in spans.values()} == {"a" * 32}
        assert spans["route"]["parentSpanId"] == "b" * 16
        for fake, name in ((prefiller, "prefill"), (decoder, "decode")):
            (received,) = fake.received
            assert received.headers["traceparent"] == f"00-{'a' * 32}-{spans[name]['spanId']}-01"
            assert attributes(spans[name])["kvxfer.agent_id"] == fake.name
        root = attributes(spans["route"])
        assert root["kvxfer.request_id"] == answer.headers["x-request-id"]
        assert root["gen_ai.request.max_tokens"] == 3
        assert (root["kvxfer.outcome"], root["http.response.status_code"]) == ("ok", 200)
        assert collector.paths[0] == "/v1/traces"
        resource = collector.bodies[0]["resourceSpans"][0]["resource"]
        assert attributes(resource)["service.name"] == "kvxfer-router"


async def test_a_retry_is_in_the_trace_with_its_error() -> None:
    one, two = FakeWorker("d1", Role.BOTH), FakeWorker("d2", Role.BOTH)
    for fake in (one, two):
        fake.failures = [failing(500, "internal", retryable=True)]
    with collecting() as collector:
        async with router_over(one, two, otlp_endpoint=collector.url, min_remote_prefill_tokens=100) as running:
            answer = await running.complete()
            await spans_of_one(collector, 3)
        legs = [span for span in collector.spans if span["name"] == "decode"]
        assert len(legs) == int(answer.headers["x-kvxfer-attempt"])
        assert legs[0]["status"]["code"] == 2
        carried = [leg.headers["traceparent"].split("-")[2] for fake in (one, two) for leg in fake.received]
        assert sorted(carried) == sorted(span["spanId"] for span in legs)


async def test_what_is_not_to_be_recorded_is_passed_on_as_it_came() -> None:
    fake = FakeWorker("d", Role.BOTH)
    unrecorded = TRACE[:-2] + "00"
    with collecting() as collector:
        async with router_over(fake, otlp_endpoint=collector.url, otlp_share=0.0) as running:
            await running.complete(headers={"traceparent": unrecorded})
            await running.complete()
            await running.complete(headers={"traceparent": TRACE})
            await spans_of_one(collector, 2)
        kept, begun, traced = (leg.headers["traceparent"] for leg in fake.received)
        assert kept == unrecorded
        assert begun.endswith("-00")
        assert traced[:36] == TRACE[:36]
        assert {span["traceId"] for span in collector.spans} == {"a" * 32}


async def test_without_an_endpoint_there_is_no_exporter_and_the_line_names_the_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeWorker("d", Role.BOTH)
    with caplog.at_level(logging.INFO, "kvxfer.router.request"):
        async with router_over(fake) as running:
            await running.complete(stream=True, headers={"traceparent": TRACE})
            await running.wait_metric('kvxfer_router_requests_total{outcome="ok",route="/v1/completions"}', 1)
            assert "kvxfer_router_traces_total{" not in (await running.client.get("/metrics")).text
    assert fake.received[0].headers["traceparent"] == TRACE
    (line,) = (vars(record) for record in caplog.records if record.getMessage() == "request")
    assert (line["trace_id"], line["stream"], line["decode"]) == ("a" * 32, True, "d")


def test_a_full_queue_drops_and_counts() -> None:
    counts = Counts()
    sender = exporter(f"http://127.0.0.1:{free_port()}", counts, waiting_max=3, interval_s=60.0)
    for _ in range(5):
        sender.offer(ended())
    assert counts == {"dropped": 2}
    sender.close()
    assert counts == {"dropped": 2, "failed": 3}


@pytest.mark.parametrize(("statuses", "result"), [([503, 429], "exported"), ([400], "failed"), ([503] * 3, "failed")])
def test_what_is_sent_again(statuses: list[int], result: str) -> None:
    counts = Counts()
    with collecting() as collector:
        collector.statuses = list(statuses)
        sender = exporter(collector.url, counts)
        sender.offer(ended())
        deadline_s = time.monotonic() + 10
        while not counts and time.monotonic() < deadline_s:
            time.sleep(0.01)
        sender.close()
        assert counts == {result: 1}
        assert len(collector.bodies) == (result == "exported")
        assert not collector.statuses


def test_a_header_that_cannot_be_sent_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with collecting() as collector:
        where = OtlpSettings(collector.url, headers={"authorization": "Bearer sk-1\n"})
        sender = OtlpExporter(where, Counts(), interval_s=0.01, retry_s=0.001)
        sender.offer(ended())
        sender.close()
    assert "spans cannot be exported" in caplog.text
    assert "sk-1" not in str([vars(record) for record in caplog.records])


def test_what_waits_is_sent_at_the_end() -> None:
    counts = Counts()
    with collecting() as collector:
        sender = exporter(collector.url, counts, interval_s=60.0)
        for _ in range(100):
            sender.offer(ended())
        sender.close()
        assert counts == {"exported": 100}
        assert len(collector.spans) == 100


def test_headers_resource_and_compression_are_as_the_variables_say() -> None:
    counts = Counts()
    with collecting() as collector:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-key=a%20b, x-other=c",
            "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "gzip",
            "OTEL_SERVICE_NAME": "edge",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test,service.name=not-this",
        }
        where = settings(RouterOptions(), environ)
        assert where is not None
        sender = OtlpExporter(where, counts)
        sender.offer(ended())
        sender.close()
        (sent,) = collector.headers
        assert (sent["x-key"], sent["x-other"], sent["content-encoding"]) == ("a b", "c", "gzip")
        said = attributes(collector.bodies[0]["resourceSpans"][0]["resource"])
        assert (said["service.name"], said["deployment.environment.name"]) == ("edge", "test")


@pytest.mark.parametrize(
    ("flag", "environ", "url"),
    [
        ("", {}, None),
        ("http://a:1", {}, "http://a:1/v1/traces"),
        ("http://a:1/", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:2"}, "http://a:1/v1/traces"),
        ("http://a:1/x/v1/traces", {}, "http://a:1/x/v1/traces"),
        ("http://a:1", {"OTEL_SDK_DISABLED": "true"}, None),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://b:2/up"}, "https://b:2/up/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:3/as-it-is"}, "http://c:3/as-it-is"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:2", "OTEL_TRACES_EXPORTER": "none"}, None),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:2", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, None),
        ("", {"OTEL_EXPORTER_OTLP_TIMEOUT": "5"}, None),
    ],
)
def test_where_spans_go(flag: str, environ: dict[str, str], url: str | None) -> None:
    found = settings(RouterOptions(otlp_endpoint=flag), environ)
    assert (None if found is None else found.url) == url


@pytest.mark.parametrize(
    "endpoint", ["a:1", "ftp://a", "http://", "http://a:x", "http://u:p@a:1", "http://[::1", "http://a b"]
)
def test_a_wrong_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint") as caught:
        settings(RouterOptions(otlp_endpoint=endpoint), {})
    assert "u:p" not in str(caught.value)  # it may be a password


def test_wrong_settings_are_refused_and_a_wrong_variable_is_not() -> None:
    with pytest.raises(ConfigError, match="otlp_share"):
        RouterOptions(otlp_share=1.5)
    found = settings(RouterOptions(otlp_endpoint="http://a:1"), {"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"})
    assert found is not None
    assert found.timeout_s == 10.0


def test_nothing_of_it_is_loaded_where_it_is_off() -> None:
    code = (
        "import sys; from kvxfer.router import server; from kvxfer.router.options import RouterOptions; "
        "assert server.open_exporter(RouterOptions(), None) is None; "
        "assert 'kvxfer.router.otlp' not in sys.modules and 'kvxfer.router.spans' not in sys.modules"
    )
    environ = {name: value for name, value in environment().items() if not name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=60)
