"""Requests to the standard library's small HTTP servers. Decides that a request which does not name one host is
refused; must never know a route.
"""

from __future__ import annotations

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler

from kvxfer.protocol.http_url import is_one_host


class OneHostHandler(BaseHTTPRequestHandler):
    """Answers 400 to a request without one ``Host``, or with several."""

    def parse_request(self) -> bool:
        """Whether the request is to be answered; if not, the client has been told why."""
        if not super().parse_request():
            return False
        hosts = [value.encode("latin-1", "replace") for value in self.headers.get_all("host", ())]
        is_known = is_one_host(hosts, is_required=self.request_version == "HTTP/1.1")
        if not is_known:
            self.send_error(HTTPStatus.BAD_REQUEST, "the request needs one host field")
        return is_known
