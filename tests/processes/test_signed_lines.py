"""Lines that a job's processes sign: read back, and told from everything else."""

import json
import os
import socket
import time

import pytest

from zero2jax.processes.signed_lines import job_token, read_line, receive_line, signed_line

MESSAGE = {"steps": 3, "at": "ü.py:1"}


def test_a_line_is_read_back_and_the_token_is_not_in_it():
    line = signed_line(MESSAGE, "secret")
    assert line.endswith(b"\n")
    assert read_line(line, "secret") == (MESSAGE, True)
    assert b"secret" not in line
    assert job_token({"ZERO2JAX_TOKEN": "t"}) == "t"
    assert job_token({}) == ""


def test_another_token_or_text_is_told():
    line = signed_line(MESSAGE, "secret")
    assert read_line(line, "other") == (MESSAGE, False)
    assert read_line(line, "") == (MESSAGE, False)
    changed = line.replace(b'"steps": 3', b'"steps": 4')
    assert read_line(changed, "secret") == (MESSAGE | {"steps": 4}, False)
    assert read_line(b"0" * 64 + b" " + json.dumps(MESSAGE).encode(), "secret") == (MESSAGE, False)


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"GET / HTTP/1.1", b"a [1]", b"a 3", b"\xff \xff", b"a " + b"[" * 60000]
)
def test_what_is_no_line_of_ours_is_none(line):
    assert read_line(line, "secret") == (None, False)


def test_receiving_is_bounded_in_bytes_and_time():
    for sent, expected in ((b"a b\nc", b"a b"), (b"x" * 100, None), (b"half", None)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(sent)
            theirs.shutdown(socket.SHUT_WR)
            assert receive_line(ours, time.monotonic() + 5, 50) == expected
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"half")
        with pytest.raises(TimeoutError):
            receive_line(ours, time.monotonic() + 0.1, 50)


def test_a_token_may_be_of_any_bytes():
    token = job_token({"ZERO2JAX_TOKEN": os.fsdecode(b"\xff\xfe")})
    assert read_line(signed_line(MESSAGE, token), token) == (MESSAGE, True)
    assert read_line(signed_line(MESSAGE, token), "") == (MESSAGE, False)
