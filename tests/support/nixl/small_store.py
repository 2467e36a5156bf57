"""A small TCPStore: of torch's protocol what the connector speaks, on a dictionary."""

from __future__ import annotations

import socketserver
import struct
import threading

HOST = "127.0.0.1"
VALIDATE, SET, GET, CHECK, DELETE, PING = 0, 1, 3, 5, 8, 13
MAGIC = 0x3C85F7CE


class SmallStore(socketserver.ThreadingTCPServer):
    """Its methods are those of torch's that tests call; keys have a ``/`` before them on the wire, as torch's do."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int = 0) -> None:
        super().__init__((HOST, port), SmallStoreHandler)
        self.keys: dict[bytes, bytes] = {}
        self.lines = 0
        self.queries: list[int] = []
        self.silent = threading.Event()
        """Once it is set, connections get no answer any more."""
        self.port = int(self.server_address[1])
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def get(self, key: str) -> bytes:
        return self.keys[b"/" + key.encode()]

    def set(self, key: str, value: bytes) -> None:
        self.keys[b"/" + key.encode()] = value

    def check(self, keys: list[str]) -> bool:
        return all(b"/" + key.encode() in self.keys for key in keys)

    def num_keys(self) -> int:
        return len(self.keys)

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(10)


class SmallStoreHandler(socketserver.StreamRequestHandler):
    server: SmallStore

    def handle(self) -> None:
        self.server.lines += 1
        try:
            while kind := self.rfile.read(1):
                self.server.queries.append(kind[0])
                self.answer(kind[0])
        except (OSError, struct.error):
            return

    def answer(self, kind: int) -> None:
        keys = self.server.keys
        if kind == VALIDATE:
            assert self.number("=I") == MAGIC
        elif kind == PING:
            self.wfile.write(self.rfile.read(4))
        elif kind == SET:
            key, value = self.text(), self.text()
            if not self.server.silent.is_set():
                keys[key] = value
        elif kind == CHECK:
            wanted = [self.text() for _ in range(self.number("=Q"))]
            self.say(b"\0" if all(key in keys for key in wanted) else b"\1")
        elif kind == GET:
            value = keys[self.text()]
            self.say(struct.pack("=Q", len(value)) + value)
        else:
            assert kind == DELETE
            self.say(struct.pack("=q", 1 if keys.pop(self.text(), None) is not None else 0))

    def say(self, data: bytes) -> None:
        if not self.server.silent.is_set():
            self.wfile.write(data)

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.rfile.read(struct.calcsize(form)))[0])

    def text(self) -> bytes:
        return self.rfile.read(self.number("=Q"))
