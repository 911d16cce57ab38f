"""How the processes of one job speak beside JAX: a line of JSON, signed with the job's token.

The token (`ZERO2JAX_TOKEN`) is a secret of the job, which the launcher makes and which never travels: a line carries
the HMAC-SHA256 of its text under it. Without a token the key is empty: then a signature only tells our lines from
others'. Nothing is encrypted, and a line that was overheard can be sent again (see SECURITY.md).
"""

import hmac
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

TOKEN = "ZERO2JAX_TOKEN"
MAX_LINE_BYTES = 1 << 16  # of what a process says of itself


def job_token(env: Mapping[str, str] = os.environ) -> str:
    """The secret of this job, or "" if it has none."""
    return env.get(TOKEN, "")


def signed_line(message: Mapping[str, Any], token: str) -> bytes:
    """A message, with its signature before it."""
    text = json.dumps(message).encode()
    return _signature(text, token) + b" " + text + b"\n"


def read_line(line: bytes, token: str) -> tuple[dict[str, Any] | None, bool]:
    """(the message, or None if it is no line of ours; whether its signature is that of this token)."""
    signature, _, text = line.strip().partition(b" ")
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None, False
    if not isinstance(message, dict):
        return None, False
    return message, hmac.compare_digest(signature, _signature(text, token))


def _signature(text: bytes, token: str) -> bytes:
    return hmac.new(os.fsencode(token), text, "sha256").hexdigest().encode()


def receive_line(connection: socket.socket, deadline: float, max_bytes: int) -> bytes | None:
    """One line, or None if the connection ends, or brings too much, before its end.

    Raises:
      OSError: the connection breaks, or `deadline` (of `time.monotonic`) passes.
    """
    data, received = bytearray(), b""
    while b"\n" not in received:
        if time.monotonic() >= deadline:
            raise TimeoutError("timed out")
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        received = connection.recv(65536)
        data += received
        if not received or len(data) > max_bytes:
            return None
    return bytes(data[: data.index(b"\n")])
