"""The `anthropic` package, unchanged, against a router and mock engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.support.one_process import MODEL, OneProcess, one_process

MESSAGES: Any = [{"role": "user", "content": "Say something long."}]


@pytest.fixture(scope="module", params=["vllm", "plain"])
def there(request: pytest.FixtureRequest) -> Iterator[OneProcess]:
    roles = ("both",) if request.param == "plain" else ("prefill", "decode")
    with one_process(*roles, attempts_max=1, failures_to_eject=1000) as started:
        yield started


@pytest.fixture(params=[{}, {"x-kvxfer-account": "1"}], ids=["", "account"])
def client(request: pytest.FixtureRequest, there: OneProcess) -> Iterator[Any]:
    more: dict[str, str] = request.param
    with anthropic.Anthropic(base_url=there.url, api_key="any", max_retries=0, default_headers=more) as made:
        yield made
    for engine in there.engines:
        engine.request("DELETE", "/mock/faults")


def test_a_message_whole_and_in_events_is_the_same(client: Any) -> None:
    whole = client.messages.create(model=MODEL, max_tokens=12, messages=MESSAGES, system="Be brief.")
    assert whole.content[0].text
    assert whole.usage.output_tokens == 12
    with client.messages.stream(model=MODEL, max_tokens=12, messages=MESSAGES, system="Be brief.") as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == whole.content[0].text
    assert final.stop_reason == whole.stop_reason


def test_tokens_are_counted_by_an_engine(client: Any) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be brief.")
    whole = client.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES, system="Be brief.")
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) > 0


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "BadRequestError"), (404, "NotFoundError"), (500, "InternalServerError")]
)
def test_what_an_engine_answers_is_the_exception_of_its_status(
    there: OneProcess, client: Any, status: int, kind: str
) -> None:
    there.engines[-1].fault("status", status=status, count=1)
    with pytest.raises(getattr(anthropic, kind)) as caught:
        client.messages.create(model=MODEL, max_tokens=12, messages=MESSAGES)
    assert caught.value.status_code == status
    assert caught.value.body["type"] == "error"


def test_what_is_the_clients_fault_is_its_own_exception(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="none", max_tokens=12, messages=MESSAGES)


def test_a_stream_that_breaks_raises_the_clients_error(there: OneProcess, client: Any) -> None:
    there.engines[-1].fault("cut", after_tokens=3, count=1)
    with (
        pytest.raises(anthropic.APIError),
        client.messages.stream(model=MODEL, max_tokens=20, messages=MESSAGES) as stream,
    ):
        list(stream)


def test_a_client_asks_again_when_retry_after_says_so(there: OneProcess, client: Any) -> None:
    there.engines[-1].fault("status", status=503, count=1)
    made = client.with_options(max_retries=2).messages.create(model=MODEL, max_tokens=3, messages=MESSAGES)
    assert made.content[0].text
