"""The routes that compute no text: embeddings, ranking, tokens, models, and what an engine says of itself.

Decides the answers; each is a function of the request alone, or of the engine's numbers.
"""

from __future__ import annotations

import base64
import struct
import time
from typing import Any

import xxhash

from kvxfer.mock_engine.asked import chat_text, read_prompts
from kvxfer.mock_engine.engine import MockEngine
from kvxfer.mock_engine.http_protocol import MockRequest
from kvxfer.mock_engine.introspection import VLLM_VERSION, load_info, metrics_text, model_info, server_info
from kvxfer.mock_engine.responder import Responder
from kvxfer.mock_engine.shape import to_json
from kvxfer.mock_engine.tokens import PromptTokens, ids_of_text, text_of_ids, unpack_ids
from kvxfer.openai.errors import RequestError

DIMENSIONS = 16
DIMENSIONS_MAX = 8192
METRICS_KIND = b"text/plain; version=0.0.4; charset=utf-8"
_STARTED_UNIX_S = int(time.time())


def check_model(engine: MockEngine, model: Any) -> str:
    """The model that a body names, or the engine's. Raises RequestError for another one."""
    if model is None or model == "":
        return engine.options.model[0]
    if model not in engine.options.model:
        raise RequestError(
            f"The model `{model}` does not exist.", param="model", status=404, error_code="model_not_found"
        )
    return str(model)


def _vector(packed: bytes, dimensions: int) -> list[float]:
    return [round((xxhash.xxh3_64_intdigest(packed, index) >> 11) / (1 << 52) - 1, 6) for index in range(dimensions)]


def _usage(prompts: list[PromptTokens]) -> dict[str, int]:
    total = sum(prompt.count for prompt in prompts)
    return {"prompt_tokens": total, "total_tokens": total}


def _count_prompts(engine: MockEngine, prompts: list[PromptTokens]) -> None:
    engine.pace.counts.prompt_computed += sum(prompt.count for prompt in prompts)


def embeddings(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``POST /v1/embeddings``."""
    body = request.json()
    model = check_model(engine, body.get("model"))
    prompts = read_prompts(body.get("input"), "input")
    dimensions = body.get("dimensions") or DIMENSIONS
    if type(dimensions) is not int or not 0 < dimensions <= DIMENSIONS_MAX:
        raise RequestError(f"dimensions must be 1 to {DIMENSIONS_MAX}", param="dimensions")
    data = []
    for index, prompt in enumerate(prompts):
        vector: Any = _vector(prompt.packed, dimensions)
        if body.get("encoding_format") == "base64":
            vector = base64.b64encode(struct.pack(f"<{dimensions}f", *vector)).decode()
        data.append({"object": "embedding", "index": index, "embedding": vector})
    _count_prompts(engine, prompts)
    responder.answer(200, to_json({"object": "list", "data": data, "model": model, "usage": _usage(prompts)}))


def rerank(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``POST /v1/rerank``."""
    body = request.json()
    model = check_model(engine, body.get("model"))
    query, documents = body.get("query"), body.get("documents")
    if not isinstance(query, str) or not isinstance(documents, list) or not documents:
        raise RequestError("query must be a string, and documents a list", param="documents")
    texts = [str(one.get("text", "")) if isinstance(one, dict) else str(one) for one in documents]
    prompts = [PromptTokens(ids_of_text(query + text)) for text in texts]
    scored = [
        {"index": index, "relevance_score": round((prompt.seed >> 11) / (1 << 53), 6), "document": {"text": text}}
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    scored.sort(key=lambda one: -float(str(one["relevance_score"])))
    wanted = body.get("top_n") or len(scored)
    _count_prompts(engine, prompts)
    responder.answer(
        200, to_json({"id": "rerank", "model": model, "results": scored[:wanted], "usage": _usage(prompts)})
    )


def tokenize(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``POST /tokenize``."""
    body = request.json()
    check_model(engine, body.get("model"))
    messages = body.get("messages")
    text = chat_text(messages, body.get("tools")) if messages is not None else body.get("prompt")
    if not isinstance(text, str):
        raise RequestError("prompt must be a string", param="prompt")
    ids = unpack_ids(ids_of_text(text))
    responder.answer(200, to_json({"count": len(ids), "max_model_len": engine.options.max_model_len, "tokens": ids}))


def count_tokens(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``POST /v1/messages/count_tokens``, Anthropic's."""
    body = request.json()
    check_model(engine, body.get("model"))
    messages = body.get("messages")
    if body.get("system"):
        messages = [{"role": "system", "content": body["system"]}, *(messages or [])]
    text = chat_text(messages, body.get("tools"))
    responder.answer(200, to_json({"input_tokens": len(unpack_ids(ids_of_text(text)))}))


def detokenize(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``POST /detokenize``."""
    tokens = request.json().get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise RequestError("tokens must be a list of token ids", param="tokens")
    responder.answer(200, to_json({"prompt": text_of_ids(tokens)}))


def _model(engine: MockEngine, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED_UNIX_S,
        "owned_by": "mock",
        "root": name,
        "parent": None,
        "max_model_len": engine.options.max_model_len,
    }


def models(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``GET /v1/models``, and ``/v1/models/NAME``."""
    name = request.path.removeprefix("/v1/models").removeprefix("/")
    if name:
        responder.answer(200, to_json(_model(engine, check_model(engine, name))))
    else:
        data = [_model(engine, one) for one in engine.options.model]
        responder.answer(200, to_json({"object": "list", "data": data}))


def healthy(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``GET /health``."""
    responder.answer(200, b"", b"text/plain")


def version(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``GET /version``, vLLM's."""
    responder.answer(200, to_json({"version": VLLM_VERSION}))


def metrics(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``GET /metrics``."""
    responder.answer(200, metrics_text(engine), METRICS_KIND)


def about_server(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``GET /server_info``, SGLang's."""
    responder.answer(200, to_json(server_info(engine)))


def about_model(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``GET /model_info``, SGLang's."""
    responder.answer(200, to_json(model_info(engine)))


def load(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``GET /get_load``: a list with one entry for each data-parallel rank."""
    responder.answer(200, to_json([load_info(engine)]))


def loads(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``GET /v1/loads``."""
    responder.answer(200, to_json({"version": "0.5.23", "loads": [load_info(engine)]}))


def flush(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``POST /flush_cache`` and ``POST /reset_prefix_cache``."""
    engine.forget_prefixes()
    responder.answer(200, b"", b"text/plain")


def bootstrap_query(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``GET /query``: what MooncakeConnector's bootstrap server tells a router: each data-parallel rank's engine (vLLM
    0.32, mooncake_utils.py)."""
    responder.answer(200, to_json({"0": {"engine_id": engine.engine_id, "worker_addr": {"0": {"0": engine.port}}}}))
