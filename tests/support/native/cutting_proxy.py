"""A TCP proxy that cuts connections in the middle."""

from __future__ import annotations

import socket
import threading

WINDOW_BYTES = 128 * 1024


class CuttingProxy:
    """Forwards TCP connections, and cuts each of the first ones after so many bytes towards, or from, the dialer. A
    connection that the dialer gave up before its cut, because an answer was late, leaves the cut to a later one.
    """

    def __init__(self, port: int, cuts: list[int], outward: list[int] | None = None) -> None:
        self.port, self.cuts, self.outward, self.cut = port, list(cuts), list(outward or []), 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_BYTES)  # little is under way when it cuts
        self.address = self.listener.getsockname()[1]
        self.sockets: list[socket.socket] = []
        self.threads = [threading.Thread(target=self.serve)]
        self.threads[0].start()

    def serve(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_BYTES)
            far.connect(("127.0.0.1", self.port))
            for end in (near, far):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WINDOW_BYTES)
            limit = self.cuts.pop(0) if self.cuts else None
            outward = self.outward.pop(0) if self.outward else None
            self.sockets += [near, far]
            for way in ((near, far, outward, self.outward), (far, near, limit, self.cuts)):
                self.threads.append(threading.Thread(target=self.forward, args=way))
                self.threads[-1].start()

    def forward(self, origin: socket.socket, to: socket.socket, limit: int | None, cuts: list[int]) -> None:
        left = limit
        try:
            while data := origin.recv(min(65536, left) if left else 65536):
                to.sendall(data)
                if left is not None and (left := left - len(data)) == 0:
                    self.cut += 1
                    break
        except OSError:
            pass
        if limit is not None and left:
            cuts.insert(0, limit)
        for end in (origin, to):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for end in self.sockets:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self.threads:
            thread.join(10)
        for end in self.sockets:
            end.close()
