"""What a route's body and answer look like, for every route that the router knows: pure, and blind to engines.

``api_of`` finds the :class:`~kvxfer.router.apis.api.Api` of a path. ``prompts`` reads the prompt of a body without
making Python objects of it. ``openai_style``, ``responses_style`` and ``messages_style`` read the events of an answer.
"""

from kvxfer.router.apis.api import Api
from kvxfer.router.apis.routes import ROUTES, api_of, style_of
from kvxfer.router.apis.style import StreamStyle

__all__ = ["ROUTES", "Api", "StreamStyle", "api_of", "style_of"]
