"""The `openai` package, unchanged, against a router and mock engines."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.one_process import MODEL, OneProcess, one_process

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
MESSAGES: Any = [{"role": "user", "content": "Say something long."}]


@pytest.fixture(scope="module", params=["vllm", "sglang", "plain"])
def there(request: pytest.FixtureRequest) -> Iterator[OneProcess]:
    roles = ("both",) if request.param == "plain" else ("prefill", "decode")
    dialect = "vllm" if request.param == "plain" else str(request.param)
    with one_process(*roles, dialect=dialect, attempts_max=1, failures_to_eject=1000) as started:
        yield started


@pytest.fixture(params=[{}, {"x-kvxfer-account": "1"}], ids=["", "account"])
def client(request: pytest.FixtureRequest, there: OneProcess) -> Iterator[openai.OpenAI]:
    more: dict[str, str] = request.param
    with openai.OpenAI(base_url=f"{there.url}/v1", api_key="any", max_retries=0, default_headers=more) as made:
        yield made
    for engine in there.engines:
        engine.request("DELETE", "/mock/faults")


def test_a_chat_whole_and_in_pieces_is_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=12)
    text = whole.choices[0].message.content
    assert text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    pieces = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_completion_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == 12


def test_a_completion_whole_and_in_pieces_is_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Say something.", max_tokens=9)
    pieces = list(client.completions.create(model=MODEL, prompt="Say something.", max_tokens=9, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text
    [ids] = [client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=4)]
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3
    several = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=4)
    assert [choice.index for choice in several.choices] == [0, 1]


def test_several_answers_come_each_whole(there: OneProcess, client: openai.OpenAI) -> None:
    if there.dialect == "sglang":
        with pytest.raises(openai.BadRequestError, match="n: a prefill worker and a decode worker"):
            client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, max_tokens=6)
        return
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, max_tokens=6)
    expected = [choice.message.content for choice in whole.choices]
    assert len(expected) == 2
    said = ["", ""]
    for piece in client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, max_tokens=6, stream=True):
        for choice in piece.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == expected


def test_log_probabilities_come_for_each_token(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=2)
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(token.top_logprobs) for token in logprobs.content] == [2] * 5
    completion = client.completions.create(model=MODEL, prompt="x", max_tokens=5, logprobs=1)
    assert completion.choices[0].logprobs is not None
    assert len(completion.choices[0].logprobs.tokens or []) == 5


def test_tools_are_called_and_their_results_answered(client: openai.OpenAI) -> None:
    asked = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, max_tokens=20)
    choice = asked.choices[0]
    assert choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "get_weather"
    followed = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answered = client.chat.completions.create(model=MODEL, messages=followed, tools=TOOLS, max_tokens=5)
    assert answered.choices[0].message.content
    arguments = ""
    for piece in client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=20, stream=True
    ):
        for one in piece.choices[0].delta.tool_calls or () if piece.choices else ():
            arguments += (one.function and one.function.arguments) or ""
    assert arguments == call.function.arguments


def test_the_format_of_an_answer_is_kept(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=64
    )
    assert isinstance(json.loads(made.choices[0].message.content or ""), dict)


def test_a_response_whole_and_in_events_is_the_same(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="Say something.", max_output_tokens=8)
    assert whole.output_text
    events = list(client.responses.create(model=MODEL, input="Say something.", max_output_tokens=8, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_embeddings_and_models(client: openai.OpenAI) -> None:
    made = client.embeddings.create(model=MODEL, input=["a", "b"])
    assert len(made.data) == 2
    assert len(made.data[0].embedding) > 1
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"model": "none"}, openai.NotFoundError),
        ({"messages": []}, openai.BadRequestError),
        ({"n": -1}, openai.BadRequestError),
        ({"max_tokens": 100_000}, openai.BadRequestError),
    ],
)
def test_what_is_the_clients_fault_is_its_own_exception(
    client: openai.OpenAI, changed: dict[str, Any], kind: type[openai.APIStatusError]
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **changed})
    assert caught.value.request_id
    assert caught.value.code
    assert isinstance(caught.value.body, dict)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (404, openai.NotFoundError),
        (422, openai.UnprocessableEntityError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_an_engine_answers_is_the_exception_of_its_status(
    there: OneProcess, client: openai.OpenAI, status: int, kind: type[openai.APIStatusError], stream: bool
) -> None:
    there.engines[-1].fault("status", status=status, count=1)
    with pytest.raises(kind) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)  # type: ignore[call-overload]
    assert caught.value.status_code == status
    assert client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3).choices


def test_a_stream_that_breaks_raises_the_clients_error(there: OneProcess, client: openai.OpenAI) -> None:
    there.engines[-1].fault("cut", after_tokens=3, count=1)
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, stream=True)
    with pytest.raises(openai.APIError, match="lost"):
        list(stream)


def test_a_client_asks_again_when_retry_after_says_so(there: OneProcess, client: openai.OpenAI) -> None:
    there.engines[-1].fault("status", status=503, count=2)
    begun_s = time.monotonic()
    made = client.with_options(max_retries=3).chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3)
    assert made.choices[0].message.content
    assert time.monotonic() - begun_s > 0.9  # retry-after: 1, which is longer than the client's own first wait


def test_a_key_is_asked_for_by_the_clients_error(tmp_path: pathlib.Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("right-key\n")
    with one_process("both", api_key_file=str(keys)) as there:
        with (
            openai.OpenAI(base_url=f"{there.url}/v1", api_key="no") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        with openai.OpenAI(base_url=f"{there.url}/v1", api_key="right-key") as client:
            assert [model.id for model in client.models.list()] == [MODEL]
