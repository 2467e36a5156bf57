"""Whether a server of any maker is ready, by the routes that servers of this kind have. Decides nothing else."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

ROUTES = ("/ready", "/health", "/v1/models")
"""The first of them that the server has (not 404 or 405) decides."""
TIMEOUT_S = 5.0


def why_not_ready(url: str) -> str:
    """Empty where the server at ``url`` would serve, else the reason."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    why = "it has none of the routes " + ", ".join(ROUTES)
    for route in ROUTES:
        connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", parts.path.rstrip("/") + route)
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException) as error:
            return f"{url} does not answer ({type(error).__name__})"
        finally:
            connection.close()
        if response.status == 200:
            return ""
        if response.status not in (404, 405):
            return f"{url}{route} answers {response.status}"
    return why
