"""How an answer that failed ends, in the shape of the client's API."""

from __future__ import annotations

from collections.abc import Iterator

from tests.support.fake_workers import FakeWorker, Received, broken, events, failing, router_over, texts


async def test_a_stream_that_its_worker_ended_with_an_error_ends_well_formed() -> None:
    class Failing(FakeWorker):
        def _events(self, request: Received) -> Iterator[bytes]:
            whole = list(super()._events(request))
            yield from whole[:2]
            yield b'data: {"error":{"message":"out of memory","type":"server_error","code":"oom"}}\n\n'

    d = Failing("d0")
    async with router_over(d) as router:
        chunks = events((await router.complete(stream=True)).text)
        assert texts(chunks) == "one two"
        assert broken(chunks)["message"] == "out of memory"
        name = 'kvxfer_router_requests_total{outcome="broken_stream",route="/v1/completions"}'
        await router.wait_metric(name, 1)


async def test_an_error_is_told_in_the_shape_of_the_clients_api() -> None:
    d = FakeWorker("d0")
    d.always_fails = failing(500, "internal", retryable=False)
    message = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
    async with router_over(d) as router:
        answer = await router.client.post("/v1/messages", json=message)
        assert answer.status_code == 500
        assert (answer.json()["type"], answer.json()["error"]["message"]) == ("error", "scripted internal")
        wrong = await router.client.post("/v1/messages", json={**message, "model": "other"})
        assert (wrong.status_code, wrong.json()["type"]) == (404, "error")
        assert wrong.json()["error"]["type"] == "not_found_error"


async def test_an_error_that_no_handler_gives_is_told_in_the_shape_of_the_paths_api() -> None:
    async with router_over(FakeWorker("d0")) as router:
        for method, path, status in (
            *(("GET", path, 405) for path in ("/v1/messages", "/v1/messages/count_tokens")),
            *((method, "/v1/messages/batches", 404) for method in ("GET", "POST")),
        ):
            answer = await router.client.request(method, path)
            assert (answer.status_code, answer.json()["type"]) == (status, "error"), (method, path)
            assert answer.json()["error"]["type"] == "invalid_request_error"
        for path in ("/v1/completions", "/v1/messagesx", "/nothing"):
            assert set((await router.client.get(path)).json()) == {"error"}
