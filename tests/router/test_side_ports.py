"""Ports of a router that serve probes or metrics, and nothing else."""

from __future__ import annotations

import httpx
import pytest

from tests.support.routers import RouterProcess


@pytest.mark.parametrize("workers", [1, 2])
def test_each_port_serves_its_paths_and_nothing_else(workers: int) -> None:
    router = RouterProcess("--engine=http://127.0.0.1:1", f"--workers={workers}", "--probe-port=0", "--metrics-port=0")
    try:
        probe, metrics = router.ready["probe_url"], router.ready["metrics_url"]
        with httpx.Client(trust_env=False, timeout=30.0) as client:
            assert client.get(f"{probe}/live").status_code == 200
            for url in (f"{probe}/live", f"{metrics}/metrics", f"{router.url}/metrics", f"{router.url}/v1/models"):
                by_head = client.head(url)  # with several processes the one that leads answers
                assert (by_head.status_code, by_head.content) == (200, b"")
                assert int(by_head.headers["content-length"]) > 0
            assert client.get(f"{router.url}/v1/models/", follow_redirects=False).status_code == 404
            assert client.get(f"{probe}/ready").json()["status"] == "not_ready"
            shown = client.get(f"{metrics}/metrics")
            assert shown.status_code == 200
            assert "kvxfer_router_ready" in shown.text
            for url, path in (
                *(
                    (probe, path)
                    for path in ("/metrics", "/health", "/v1/models", "/v1/workers", "/workers", "/ui", "/")
                ),
                *((metrics, path) for path in ("/live", "/ready", "/v1/models", "/workers")),
            ):
                answer = client.get(f"{url}{path}")
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "usage"), path
            for url, path in ((probe, "/v1/completions"), (probe, "/live"), (metrics, "/metrics")):
                assert client.post(f"{url}{path}", json={}).status_code == 404
            assert client.get(f"{router.url}/live").status_code == 200
            assert client.get(f"{router.url}/metrics").status_code == 200
    finally:
        code, log = router.stop()
    assert code == 0, log


def test_without_the_flags_there_are_no_ports() -> None:
    router = RouterProcess("--engine=http://127.0.0.1:1")
    router.stop()
    assert not {"probe_url", "metrics_url"} & router.ready.keys()


def test_a_port_that_is_taken_is_refused_by_a_sentence() -> None:
    first = RouterProcess("--engine=http://127.0.0.1:1", "--probe-port=0")
    port = first.ready["probe_url"].rpartition(":")[2]
    try:
        with pytest.raises(AssertionError, match=f"cannot listen on 127.0.0.1:{port}"):
            RouterProcess("--engine=http://127.0.0.1:1", f"--probe-port={port}")
    finally:
        first.stop()
