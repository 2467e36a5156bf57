"""Every route of a mock engine, and the client that people use."""

from __future__ import annotations

import json

import openai
import pytest

from tests.support.mock_engine.mocks import Engine, read_all

CHAT = {"messages": [{"role": "user", "content": "What is a lane?"}], "max_tokens": 6}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def test_completion_is_a_function_of_the_prompt(fast: Engine) -> None:
    first, again, other = fast.complete("one"), fast.complete("one"), fast.complete("two")
    assert first.text == again.text != other.text
    assert first.json()["usage"]["completion_tokens"] == 8
    assert first.json()["choices"][0]["finish_reason"] == "length"


def test_stream_has_the_text_of_the_whole_answer(fast: Engine) -> None:
    streamed = fast.complete("one", stream=True, stream_options={"include_usage": True})
    assert streamed.text == fast.complete("one").text
    assert streamed.events[-1] == "[DONE]"
    assert streamed.events[-2]["usage"]["completion_tokens"] == 8
    assert [event["choices"][0]["finish_reason"] for event in streamed.events[:-2]] == [None] * 7 + ["length"]


def test_token_ids_and_their_text_are_one_prompt(fast: Engine) -> None:
    ids = fast.post("/tokenize", {"prompt": "Grüße, world"}).json()
    assert ids["count"] == len(ids["tokens"]) == 5
    assert fast.post("/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": "Grüße, world"}
    assert fast.complete(ids["tokens"]).text == fast.complete("Grüße, world").text


def test_prompt_list_and_n_give_each_choice_its_index(fast: Engine) -> None:
    answer = fast.complete(["one", "two"], n=2).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert [texts[0], texts[2]] == [fast.complete("one").text, fast.complete("two").text]
    streamed = fast.complete(["one", "two"], n=2, stream=True)
    got = [
        "".join(e["choices"][0]["text"] for e in streamed.events[:-1] if e["choices"][0]["index"] == i)
        for i in range(4)
    ]
    assert got == texts


def test_stop_string_ends_the_answer_before_it(fast: Engine) -> None:
    whole = fast.complete("one").text
    for stream in (False, True):
        answer = fast.complete("one", stop=[whole[7:10]], stream=stream)
        assert answer.text == whole[:7]
    assert fast.complete("one", stop=whole[7:10]).json()["choices"][0]["finish_reason"] == "stop"


def test_answer_without_a_limit_ends_by_itself(fast: Engine) -> None:
    answer = fast.post("/v1/chat/completions", {"messages": CHAT["messages"]}).json()
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 64)


def test_logprobs_have_an_entry_for_each_token(fast: Engine) -> None:
    choice = fast.complete("one", logprobs=2).json()["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2] * 8
    events = fast.post("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 3, "stream": True}).events
    content = [event["choices"][0]["logprobs"]["content"] for event in events[1:-1]]
    assert [len(one[0]["top_logprobs"]) for one in content] == [3] * 6


def test_token_ids_come_where_they_are_asked_for(fast: Engine) -> None:
    choice = fast.complete("one", return_token_ids=True).json()["choices"][0]
    assert fast.post("/detokenize", {"tokens": choice["token_ids"]}).json()["prompt"] == choice["text"]


def test_echo_gives_the_prompt_back(fast: Engine) -> None:
    assert fast.complete("one", echo=True).text == "one" + fast.complete("one").text


def test_json_format_answers_with_an_object(fast: Engine) -> None:
    answer = fast.post("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}})
    assert set(json.loads(answer.text)) == {"text"}


@pytest.mark.parametrize("stream", [False, True])
def test_tool_is_called_and_its_result_answered(fast: Engine, stream: bool) -> None:
    client = openai.OpenAI(base_url=f"{fast.url}/v1", api_key="none")
    messages: list[dict[str, object]] = [{"role": "user", "content": "Look it up."}]
    if stream:
        arguments, names = "", set()
        for part in client.chat.completions.create(
            model="mock", messages=messages, tools=[TOOL], max_tokens=5, stream=True
        ):  # type: ignore[call-overload]
            for call in part.choices[0].delta.tool_calls or [] if part.choices else []:
                arguments += call.function.arguments or ""
                names.add(call.function.name)
        assert names - {None} == {"look_up"}
    else:
        choice = client.chat.completions.create(model="mock", messages=messages, tools=[TOOL], max_tokens=5).choices[0]  # type: ignore[call-overload]
        assert choice.finish_reason == "tool_calls"
        arguments = choice.message.tool_calls[0].function.arguments
    assert set(json.loads(arguments)) == {"text"}
    following = [*messages, {"role": "tool", "tool_call_id": "x", "content": "It is there."}]
    answer = fast.post("/v1/chat/completions", {"messages": following, "tools": [TOOL], "max_tokens": 5})
    assert answer.json()["choices"][0]["message"]["content"] == answer.text


def test_openai_client_reads_every_route(fast: Engine) -> None:
    client = openai.OpenAI(base_url=f"{fast.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["mock"]
    assert client.models.retrieve("mock").id == "mock"
    assert (
        client.completions.create(model="mock", prompt="one", max_tokens=8).choices[0].text == fast.complete("one").text
    )
    parts = client.chat.completions.create(model="mock", stream=True, **CHAT)  # type: ignore[call-overload]
    streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert streamed == fast.post("/v1/chat/completions", CHAT).text
    vectors = client.embeddings.create(model="mock", input=["one", "two"], dimensions=4).data
    assert [len(vector.embedding) for vector in vectors] == [4, 4]
    whole = client.responses.create(model="mock", input="one", max_output_tokens=5)
    events = list(client.responses.create(model="mock", input="one", max_output_tokens=5, stream=True))
    assert events[-1].type == "response.incomplete"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_messages_route_speaks_anthropics_events(fast: Engine) -> None:
    body = {"max_tokens": 5, "messages": CHAT["messages"], "system": "Be short."}
    whole = fast.post("/v1/messages", body).json()
    events = fast.post("/v1/messages", {**body, "stream": True}).events
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts) == whole["content"][0]["text"]
    assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("max_tokens", 5)


def test_rerank_orders_documents_by_score(fast: Engine) -> None:
    answer = fast.post("/v1/rerank", {"query": "q", "documents": ["a", "b", "c"], "top_n": 2}).json()
    scores = [one["relevance_score"] for one in answer["results"]]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)


def test_generate_speaks_sglangs_words(fast: Engine) -> None:
    body = {"text": "one", "sampling_params": {"max_new_tokens": 3}}
    whole = fast.post("/generate", body).json()
    events = fast.post("/generate", {**body, "stream": True}).events
    assert [event["text"] for event in events[:-1]][-1] == whole["text"]
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    batch = fast.post("/generate", {"text": ["one", "two"], "sampling_params": {"max_new_tokens": 3}}).json()
    assert (len(batch), batch[0]["text"]) == (2, whole["text"])


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", b"{", 400, "not valid JSON"),
        ("/v1/completions", b"[]", 400, "must be a JSON object"),
        ("/v1/completions", {"prompt": ""}, 400, "must not be empty"),
        ("/v1/completions", {"prompt": [1, -1]}, 400, "token ids"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "stream": 1}, 400, "stream"),
        ("/v1/completions", {"prompt": "x", "stream_options": {}}, 400, "stream=True"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 200000}, 400, "maximum context length is 131072"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1 << 60, "stop": "x"}, 400, "maximum context length"),
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "does not exist"),
        ("/v1/completions", {"prompt": "x", "kv_transfer_params": 1}, 400, "must be an object"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [1]}, 400, "messages.0"),
        ("/v1/messages", CHAT | {"max_tokens": None}, 400, "max_tokens"),
        ("/v1/embeddings", {"input": None}, 400, "input"),
        ("/nothing", {}, 404, "Not Found"),
    ],
)
def test_wrong_request_is_refused_by_name(fast: Engine, path: str, body: object, status: int, words: str) -> None:
    answer = fast.post(path, body)
    assert (answer.status, words in answer.body.decode()) == (status, True), answer.body


def test_requests_sent_ahead_are_answered_in_their_order(fast: Engine) -> None:
    prompts = ["one", "two", "three"]
    with fast.connect() as connection:
        raw = [fast.raw("/v1/completions", {"prompt": prompt, "max_tokens": 8}) for prompt in prompts]
        connection.sendall(b"".join(raw[:2]) + raw[2].replace(b"host: mock", b"host: mock\r\nconnection: close"))
        bodies = read_all(connection).split(b"HTTP/1.1 200 OK")[1:]
    texts = [json.loads(body.partition(b"\r\n\r\n")[2])["choices"][0]["text"] for body in bodies]
    assert texts == [fast.complete(prompt).text for prompt in prompts]


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
        (b"garbage\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 300000 + b"\r\n\r\n", b"431"),
    ],
    ids=["http2", "garbage", "head"],
)
def test_bytes_that_are_no_request_end_their_connection_only(fast: Engine, raw: bytes, status: bytes) -> None:
    with fast.connect() as connection:
        connection.sendall(raw)
        assert read_all(connection).startswith(b"HTTP/1.1 " + status)
    assert fast.request("GET", "/health").status == 200


def test_upgrade_is_not_made_and_expect_is_met(fast: Engine) -> None:
    with fast.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: mock\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
        assert read_all(connection, timeout_s=2).startswith(b"HTTP/1.1 200 OK")
    with fast.connect() as connection:
        body = {"prompt": "x", "max_tokens": 1}
        connection.sendall(fast.raw("/v1/completions", body, headers="expect: 100-continue\r\nconnection: close\r\n"))
        answer = read_all(connection, timeout_s=2)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


def test_engine_says_what_routers_ask(fast: Engine) -> None:
    for path in ("/health", "/ping", "/health_generate", "/version", "/query", "/live", "/ready"):
        assert fast.request("GET", path).status == 200, path
    assert fast.request("GET", "/server_info").json()["disaggregation_mode"] == "null"
    assert fast.request("GET", "/get_server_info").json() == fast.request("GET", "/server_info").json()
    assert fast.request("GET", "/model_info").json()["is_generation"] is True
    assert fast.request("GET", "/get_load").json()[0]["num_reqs"] == 0
    assert fast.request("GET", "/v1/loads").json()["loads"][0]["num_waiting_reqs"] == 0
    assert fast.request("GET", "/v1/models/other").status == 404


def test_metrics_have_the_names_that_routers_read(fast: Engine) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    fast.complete("one")
    page = fast.request("GET", "/metrics").body.decode()
    found = {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}
    wanted = "num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens_total generation_tokens_total"
    assert {f"vllm:{name}" for name in wanted.split()} <= found
    assert {"vllm:cache_config_info", "vllm:lora_requests_info", "vllm:time_to_first_token_seconds_count"} <= found
    assert {"sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"} <= found


def test_requests_are_recorded_with_their_headers(fast: Engine) -> None:
    fast.post("/v1/completions", {"prompt": "recorded", "max_tokens": 1}, x_request_id="id-1")
    entry = fast.request("GET", "/mock/requests").json()[-1]
    assert entry["body"]["prompt"] == "recorded"
    assert ["x-request-id", "id-1"] in entry["headers"]
    assert fast.request("DELETE", "/mock/requests").status == 200
    assert fast.request("GET", "/mock/requests").json() == []
