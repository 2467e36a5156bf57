"""Requests to the standard library's small HTTP servers. Decides that a request which does not name one host is
refused, and one whose path no route has; must never know a route.
"""

from __future__ import annotations

import urllib.parse
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler

from kvxfer.errors import ProtocolError
from kvxfer.protocol.http_target import has_control_character, path_and_query
from kvxfer.protocol.http_url import is_one_host


class OneHostHandler(BaseHTTPRequestHandler):
    """Answers 400 to a request without one ``Host``, with several, or whose target names another one; 404 to a path
    with a control character. ``path`` has no host."""

    def parse_request(self) -> bool:
        """Whether the request is to be answered; if not, the client has been told why."""
        if not super().parse_request():
            return False
        hosts = [value.encode("latin-1", "replace") for value in self.headers.get_all("host", ())]
        if not is_one_host(hosts, is_required=self.request_version == "HTTP/1.1"):
            self.send_error(HTTPStatus.BAD_REQUEST, "the request needs one host field")
            return False
        try:
            target = path_and_query(self.path.encode("latin-1", "replace"), hosts[0] if hosts else None)
        except ProtocolError as error:
            self.send_error(HTTPStatus.BAD_REQUEST, str(error))
            return False
        self.path = target.decode("latin-1")
        if has_control_character(urllib.parse.unquote(self.path.partition("?")[0])):
            self.send_error(HTTPStatus.NOT_FOUND)
            return False
        return True
