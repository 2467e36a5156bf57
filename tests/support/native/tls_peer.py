"""A dialer that proves its key to a core by TLS, and then owns every record that it sends. TLS is the host's libssl.
Must never know a frame but the HELLO that names both ends."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import os
import socket
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_long, c_size_t, c_void_p
from typing import Any

from kvxfer._native import _core as native

KEY = b"k" * 32
LABEL = b"kvxfer stream tls v1\n"
SUITE = bytes([0x13, 0x01])
VERSION_13, CONTROL_MIN_VERSION = 0x0304, 123
UseSession = CFUNCTYPE(c_int, c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_size_t), POINTER(c_void_p))
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "TLS_method": (c_void_p, []),
    "SSL_CTX_new": (c_void_p, [c_void_p]),
    "SSL_CTX_free": (None, [c_void_p]),
    "SSL_CTX_ctrl": (c_long, [c_void_p, c_int, c_long, c_void_p]),
    "SSL_CTX_set_psk_use_session_callback": (None, [c_void_p, UseSession]),
    "SSL_new": (c_void_p, [c_void_p]),
    "SSL_free": (None, [c_void_p]),
    "SSL_set_fd": (c_int, [c_void_p, c_int]),
    "SSL_set0_wbio": (None, [c_void_p, c_void_p]),
    "SSL_connect": (c_int, [c_void_p]),
    "SSL_do_handshake": (c_int, [c_void_p]),
    "SSL_session_reused": (c_int, [c_void_p]),
    "SSL_write": (c_int, [c_void_p, c_char_p, c_int]),
    "SSL_key_update": (c_int, [c_void_p, c_int]),
    "SSL_CIPHER_find": (c_void_p, [c_void_p, c_char_p]),
    "SSL_SESSION_new": (c_void_p, []),
    "SSL_SESSION_set1_master_key": (c_int, [c_void_p, c_char_p, c_size_t]),
    "SSL_SESSION_set_cipher": (c_int, [c_void_p, c_void_p]),
    "SSL_SESSION_set_protocol_version": (c_int, [c_void_p, c_int]),
    "BIO_new": (c_void_p, [c_void_p]),
    "BIO_s_mem": (c_void_p, []),
    "BIO_ctrl_pending": (c_size_t, [c_void_p]),
    "BIO_read": (c_int, [c_void_p, c_void_p, c_int]),
}


def load_ssl() -> Any:
    library = ctypes.CDLL("libssl.so.3")
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class TlsPeer:
    """Has proven its key once `dial` returns. It makes records first, and sends them by its `socket` afterwards."""

    def __init__(self, name: str = "tls-peer") -> None:
        self.ref = native.AgentRef(name, 1, os.urandom(16))
        self.socket: socket.socket | None = None
        self.hello = b""
        """The frame that names both ends."""
        self._ssl = load_ssl()
        self._use = UseSession(self._use_session)
        self._context = self._ssl.SSL_CTX_new(self._ssl.TLS_method())
        self._ssl.SSL_CTX_ctrl(self._context, CONTROL_MIN_VERSION, VERSION_13, None)
        self._ssl.SSL_CTX_set_psk_use_session_callback(self._context, self._use)
        self._tls = self._ssl.SSL_new(self._context)
        self._out = self._ssl.BIO_new(self._ssl.BIO_s_mem())

    def dial(self, core: Any, key: bytes = KEY) -> None:
        nothing = bytes(32)
        self.hello = native.encode(native.Hello(native.HelloStep.DIAL, self.ref, core.agent, nothing, nothing))
        self._identity = ctypes.create_string_buffer(self.hello, len(self.hello))
        self._secret = hmac.digest(key, LABEL + self.hello, hashlib.sha256)
        self.socket = socket.create_connection(("127.0.0.1", core.tcp_port), 10)
        self.socket.setblocking(True)  # libssl reads from it
        self._ssl.SSL_set_fd(self._tls, self.socket.fileno())
        assert self._ssl.SSL_connect(self._tls) == 1
        assert self._ssl.SSL_session_reused(self._tls) == 1
        self._ssl.SSL_set0_wbio(self._tls, self._out)

    def _use_session(self, tls: int, digest: int, identity: Any, size: Any, session: Any) -> int:
        made = self._ssl.SSL_SESSION_new()
        self._ssl.SSL_SESSION_set1_master_key(made, self._secret, len(self._secret))
        self._ssl.SSL_SESSION_set_cipher(made, self._ssl.SSL_CIPHER_find(tls, SUITE))
        self._ssl.SSL_SESSION_set_protocol_version(made, VERSION_13)
        identity[0], size[0], session[0] = ctypes.addressof(self._identity), len(self.hello), made
        return 1

    def update_keys(self, count: int, *, asks: bool = False) -> None:
        """Make records of no data. The core answers each of them if it `asks`."""
        for _ in range(count):
            assert self._ssl.SSL_key_update(self._tls, int(asks)) == 1
            assert self._ssl.SSL_do_handshake(self._tls) == 1

    def write(self, data: bytes) -> None:
        assert self._ssl.SSL_write(self._tls, data, len(data)) == len(data)

    def take(self) -> bytes:
        """The records that were made since the last call."""
        made = ctypes.create_string_buffer(self._ssl.BIO_ctrl_pending(self._out))
        assert self._ssl.BIO_read(self._out, made, len(made)) == len(made)
        return made.raw

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        self._ssl.SSL_free(self._tls)
        self._ssl.SSL_CTX_free(self._context)
