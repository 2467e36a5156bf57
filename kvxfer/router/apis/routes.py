"""The routes that the router knows by name.

Decides which route has which fields and style. Other paths pass through without being looked at.
"""

from __future__ import annotations

from kvxfer.router.apis.api import LIMITS, MANY, Api
from kvxfer.router.apis.messages_style import MESSAGES
from kvxfer.router.apis.openai_style import GENERATE, OPENAI
from kvxfer.router.apis.responses_style import RESPONSES
from kvxfer.router.apis.style import StreamStyle

COMPLETIONS = Api(
    "/v1/completions",
    generates=True,
    style=OPENAI,
    prompt_fields=("prompt", "prompt_embeds"),
    limit_fields=("max_tokens",),
    many_fields=MANY,
    has_list_of_prompts=True,
)
CHAT = Api(
    "/v1/chat/completions",
    generates=True,
    style=OPENAI,
    prompt_fields=("messages",),
    beside_fields=("tools",),
    limit_fields=LIMITS[:2],
    many_fields=MANY,
)
RESPONSES_API = Api(
    "/v1/responses",
    generates=True,
    style=RESPONSES,
    prompt_fields=("input",),
    beside_fields=("instructions", "tools"),
    limit_fields=("max_output_tokens",),
)
MESSAGES_API = Api(
    "/v1/messages",
    generates=True,
    style=MESSAGES,
    prompt_fields=("messages",),
    beside_fields=("system", "tools"),
    limit_fields=("max_tokens",),
)
GENERATE_API = Api(
    "/generate",
    generates=True,
    style=GENERATE,
    prompt_fields=("text", "input_ids", "input_embeds"),
    has_list_of_prompts=True,
    is_sampled_by_object=True,
    requires_model=False,
)


def _whole(path: str, *, requires_model: bool = False, style: StreamStyle = OPENAI) -> Api:
    """A route that one engine answers at once, and of whose body the router looks at the model only."""
    return Api(path, generates=False, style=style, prompt_fields=(), requires_model=requires_model)


ROUTES: tuple[Api, ...] = (
    COMPLETIONS,
    CHAT,
    RESPONSES_API,
    MESSAGES_API,
    GENERATE_API,
    _whole("/v1/messages/count_tokens", requires_model=True, style=MESSAGES),
    _whole("/v1/embeddings", requires_model=True),
    *(_whole(path) for path in ("/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score")),
    *(_whole(path) for path in ("/tokenize", "/detokenize")),
)
_BY_PATH = {api.path: api for api in ROUTES}


def api_of(path: str) -> Api | None:
    """The Api of a path; None for one that the router does not know by name."""
    return _BY_PATH.get(path)


def style_of(path: str) -> StreamStyle:
    """In which an error is told at a path, also at one that is no route: ``/v1/messages`` and all below it are of
    Anthropic's API."""
    return MESSAGES if path == MESSAGES_API.path or path.startswith(MESSAGES_API.path + "/") else OPENAI
