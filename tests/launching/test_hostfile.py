"""Hosts: DeepSpeed's grammar and refusals, the ssh commands, and runs through an ssh that stays on this host."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from spawn import environment

from zero2jax.cli.main import main
from zero2jax.launching.hostfile import filter_hosts, forwarded_environment, parse_hostfile, ssh_command
from zero2jax.launching.hosts import host_commands, run_on_hosts
from zero2jax.launching.local import Launch

HOSTS = {"worker-0": 4, "worker-1": 4}


# The cases of DeepSpeed's tests/unit/launcher/test_run.py.
def test_hosts_are_read_and_comments_and_blank_lines_are_not():
    text = "\nworker-1 slots=2\n  # worker-9 slots=1\n\nworker-2   slots=4  # fast\n"
    assert parse_hostfile(text) == {"worker-1": 2, "worker-2": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worker-1 slots=2\nworker-1 slots=2", "hosts.txt, line 2: host 'worker-1' comes twice"),
        ("worker-1", "line 1: 'worker-1' is not of the form `host slots=N`"),
        ("worker-1 slots", "is not of the form"),
        ("worker-1 slots=two", "is not of the form"),
        ("worker-1 slots=0", "N of at least 1"),
        ("-oProxyCommand=x slots=1", "is not of the form"),  # ssh would take it for an option
        ("worker-1 slots=99999999999999", "N of at least 1 and at most 4096, as in"),
        ("this is bad slots=1", "is not of the form"),
        ("# nothing\n\n", "hosts.txt: it names no host"),
    ],
)
def test_other_lines_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_hostfile(text, "hosts.txt")


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1, 2, 3)}),
        ("worker-0", "", {"worker-0": (0, 1, 2, 3)}),
        ("worker-0:1,3@worker-1", "", {"worker-0": (1, 3), "worker-1": (0, 1, 2, 3)}),
        ("worker-1:2@worker-0:0", "", {"worker-0": (0,), "worker-1": (2,)}),
        ("worker-1:0@worker-1:2@worker-1:0", "", {"worker-1": (0, 2)}),
        ("", "worker-0", {"worker-1": (0, 1, 2, 3)}),
        ("", "worker-0:0,1,2,3@worker-1:2", {"worker-1": (0, 1, 3)}),
    ],
)
def test_filters_choose_slots(include, exclude, expected):
    assert filter_hosts(HOSTS, include, exclude) == expected


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("worker-0", "worker-1", "the two exclude each other"),
        ("jeff", "", "host 'jeff' is not in the hostfile, which has worker-0, worker-1"),
        ("", "jeff:1", "host 'jeff' is not in the hostfile"),
        ("worker-1:4", "", "host 'worker-1' has no slot 4; it has 0 to 3"),
        ("worker-1:5,6,0", "", "has no slot 5, 6"),
        ("worker-1:", "", "'worker-1:' is not of the form"),
        ("worker-1:a", "", "is not of the form"),
        ("@worker-1", "", "'' is not of the form"),
        ("", "worker-0@worker-1", "no slot is left"),
    ],
)
def test_filters_that_cannot_be_are_refused(include, exclude, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        filter_hosts(HOSTS, include, exclude)


def test_hosts_get_the_settings_of_this_one(tmp_path):
    env = {"NCCL_DEBUG": "INFO", "XLA_FLAGS": "--a b", "HOME": "/root", "PYTHONPATH": "/p", "SECRET": "s"}
    assert forwarded_environment(env, [tmp_path]) == {
        "NCCL_DEBUG": "INFO",
        "XLA_FLAGS": "--a b",
        "PYTHONPATH": "/p",
    }
    (tmp_path / ".deepspeed_env").write_text("# ours\nDATA=/d=1\n\nNCCL_DEBUG=WARN\n")
    found = forwarded_environment(env, [tmp_path / "none", tmp_path])
    assert (found["DATA"], found["NCCL_DEBUG"]) == ("/d=1", "WARN")


def test_ssh_quotes_what_a_shell_would_take_apart(tmp_path):
    folder = tmp_path / "a b"
    *head, remote = ssh_command("me@h", ["run", "$(x)", "it's"], {"A": "1 2;"}, folder)
    assert head == ["ssh", "-o", "BatchMode=yes", "me@h"]
    assert shlex.split(remote) == ["cd", str(folder), "&&", "exec", "env", "A=1 2;", "run", "$(x)", "it's"]


def commands(hosts, coordinator=None, devices=None, **settings):
    launch = Launch(("train.py",), devices_per_process=devices, coordinator=coordinator)
    return host_commands(launch, hosts, {"NCCL_X": "1"}, settings.pop("folder"), **settings)


def test_each_host_launches_its_part(tmp_path):
    first, second = commands({"me@a": (0, 1), "b": (1, 2, 3)}, folder=tmp_path)
    words = shlex.split(second.arguments[-1])
    expected = "--processes 3 --devices-per-process 1 --grace-s 30 --coordinator a:29500 --first-process 2"
    assert words[words.index("launch") + 1 :] == [
        *expected.split(),
        *["--total-processes", "5", "--end-with-stdin", "train.py"],
    ]
    assert {"CUDA_VISIBLE_DEVICES=1,2,3", "NCCL_X=1", "ZERO2JAX_RESTARTS=0"} <= set(words)
    assert "--first-process 0 " in first.arguments[-1]
    assert (first.name, first.keep_stdin) == ("me@a", True)
    (one,) = commands({"a": (0, 1, 2, 3)}, devices=2, folder=tmp_path, platform="gpu")
    assert "--processes 2 --devices-per-process 2 --platform gpu" in one.arguments[-1]


def test_hosts_that_cannot_do_it_are_named(tmp_path):
    with pytest.raises(
        ValueError, match="2 processes of 2 devices on host b: that needs 4 slots, and it has 3"
    ):
        commands({"a": (0, 1, 2, 3), "b": (0, 1, 2)}, devices=2, processes=2, folder=tmp_path)
    with pytest.raises(ValueError, match="on 2 hosts with process 0 at localhost: other hosts cannot reach"):
        commands({"localhost": (0,), "b": (0,)}, folder=tmp_path)


FAKE_SSH = """#!/bin/sh
# ssh -o BatchMode=yes HOST COMMAND, on this host
[ "$1 $2" = "-o BatchMode=yes" ] || exit 255
HOST=$3 exec sh -c "$4"
"""
PROGRAM = """
import os, sys, time
token = os.environ["ZERO2JAX_TOKEN"]
assert len(token) == 32
open(f"token{os.environ['RANK']}", "w").write(token)
print(os.environ["HOST"], *(os.environ[n] for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")), flush=True)
if "fail" in sys.argv and os.environ["HOST"] == "b" and os.environ["ZERO2JAX_RESTARTS"] == "0":
    time.sleep(0.3)
    sys.exit(6)
if "fail" in sys.argv and os.environ["ZERO2JAX_RESTARTS"] == "0":
    time.sleep(60)
"""


@pytest.fixture
def fake_ssh(tmp_path, monkeypatch):
    path = tmp_path / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(FAKE_SSH)
    path.chmod(0o755)
    for name, value in environment(PATH=f"{path.parent}{os.pathsep}{os.environ['PATH']}").items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)


@pytest.mark.usefixtures("fake_ssh")
def test_processes_of_all_hosts_are_one_program():
    lines = []
    launch = Launch((sys.executable, "program.py"))
    code = run_on_hosts(
        launch, {"a": (0,), "b": (0, 1)}, platform="cpu", write=lambda x: lines.append(x.decode())
    )
    assert code == 0, lines
    assert sorted(line for line in lines if line[4] == "[") == [  # and not what importing jax may log
        "[a] [0] a 0 3 a 29500\n",
        "[b] [1] b 1 3 a 29500\n",
        "[b] [2] b 2 3 a 29500\n",
    ]
    assert len({Path(f"token{i}").read_text() for i in range(3)}) == 1


def test_the_secret_is_on_no_command_line(tmp_path):
    first, second = commands({"a": (0,), "b": (0,)}, folder=tmp_path)
    assert first.stdin == second.stdin
    assert re.fullmatch(rb"[0-9a-f]{32}\n", first.stdin)
    for command in (first, second):
        assert first.stdin.decode().strip() not in " ".join(command.arguments)
        assert "read -r ZERO2JAX_TOKEN" in command.arguments[-1]


@pytest.mark.usefixtures("fake_ssh")
def test_a_host_that_fails_ends_the_others_and_is_left_out_of_the_restart(capfd):
    lines = []
    launch = Launch((sys.executable, "program.py", "fail"), max_restarts=1, grace_s=5)
    code = run_on_hosts(
        launch, {"a": (0,), "b": (0,)}, platform="cpu", write=lambda x: lines.append(x.decode())
    )
    assert code == 0, lines
    assert "[a] [0] a 0 1 a 29501\n" in lines
    error = capfd.readouterr().err
    assert "host b failed first (exit code 6)" in error
    assert "restart 1 of 1 on 1 host(s)" in error


def test_a_single_host_that_is_this_one_needs_no_ssh(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "hosts").write_text("localhost slots=4\nother slots=1\n")
    say = "import os; print(os.environ['RANK'], os.environ['CUDA_VISIBLE_DEVICES'])"
    options = ["--hostfile", str(tmp_path / "hosts"), "--include", "localhost:1,3", "--platform", "gpu"]
    assert main(["launch", *options, sys.executable, "-c", say]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0 1", "[1] 1 3"]
