"""What `/openapi.json` says."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.router.apis import ROUTES, Api
from tests.support.fake_workers import FakeWorker, router_over


async def served() -> dict[str, Any]:
    async with router_over(FakeWorker("d0")) as router:
        return dict((await router.client.get("/openapi.json")).json())


@pytest.mark.parametrize("api", ROUTES, ids=lambda api: api.path)
async def test_a_hot_route_says_what_it_takes_and_answers(api: Api) -> None:
    operation = (await served())["paths"][api.path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert ("model" in schema.get("required", ())) is api.requires_model
    assert set(api.prompt_fields) <= set(schema["properties"])
    assert schema["additionalProperties"] is True
    assert {"200", "400", "404", "503", "default"} <= set(operation["responses"])
    error = operation["responses"]["400"]["content"]["application/json"]["schema"]
    assert "code" in error["properties"]["error"]["properties"]
    assert ("text/event-stream" in operation["responses"]["200"]["content"]) is api.generates


async def test_no_route_promises_an_answer_that_the_router_never_gives() -> None:
    for path, operations in (await served())["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
            assert "default" in operation["responses"], path
