"""Which agents start without OpenSSL, and which say why they do not."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from kvxfer.config import AgentConfig, encrypt_mode
from kvxfer.errors import ConfigError
from kvxfer.transport.encryption import SessionEncryption, session_encryption
from kvxfer.types import EncryptMode
from tests.support import child

AUTO, ALWAYS, NEVER = EncryptMode.AUTO, EncryptMode.ALWAYS, EncryptMode.NEVER
FAR, NEAR = "192.0.2.1", "127.0.0.1"


def test_the_environment_has_precedence() -> None:
    assert encrypt_mode(AUTO, {}) is AUTO
    assert encrypt_mode(AUTO, {"KVXFER_ENCRYPT": " Always "}) is ALWAYS
    with pytest.raises(ConfigError, match="KVXFER_ENCRYPT must be one of auto, always, never, not 'perhaps'"):
        encrypt_mode(AUTO, {"KVXFER_ENCRYPT": "perhaps"})
    with pytest.raises(ConfigError, match="encrypt must be one of"):
        AgentConfig(encrypt="sometimes")  # type: ignore[arg-type]


def test_never_beyond_loopback_needs_insecure() -> None:
    assert session_encryption(AgentConfig(encrypt=NEVER), NEAR, {}).mode is NEVER
    with pytest.raises(ConfigError, match="nothing is encrypted"):
        session_encryption(AgentConfig(encrypt=NEVER, bind_host=FAR), FAR, {})
    assert session_encryption(AgentConfig(encrypt=NEVER, insecure=True), FAR, {}).mode is NEVER


def test_with_openssl_every_address_is_possible() -> None:
    assert session_encryption(AgentConfig(), FAR, {}) == SessionEncryption(AUTO, "", False)
    assert session_encryption(AgentConfig(encrypt=ALWAYS), FAR, {}) == SessionEncryption(ALWAYS, "", False)
    named = session_encryption(AgentConfig(openssl_library="a"), NEAR, {"KVXFER_OPENSSL_LIBRARY": "b"})
    assert named.library == "b"


def test_without_openssl() -> None:
    """In a process of its own: what is loaded stays."""
    source = """
        import itertools, json
        from kvxfer.config import AgentConfig
        from kvxfer.errors import ConfigError
        from kvxfer.transport.encryption import session_encryption
        from kvxfer.types import EncryptMode
        environ = {"KVXFER_OPENSSL_LIBRARY": "libssl-is-not-here.so.3"}
        said = {}
        for mode, host, insecure in itertools.product(("auto", "always"), ("127.0.0.1", "192.0.2.1"), (False, True)):
            try:
                session_encryption(AgentConfig(encrypt=EncryptMode(mode), insecure=insecure), host, environ)
                said[f"{mode} {host} {insecure}"] = ""
            except ConfigError as error:
                said[f"{mode} {host} {insecure}"] = str(error)
        print(json.dumps(said))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=60,
        env=child.environment(),
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for allowed in (f"auto {NEAR} False", f"auto {NEAR} True", f"auto {FAR} True"):
        assert said.pop(allowed) == ""
    assert "OpenSSL cannot be used" in said[f"auto {FAR} False"]
    assert "set insecure" in said[f"auto {FAR} False"]
    assert all("OpenSSL cannot be used" in text for text in said.values())
