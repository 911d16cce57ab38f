"""The launcher: outputs, failures, signals, restarts. Most programs here are shell or plain Python, quick to start."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import types

import jax
import pytest
from spawn import environment, launch_arguments, write_program

from zero2jax.cli.launch import split_script
from zero2jax.cli.main import main
from zero2jax.launching.local import Launch, free_port, make_commands, process_environment, run_launch
from zero2jax.launching.supervise import Command, run_together

LOCAL = ("127.0.0.1", 5)


@pytest.fixture(autouse=True, scope="module")
def threads():
    """JAX's threads, as any test may have started them: the launcher has to live with them."""
    jax.devices()


def sh(text, num_processes=2, **settings):
    return Launch(("sh", "-c", text), num_processes, **settings)


def run(launch):
    lines = []
    code = run_launch(launch, write=lambda line: lines.append(line.decode()))
    return code, lines


def test_each_process_gets_its_place_and_its_devices():
    found = [
        process_environment(
            sh("", 2, devices_per_process=3), i, LOCAL, {"A": "b", "JAX_LOCAL_DEVICE_IDS": "7"}
        )
        for i in (0, 1)
    ]
    assert found[1] == {
        "A": "b",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "5",
        "WORLD_SIZE": "2",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "ZERO2JAX_RESTARTS": "0",
        "PYTHONUNBUFFERED": "1",
    }
    assert found[0]["RANK"] == "0"
    proxied = process_environment(sh(""), 0, LOCAL, {"http_proxy": "p", "no_proxy": "a"})
    assert proxied["no_proxy"] == "a,127.0.0.1"
    other_host = sh("", 2, first_process=2, total_processes=4, coordinator="node1:7")
    (_, last) = make_commands(other_host, {})
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
    assert [last.environment[name] for name in names] == ["node1", "7", "4", "3", "1"]


def test_the_processes_of_a_start_have_a_secret_of_their_own():
    def tokens(launch, env=types.MappingProxyType({})):
        return {command.environment.get("ZERO2JAX_TOKEN") for command in make_commands(launch, env)}

    first, second = tokens(sh("", 3)), tokens(sh("", 3))
    assert len(first) == len(second) == 1
    assert first != second
    assert len(*first) == 32
    assert tokens(sh(""), {"ZERO2JAX_TOKEN": "ours"}) == {"ours"}
    part = sh("", 1, total_processes=2, coordinator="node1")  # another launcher would make another one
    assert tokens(part) == {None}
    assert tokens(part, {"ZERO2JAX_TOKEN": "ours"}) == {"ours"}
    for command in make_commands(sh("", 3), {"ZERO2JAX_TOKEN": "ours"}):
        assert "ours" not in " ".join(command.arguments)


@pytest.mark.parametrize(
    ("num_processes", "each", "visible", "expected"),
    [
        (2, None, "4,5,6,7", ["4,5", "6,7"]),
        (2, 1, "4,5,6,7", ["4", "5"]),
        (1, None, "0,1,2", ["0,1,2"]),
        (2, None, "GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
    ],
)
def test_gpus_are_divided(num_processes, each, visible, expected):
    settings = sh("", num_processes, platform="gpu", devices_per_process=each)
    env = {"CUDA_VISIBLE_DEVICES": visible, "JAX_PLATFORMS": "cpu"}
    found = [process_environment(settings, i, LOCAL, env) for i in range(num_processes)]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in found] == expected
    assert "JAX_PLATFORMS" not in found[0]


def test_settings_that_cannot_be_are_refused():
    settings = sh("", 2, platform="gpu", devices_per_process=2)
    with pytest.raises(
        ValueError, match="2 processes with 2 GPUs each: that needs 4 GPUs, and 3 are visible"
    ):
        process_environment(settings, 0, LOCAL, {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    with pytest.raises(ValueError, match="--processes 0: it must be at least 1"):
        sh("", 0)
    with pytest.raises(ValueError, match="2 processes from index 3 on, of 4 in all"):
        sh("", 2, first_process=3, total_processes=4)
    with pytest.raises(ValueError, match="--grace-s -1: it must be 0 or more"):
        sh("", grace_s=-1.0)
    with pytest.raises(ValueError, match="--max-restarts -1"):
        sh("", max_restarts=-1)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--processes", "2", "a.py", "--x", "1"], ["--processes", "2", "--", "a.py", "--x", "1"]),
        (["--processes=2", "--end-with-stdin", "a.py"], ["--processes=2", "--end-with-stdin", "--", "a.py"]),
        (["a.py", "--processes", "3"], ["--", "a.py", "--processes", "3"]),
        (["--logs", "d", "--", "a.py", "--"], ["--logs", "d", "--", "a.py", "--"]),
        (["--help"], ["--help"]),
        ([], []),
    ],
)
def test_what_follows_the_script_is_the_scripts(words, expected):
    assert split_script(words) == expected


def test_the_launchers_options_have_these_names(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    counts = (
        "--processes --devices-per-process --max-restarts --grace-s --hosts --first-process --total-processes"
    )
    memory = "--memory-preallocate --memory-fraction --memory-allocator --memory-collective-mb"
    others = "--platform --logs --hostfile --include --exclude --print --coordinator --end-with-stdin --help"
    written = re.findall(r"^\W+(?:-h, )?(--[a-z][a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert sorted(written) == sorted(f"{counts} {memory} {others}".split())


def test_options_after_the_script_are_said_by_name(capfd):
    assert main(["launch", "true", "--processes", "2", "--max_restarts=1", "--platform", "x", "--args"]) == 0
    error = capfd.readouterr().err
    assert "zero2jax launch: --processes, --max_restarts=1 came after the script and belongs to it" in error
    assert main(["launch", "true", "--steps", "3"]) == 0
    assert "came after" not in capfd.readouterr().err


def test_several_launchers_find_the_same_port_and_do_not_restart_alone(capsys):
    here, there = (
        make_commands(sh("", 1, first_process=i, total_processes=2, coordinator="node1"), {}) for i in (0, 1)
    )
    ports = {command.environment["MASTER_PORT"] for command in (*here, *there)}
    assert ports == {"29500"}
    (six,) = make_commands(sh("", 1, coordinator="[::1]:7"), {})
    assert (six.environment["MASTER_ADDR"], six.environment["MASTER_PORT"]) == ("::1", "7")
    options = ["--processes", "1", "--total-processes", "2", "--max-restarts", "1"]
    assert main(["launch", *options, "true"]) == 2
    assert "--max-restarts 1 and --total-processes 2: the launchers of the other" in capsys.readouterr().err
    for wrong in ("localhost:abc", "h:0", "h:70000", ":5", "[::1", ""):
        with pytest.raises(ValueError, match="reading the coordinator"):
            sh("", coordinator=wrong)


def test_outputs_are_interleaved_by_line_and_logged(tmp_path):
    text = "echo out $RANK; echo err $RANK >&2; printf unfinished"
    code, lines = run(sh(text, 3, logs=tmp_path / "logs"))
    assert code == 0
    for i in range(3):
        mine = [line for line in lines if line.startswith(f"[{i}] ")]
        assert mine == [f"[{i}] out {i}\n", f"[{i}] err {i}\n", f"[{i}] unfinished\n"]
        assert (tmp_path / "logs" / f"process{i}.log").read_text() == f"out {i}\nerr {i}\nunfinished"


def test_the_first_failure_ends_all_with_its_code_and_last_lines(capfd):
    start_s = time.monotonic()
    code, _ = run(sh('if [ $RANK = 1 ]; then echo "no such file"; exit 7; fi; sleep 60 & wait'))
    assert code == 7
    assert time.monotonic() - start_s < 20
    error = capfd.readouterr().err
    assert "1 | no such file" in error
    assert "process 1 failed first (exit code 7); its last lines are above" in error


def test_one_that_is_killed_counts_as_a_shell_counts_it(capfd):
    code, _ = run(sh("if [ $RANK = 0 ]; then kill -KILL $$; fi; sleep 60 & wait"))
    assert code == 128 + signal.SIGKILL
    assert "process 0 failed first (SIGKILL)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("consequence", "cause", "code", "failed"),
    [("kill -ABRT $$", "exit 3", 3, ("1",)), ("exit 1", "kill -KILL $$", 137, ("1", "0"))],
)
def test_of_two_that_ended_together_the_one_that_had_waited_is_not_the_cause(
    tmp_path, consequence, cause, code, failed
):
    """Both are dead before the launcher looks: it is writing a line of a third one meanwhile."""
    wait = f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; touch {tmp_path}/dead"
    texts = [f"{wait}0; {consequence}", f"{wait}1; {cause}", "echo ready; exec sleep 60"]
    commands = [Command(str(i), ("sh", "-c", text), dict(os.environ)) for i, text in enumerate(texts)]

    def write(line):
        (tmp_path / "go").touch()
        while len(list(tmp_path.glob("dead*"))) < 2:
            time.sleep(0.02)
        time.sleep(0.3)

    outcome = run_together(commands, write=write)
    assert (outcome.code, outcome.failed) == (code, failed)


@pytest.mark.parametrize(
    ("content", "reason"), [("", "Exec format error"), ("#!/no/such\n", "No such file or directory")]
)
def test_what_is_no_program_is_named(tmp_path, capfd, content, reason):
    path = tmp_path / "run"
    path.write_text(content)
    path.chmod(0o755)
    assert main(["launch", "--platform", "cpu", str(path)]) == 1
    error = capfd.readouterr().err
    assert f"launching {path}: {reason}. Is it a program? A script needs a first line like #!/bin/sh" in error
    assert "Traceback" not in error


GLOO = "ValueError: UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize("end", [f"echo '{GLOO}'; exit 1", "kill -ABRT $$"])
@pytest.mark.parametrize("later_s", [0, 0.5])
def test_one_that_waited_for_another_is_not_the_cause(tmp_path, end, later_s):
    """The first to end says that its peer had gone, or is aborted by JAX; the cause ends after it."""
    commands = [
        Command(
            "0", ("sh", "-c", f"while [ ! -e {tmp_path}/on ]; do sleep 0.02; done; {end}"), dict(os.environ)
        ),
        Command(
            "1",
            ("sh", "-c", f"trap '' TERM; touch {tmp_path}/on; sleep {later_s}; echo mine; exit 3"),
            dict(os.environ),
        ),
    ]
    outcome = run_together(commands, write=lambda line: None)
    assert (outcome.code, outcome.failed, outcome.last_lines) == (3, ("1",), ("mine",))


def test_one_that_was_left_alone_by_nobody_that_failed_is_the_cause():
    outcome = run_together(
        [Command("0", ("sh", "-c", f"echo '{GLOO}'; exit 1"), dict(os.environ))], write=lambda line: None
    )
    assert outcome.failed == ("0",)


# Process 1 is killed; process 0 speaks of it as gloo and JAX do, and goes on.
SURVIVES = """
import os, signal, sys, time
print("[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1", flush=True)
print("[Gloo] Rank [Gloo] Rank 3 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\\n"
      "2 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3", flush=True)
print("step 1", flush=True)
if os.environ["RANK"] == "1":
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda *_: (print("told to end", flush=True), error()))
def error():
    print("Traceback (most recent call last):\\n  File x\\n\\nValueError: UNKNOWN: Gloo failed\\nmore", flush=True)
    sys.exit(1)
time.sleep(60)
"""


def test_the_cause_is_not_buried_by_those_that_had_waited(tmp_path, capfd):
    program = (sys.executable, str(write_program(tmp_path, SURVIVES)))
    code, lines = run(Launch(program, 2, logs=tmp_path))
    assert code == 128 + signal.SIGKILL
    assert sorted(lines) == ["[0] step 1\n", "[0] told to end\n", "[1] step 1\n"]
    said = capfd.readouterr().err.splitlines()
    assert said[0] == "  1 | step 1"
    assert "5 lines of the errors that followed in the others are not shown (--logs keeps all)" in said[1]
    assert "process 1 failed first (SIGKILL); its last lines are above. SIGKILL comes from outside" in said[2]
    log = (tmp_path / "process0.log").read_text()
    assert "[Gloo] Rank 0" in log
    assert "ValueError: UNKNOWN: Gloo failed" in log


def test_errors_are_shown_before_a_failure_and_after_an_abort(capfd):
    text = 'echo "Traceback (most recent call last):"; sleep 0.3; kill -ABRT $$'
    other = "trap 'echo \"Traceback (most recent\"; exit 1' TERM; sleep 5 & wait"
    _, lines = run(sh(f"if [ $RANK = 1 ]; then {text}; fi; {other}"))
    assert sorted(line[:15] for line in lines) == ["[0] Traceback (", "[1] Traceback ("]
    assert "not shown" not in capfd.readouterr().err


def test_who_was_waited_for_is_said_again_at_the_end(capfd):
    waiting = "zero2jax: waiting for process 1, for 30 s: ..."
    run(sh(f'if [ $RANK = 0 ]; then echo "{waiting}"; sleep 0.3; exit 3; fi; sleep 60 & wait'))
    assert f"before that: {waiting}\n" in capfd.readouterr().err


def test_it_is_said_that_some_go_on_after_one_has_ended(capfd, monkeypatch):
    monkeypatch.setattr("zero2jax.launching.supervise._ALONE_S", 1.0)
    assert run(sh("if [ $RANK != 1 ]; then sleep 2; fi", 3))[0] == 0
    error = capfd.readouterr().err
    assert (
        error.count("zero2jax launch: 1 ended 1 s ago, without an error, and of the others still run: 0, 2.")
        == 1
    )
    run(sh("if [ $RANK = 1 ]; then sleep 0.2; fi", 2))  # the last one ends before it could be said
    run(sh("if [ $RANK = 1 ]; then sleep 0.8; exit 75; fi; sleep 1; exit 75", 2))
    assert capfd.readouterr().err == ""


def test_those_that_ignore_the_end_are_killed():
    start_s = time.monotonic()
    code, _ = run(sh('trap "" TERM; if [ $RANK = 1 ]; then exit 2; fi; while true; do sleep 0.1; done'))
    assert code == 2
    assert time.monotonic() - start_s < 20


def test_restarts_go_on_with_those_that_had_not_failed(tmp_path, capfd):
    text = 'echo "run $ZERO2JAX_RESTARTS: $RANK of $WORLD_SIZE"; [ $ZERO2JAX_RESTARTS = 2 -o $RANK != 0 ] || exit 9'
    code, lines = run(sh(text, 3, max_restarts=2, logs=tmp_path))
    assert code == 0
    assert [line for line in lines if "run 2" in line] == ["[0] run 2: 0 of 1\n"]
    assert sorted(line[4:] for line in lines if "run 1" in line)[0] == "run 1: 0 of 2\n"
    assert "restart 2 of 2 with 1 process(es)" in capfd.readouterr().err
    assert (tmp_path / "process0.restart2.log").read_text() == "run 2: 0 of 1\n"
    code, _ = run(sh("exit 4", 2, max_restarts=1))
    assert code == 4


# Says its pid, and that it was told; ends as told.
TOLD = """
import os, signal, sys, time
def told(number, frame):
    print("told", signal.Signals(number).name, flush=True)
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, told)
print("pid", os.getpid(), flush=True)
time.sleep(60)
"""


def start(program, **settings):
    """The launcher as a process of its own, and the pids of what it has started."""
    running = subprocess.Popen(
        launch_arguments(program, **settings),
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = [running.stdout.readline() for _ in range(2)]
    return running, [int(line.split()[-1]) for line in lines]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("number", "options", "code"),
    [
        (signal.SIGINT, (), 130),
        (signal.SIGTERM, (), 143),
        (None, ("--end-with-stdin",), 143),
        pytest.param(
            signal.SIGKILL,
            (),
            -9,
            marks=pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux's"),
        ),
    ],
)
def test_signals_reach_all_and_no_process_stays(tmp_path, number, options, code):
    running, pids = start(write_program(tmp_path, TOLD), options=options)
    if number is None:
        running.stdin.close()
        running.stdin = None
    else:
        running.send_signal(number)
    out, error = running.communicate(timeout=60)
    assert running.returncode == code, error
    if number != signal.SIGKILL:
        name = "SIGTERM" if number is None else number.name
        assert sorted(out.splitlines()) == [f"[0] told {name}", f"[1] told {name}"]
    deadline_s = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: (time.sleep(0.2), sys.exit(75)))
print("pid 0", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("options", [(), ("--end-with-stdin",)])
def test_those_that_all_save_on_a_signal_give_their_code_to_the_launcher(tmp_path, options):
    running, _ = start(write_program(tmp_path, SAVES), options=options)
    if options:
        running.stdin.close()
        running.stdin = None
    else:
        running.send_signal(signal.SIGTERM)
    _, error = running.communicate(timeout=60)
    assert running.returncode == 75, error


def test_preempted_processes_are_not_failed_and_not_started_anew(capfd):
    code, lines = run(sh("echo run; if [ $RANK = 1 ]; then sleep 0.5; fi; exit 75", 2, max_restarts=3))
    assert (code, len(lines)) == (75, 2)
    assert "failed" not in capfd.readouterr().err
    # The other one hangs, or fails since it is alone.
    assert run(sh("if [ $RANK = 0 ]; then exit 75; fi; sleep 60", 2, grace_s=0.3))[0] == 75
    assert run(sh("if [ $RANK = 0 ]; then exit 75; fi; sleep 0.5; exit 1", 2))[0] == 75
    assert run(sh("if [ $RANK = 0 ]; then exit 3; fi; sleep 0.5; exit 75", 2))[0] == 3


def test_a_signal_while_processes_are_started_reaches_all_and_starts_no_more():
    waits = "import signal, sys, time\nsignal.signal(15, lambda *a: sys.exit(75))\ntime.sleep(60)"
    commands = [Command(str(i), (sys.executable, "-S", "-c", waits), dict(os.environ)) for i in range(200)]
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    start_s = time.monotonic()
    outcome = run_together(commands, grace_s=100)
    assert outcome.signal == signal.SIGTERM
    assert outcome.code in (75, 143)
    assert time.monotonic() - start_s < 60


def test_long_lines_and_progress_bars_are_passed_on():
    bars = r"import sys; sys.stdout.write('\r1%\r2%\r'); sys.stdout.write('a\r\n\nb\n' + 'x' * 9_000_000 + '\nend')"
    lines = []
    start_s = time.monotonic()
    run_together([Command("0", (sys.executable, "-c", bars), dict(os.environ))], write=lines.append)
    assert lines[:5] == [b"[0] 1%\n", b"[0] 2%\n", b"[0] a\n", b"[0] \n", b"[0] b\n"]
    assert sum(line.count(b"x") for line in lines) == 9_000_000
    assert max(map(len, lines)) < 2_000_000
    assert lines[-1] == b"[0] end\n"
    assert time.monotonic() - start_s < 20


def test_a_descendant_that_writes_on_is_not_waited_for():
    start_s = time.monotonic()
    text = "setsid timeout 15 yes & echo a; exit 3"
    outcome = run_together([Command("0", ("sh", "-c", text), dict(os.environ))], write=lambda line: None)
    assert outcome.code == 3
    assert time.monotonic() - start_s < 10


def test_standard_input_that_cannot_be_watched_is_refused():
    launcher = (sys.executable, "-m", "zero2jax", "launch")
    for stdin in ("</dev/null", "<&-"):
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {stdin}', "sh", *launcher, "--end-with-stdin", "true"],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2
        assert "--end-with-stdin: standard input is closed, or a file" in done.stderr


def test_usage_errors_need_no_traceback(capsys):
    assert main(["launch", "--processes", "0", "x.py"]) == 2
    assert "--processes 0: it must be at least 1" in capsys.readouterr().err
    for missing in ("no/such.py", "no-such-command"):
        assert main(["launch", missing]) == 2
        assert f"launching {missing}: there is no such" in capsys.readouterr().err


# One dies in mid-run, the other waits for it in a collective.
DIES = """
import os, signal
import jax, zero2jax
from jax.experimental import multihost_utils

startup = zero2jax.init_distributed(initialization_timeout_s=120, heartbeat_timeout_s=5)
jax.devices()
if startup.process_index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
multihost_utils.sync_global_devices("never")
"""


def without_the_launcher(tmp_path, text):
    """The exit codes and the standard errors of two processes that run a program."""
    program = write_program(tmp_path, text)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    running = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env=environment(**address, RANK=str(i)),
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in running]
    return [process.returncode for process in running], errors


def test_without_the_launcher_heartbeats_end_the_others_and_name_the_dead(tmp_path):
    codes, errors = without_the_launcher(tmp_path, DIES)
    assert codes == [-signal.SIGABRT, -signal.SIGKILL]
    assert "tasks are unhealthy (stopped sending heartbeats):\n1\n" in errors[0]


# Process 1 ends, and process 0 goes on for longer than it is waited for.
GOES_ON = """
import time
import jax, zero2jax

startup = zero2jax.init_distributed(initialization_timeout_s=120, shutdown_timeout_s=1)
jax.devices()
if startup.process_index == 0:
    time.sleep(90)
"""


def test_a_process_that_has_ended_waits_for_the_others_as_long_as_it_is_told_to(tmp_path):
    start = time.monotonic()
    codes, errors = without_the_launcher(tmp_path, GOES_ON)
    assert codes == [-signal.SIGABRT] * 2
    assert "DEADLINE_EXCEEDED" in errors[1]
    assert time.monotonic() - start < 80
