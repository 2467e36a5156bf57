"""The keys of a request's prompt: what a router may know a prompt by, without a tokenizer.

Decides what two requests must have in common so that they share a key: route, model, adapter, salt, tools, what a
template is given, and, by option, tenant. It must never know where the keys are kept, nor what a hit is worth.
"""

from __future__ import annotations

from kvxfer.openai.chains import ChainHasher, Secret
from kvxfer.policy.prefixes import NO_CHAIN, Chain
from kvxfer.router.apis.api import Api
from kvxfer.router.apis.roots import HEADS, root_fields
from kvxfer.router.apis.routes import ROUTES
from kvxfer.router.inbound import Inbound

THREAD_BYTES = 64 << 10
"""A longer body is hashed in another thread, by the caller."""
_EMBEDS = ("prompt_embeds", "input_embeds")


class PromptKeys:
    """Finds the keys of requests with one secret, of which there is one for all processes that share keys."""

    __slots__ = ("_hashers",)

    def __init__(self, secret: Secret) -> None:
        self._hashers = {api.path: _hasher(api, secret) for api in ROUTES if api.prompt_fields}

    def keys_of(self, inbound: Inbound, *, model: str = "", tenant: bytes = b"") -> Chain:
        """The chain of a request's prompt; an empty one for a route without a prompt, and for embeddings.

        ``model``: the name by which the router knows what answers, where the body has another or none. An adapter has a
        name of its own: its model's name here would let adapters share keys. ``tenant``: requests of different ones
        share no key; empty where all tenants share. Never fails for a request that was read.

        Above 16 KiB the GIL is free meanwhile, but the calling thread waits: an event loop gives a body of more than
        ``THREAD_BYTES`` to another thread.
        """
        hasher = self._hashers.get(inbound.path)
        if hasher is None or inbound.prompt_field in _EMBEDS:
            return NO_CHAIN
        texts = (inbound.path.encode(), (model or inbound.model).encode(), tenant)
        root = hasher.root(inbound.scan, texts)
        return hasher.chain(
            inbound.scan, root, inbound.prompt_field, is_list_of_prompts=inbound.api.has_list_of_prompts
        )


def _hasher(api: Api, secret: Secret) -> ChainHasher:
    heads = tuple(name for name in HEADS if name in api.beside_fields)
    return ChainHasher(secret, api.fields, root=root_fields(api.path), heads=heads)
