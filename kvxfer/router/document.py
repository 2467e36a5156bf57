"""What the API's document says of a hot route: the body that it takes and the answers that it gives.

Decides words of the document only. It says what the router itself looks at: every other field is an engine's business
and passes.
"""

from __future__ import annotations

from typing import Any

from kvxfer.openai.errors import INVALID_REQUEST, SERVER_ERROR
from kvxfer.router.apis import Api
from kvxfer.router.inbound import INTEGER_MAX, MODEL_CHARS_MAX

Schema = dict[str, Any]

_ERROR_MEMBERS: Schema = {
    "message": {"type": "string"},
    "type": {"type": "string", "examples": [INVALID_REQUEST, SERVER_ERROR]},
    "param": {"type": ["string", "null"]},
    "code": {"type": "string"},
    "retryable": {"type": "boolean"},
}
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"type": "object", "required": ["message", "type", "code"], "properties": _ERROR_MEMBERS},
    },
}
"""OpenAI's error object; routes of another API have it in that API's shape, with the same members."""
DEFAULT: dict[int | str, Schema] = {
    "default": {
        "description": "an error: 4xx is the client's, 5xx a worker's or that there is none",
        "content": {"application/json": {"schema": ERROR}},
    }
}
"""Of every route; also in place of FastAPI's 422, which the router answers as 400."""
ENGINES_OWN: dict[int | str, Schema] = {"default": {"description": "an error, in the engine's or the router's words"}}
"""In place of DEFAULT, of routes whose answers pass as they are."""
ERRORS = {
    400: "the request is wrong: `param` names the field",
    404: "no worker serves that model, or that route",
    503: "no worker takes it now; `retry-after` says when to ask again",
}
UNREADY: dict[int | str, Schema] = {
    503: {"description": "a request would be refused now", "content": {"application/json": {}}}
}
_TEXT: Schema = {"type": "string", "minLength": 1}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT: Schema = {
    "anyOf": [
        _TEXT,
        _IDS,
        {"type": "array", "items": _TEXT, "minItems": 1},
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
_OBJECTS: Schema = {"type": "array", "items": {"type": "object"}, "minItems": 1}
_PROMPTS: dict[str, Schema] = {
    "messages": _OBJECTS,
    "prompt": _PROMPT,
    "text": _PROMPT,
    "input_ids": _PROMPT,
    "input": {"anyOf": [_TEXT, _OBJECTS]},
}
"""Of fields that no engine takes otherwise. Others (embeddings) are any string or list."""
_EMBEDDED: Schema = {"type": ["string", "array"]}

WORKER_BODY: Schema = {"content": {"application/json": {"schema": {"type": "object"}}}, "required": True}
"""OpenAPI's requestBody of an admin's worker."""


def request_body(api: Api) -> Schema:
    """OpenAPI's requestBody of a route."""
    properties: dict[str, Schema] = {"model": {"type": "string", "minLength": 1, "maxLength": MODEL_CHARS_MAX}}
    required = ["model"] if api.requires_model else []
    if api.generates:
        properties["stream"] = {"type": ["boolean", "null"]}
    for name in api.prompt_fields:
        properties[name] = _PROMPTS.get(name, _EMBEDDED)
    for name in api.limit_fields:
        properties[name] = {"type": ["integer", "null"], "minimum": 1, "maximum": INTEGER_MAX}
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": True}
    if len(api.prompt_fields) == 1:
        required.append(api.prompt_fields[0])
    elif api.prompt_fields:
        schema["anyOf"] = [{"required": [name]} for name in api.prompt_fields]
    if required:
        schema["required"] = required
    return {"content": {"application/json": {"schema": schema}}, "required": True}


def responses(api: Api) -> dict[int | str, Schema]:
    """OpenAPI's responses of a route."""
    content: Schema = {"application/json": {"schema": {"type": ["object", "array"]}}}
    if api.generates:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    answers: dict[int | str, Schema] = {200: {"description": "the engine's answer", "content": content}}
    for status, text in ERRORS.items():
        answers[status] = {"description": text, "content": {"application/json": {"schema": ERROR}}}
    return answers
