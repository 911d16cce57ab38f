"""The roll call: who is missing, wrong, or runs other code, said by name to all who arrived."""

import contextlib
import dataclasses
import pkgutil
import random
import shutil
import socket
import threading
import time
import types
from pathlib import Path

import pytest

import zero2jax
from zero2jax.launching.local import free_port
from zero2jax.processes import roll_call
from zero2jax.processes.roll_call import Entry, StartError, call_roll
from zero2jax.processes.signed_lines import signed_line


def roll(*entries, timeout_s=5.0, address=None, token="secret", tokens=types.MappingProxyType({})):
    """What each of the given entries gets of the roll call: a list of entries, or the message of its error."""
    address = address or f"127.0.0.1:{free_port()}"
    found, answers = {}, []

    def one(i, entry):
        try:
            answer = call_roll(entry, address, timeout_s, tokens.get(i, token))
            found[i] = answer.entries
            answers.append(answer)
        except StartError as error:
            found[i] = str(error)

    threads = [threading.Thread(target=one, args=item) for item in enumerate(entries)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for answer in answers:
        answer.close()
    return [found[i] for i in range(len(entries))]


def test_all_processes_get_the_list_of_all():
    entries = [Entry(i, 3, host=f"host{i}", code={"jax": "1"}) for i in range(3)]
    assert roll(*entries) == [entries, entries, entries]
    assert call_roll(Entry(0, 1), f"127.0.0.1:{free_port()}", 1).entries == [
        Entry(0, 1)
    ]  # alone: asks nobody


def test_process_0_says_early_whom_it_waits_for(monkeypatch, capsys):
    monkeypatch.setattr(roll_call, "_SAY_S", 0.05)
    roll(Entry(0, 3), timeout_s=0.3)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("zero2jax: waiting for process 1, 2 of 3 at 127.0.0.1:")
    assert line.endswith(", for 0.3 s at most (1 arrived)")


def test_who_is_missing_is_named_to_all_who_arrived():
    found = roll(*(Entry(i, 4, host=f"host{i}") for i in (0, 2)), timeout_s=1.0)
    assert found[0] == found[1]
    assert "process 1, 3 did not arrive at 127.0.0.1:" in found[0]
    assert "arrived: process 0 (host host0, pid" in found[0]
    assert "process 2 (host host2" in found[0]
    assert "Other hosts cannot reach 127.0.0.1" in found[0]


def test_a_count_beyond_any_list_is_said_as_well():
    (found,) = roll(Entry(0, 1 << 60), timeout_s=0.1)
    assert "process 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20 and" in found
    assert f" and {(1 << 60) - 21} more did not arrive" in found


def test_process_0_missing_is_said_too():
    (found,) = roll(Entry(1, 2), timeout_s=0.5)
    assert "process 0 did not answer at 127.0.0.1:" in found
    assert "within 0.5 s" in found


def test_wrong_counts_and_indices_are_named():
    found = roll(Entry(0, 3, host="a"), Entry(1, 2, host="b"))
    assert found[0] == found[1]
    assert "process 1 (host b" in found[0]
    assert "expects 2 processes, and process 0 (host a" in found[0]
    found = roll(Entry(0, 3), Entry(1, 3, host="b"), Entry(1, 3, host="c"), timeout_s=3.0)
    assert "have the same index" in found[0]
    assert "(host b" in found[0]
    assert "(host c" in found[0]


def test_other_code_is_refused_by_name():
    code = {"jax": "0.10.2", "script": "abc"}
    found = roll(
        *(Entry(i, 3, host=f"host{i}", code=code | ({"script": "xyz"} if i == 2 else {})) for i in range(3))
    )
    assert found[0] == found[1] == found[2]
    assert "process 2 (host host2" in found[0]
    assert "script xyz, not abc" in found[0]
    assert "process 1" not in found[0]


def test_one_that_goes_away_again_is_named():
    address = ("127.0.0.1", free_port())
    line = signed_line(dataclasses.asdict(Entry(2, 3, host="gone")), "secret")

    def come_and_go():
        while True:
            try:
                with socket.create_connection(address) as connection:
                    connection.sendall(line)
                return
            except ConnectionRefusedError:
                time.sleep(0.05)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    (found,) = roll(Entry(0, 3), address=f"127.0.0.1:{address[1]}")
    thread.join()
    assert "process 2 (host gone" in found
    assert "arrived and ended again" in found


def test_strangers_at_the_port_do_no_harm():
    address = ("127.0.0.1", free_port())

    def knock():
        for text in (b"GET / HTTP/1.1\r\n\r\n", b"", b"[1]\n"):
            while True:
                try:
                    with socket.create_connection(address) as connection:
                        connection.sendall(text)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)

    thread = threading.Thread(target=knock)
    thread.start()
    first = threading.Timer(0.5, roll, (Entry(1, 2),), {"address": f"127.0.0.1:{address[1]}"})
    first.start()
    (found,) = roll(Entry(0, 2), address=f"127.0.0.1:{address[1]}")
    thread.join()
    first.join()
    assert [entry.process_index for entry in found] == [0, 1]


def test_a_taken_port_is_said():
    with socket.create_server(("127.0.0.1", 0)) as server:
        (found,) = roll(Entry(0, 2), address=f"127.0.0.1:{server.getsockname()[1]}")
    assert "cannot listen on port" in found
    assert "MASTER_PORT" in found


def test_versions_name_sources_and_packages():
    found = roll_call.code_versions()
    assert set(found) == {"python", "jax", "jaxlib", "zero2jax sources", "script"}


def test_a_change_of_any_module_shows_in_the_roll_call(tmp_path):
    """Two hosts of which one has another zero/ or engine must not pass: every file of the package counts."""
    package = Path(zero2jax.__file__).parent
    copy = shutil.copytree(package, tmp_path / "zero2jax", ignore=shutil.ignore_patterns("__pycache__"))
    unchanged = roll_call.sources_digest(copy)
    assert unchanged == roll_call.sources_digest(package) == roll_call.code_versions()["zero2jax sources"]
    modules = {m.name for m in pkgutil.walk_packages([str(package)], "zero2jax.")}
    files = [copy / "__init__.py"]
    for name in sorted(modules):
        path = tmp_path.joinpath(*name.split("."))
        files.append(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
    assert {copy / "zero" / "step.py", copy / "engine.py", copy / "processes" / "start.py"} < set(files)
    for path in files:
        text = path.read_text()
        path.write_text(text + "\n")
        assert roll_call.sources_digest(copy) != unchanged, path
        path.write_text(text)
    (copy / "zero" / "step.py").rename(copy / "zero" / "steps.py")
    assert roll_call.sources_digest(copy) != unchanged


def test_two_processes_of_one_index_are_never_both_accepted():
    for _ in range(8):
        _, *twins = roll(Entry(0, 2), Entry(1, 2, host="b"), Entry(1, 2, host="c"), timeout_s=0.5)
        accepted = [answer for answer in twins if isinstance(answer, list)]
        refused = [answer for answer in twins if isinstance(answer, str)]
        assert len(accepted) <= 1
        for text in refused:
            assert (
                "same index" in text or "has the index of" in text or "no other process has index 1" in text
            )


def test_a_list_without_this_process_is_refused():
    rows = [dataclasses.asdict(Entry(0, 2)), dataclasses.asdict(Entry(1, 2, host="b"))]
    with pytest.raises(StartError, match=r"process 1 \(host b, .* has the index of process 1 \(host c"):
        roll_call._entries_with(Entry(1, 2, host="c"), rows)


def test_a_second_process_0_is_a_cause_that_is_said():
    address = f"127.0.0.1:{free_port()}"
    found = roll(Entry(0, 2), Entry(0, 2), timeout_s=1.0, address=address)
    (taken,) = (text for text in found if "cannot listen" in text)
    assert "Or a second process has index 0: give each its own (RANK)" in taken


@pytest.mark.parametrize(("ours", "theirs"), [("secret", "other"), ("secret", ""), ("", "other")])
def test_another_token_is_refused_by_name_and_ends_no_sound_start(capfd, ours, theirs):
    found = roll(Entry(0, 2), Entry(1, 2, host="b"), timeout_s=1.0, token=ours, tokens={1: theirs})
    assert "process 1 (host b" in found[1]
    assert "so it is of another job" in found[1]
    assert "ZERO2JAX_TOKEN" in found[1]
    assert "process 1 did not arrive at 127.0.0.1" in found[0]
    assert "Refused: process 1 (host b" in found[0]
    assert capfd.readouterr().err.count("is refused at") == 1
    entries = [Entry(0, 2, host="a"), Entry(1, 2, host="b")]
    found = roll(*entries, Entry(1, 2, host="c"), token=ours, tokens={2: theirs}, timeout_s=2.0)
    assert found[:2] == [entries, entries]
    assert not isinstance(found[2], list)


def knock(address, seed, stop, counts):
    """Garbage, half lines, lines of others, floods and silence, many at a time, until told to stop."""
    rng, held = random.Random(seed), []
    line = signed_line(dataclasses.asdict(Entry(1, 2, host="stranger")), "guess")
    texts = [
        *(
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\n" * 9,
            b"[" * 5000 + b"\n",
            b"0" * 64 + b' {"process_index": 1e9}\n',
        ),
        *(line, line[:-1], line[65:], b"x" * (1 << 17), rng.randbytes(300), rng.randbytes(99) + b"\n"),
        *(signed_line(message, "guess") for message in ({}, {"process_index": [], "num_processes": None})),
        *(signed_line({"process_index": -1, "num_processes": 2, "host": 3}, ""), b'" \n', b"\xff\xfe {}\n"),
    ]
    while not stop.is_set():
        try:
            connection = socket.create_connection(address, timeout=0.2)
            connection.sendall(rng.choice(texts))
            counts[seed] += 1
            held.append(connection)
        except OSError:
            time.sleep(0.001)
        if len(held) > 60:
            held.pop(rng.randrange(len(held))).close()
    for connection in held:
        connection.close()


def test_strangers_of_all_kinds_neither_end_nor_delay_a_start(capfd):
    port = free_port()
    stop, counts = threading.Event(), [0] * 4
    strangers = [
        threading.Thread(target=knock, args=(("127.0.0.1", port), i, stop, counts)) for i in range(4)
    ]
    for thread in strangers:
        thread.start()
    address = f"127.0.0.1:{port}"
    try:
        start_s = time.monotonic()
        (missing,) = roll(Entry(0, 2), timeout_s=1.0, address=address)  # the time-out is kept, too
        assert "process 1 did not arrive" in missing
        found = []
        late = threading.Timer(1.0, lambda: found.extend(roll(Entry(1, 2), timeout_s=20, address=address)))
        late.start()
        found += roll(Entry(0, 2), timeout_s=20, address=address)
        late.join()
        assert time.monotonic() - start_s < 10
    finally:
        stop.set()
        for thread in strangers:
            thread.join()
    assert found == [[Entry(0, 2), Entry(1, 2)]] * 2
    assert sum(counts) > 300
    assert capfd.readouterr().err.count("is refused at") <= 2 * 20


def test_a_silent_stranger_is_dropped_and_so_is_the_oldest_of_too_many(monkeypatch):
    monkeypatch.setattr(roll_call, "_LINE_S", 0.3)
    monkeypatch.setattr(roll_call, "_MAX_UNNAMED", 4)
    port = free_port()
    process_0 = threading.Thread(
        target=roll, args=(Entry(0, 2),), kwargs={"address": f"127.0.0.1:{port}", "timeout_s": 2}
    )
    process_0.start()
    connections = []
    while len(connections) < 6:
        with contextlib.suppress(ConnectionRefusedError):
            connections.append(socket.create_connection(("127.0.0.1", port), timeout=1.5))
    start_s = time.monotonic()
    assert [connection.recv(1) for connection in connections] == [
        b""
    ] * 6  # no answer, and long before the time-out
    assert time.monotonic() - start_s < 1.5
    process_0.join()
    for connection in connections:
        connection.close()


def test_a_stranger_that_answers_without_end_is_left():
    def talk(server):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    while True:
                        connection.sendall(b"x" * 65536)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=talk, args=(server,), daemon=True)
        thread.start()
        start_s = time.monotonic()
        (found,) = roll(Entry(1, 2), timeout_s=0.5, address=f"127.0.0.1:{server.getsockname()[1]}")
        assert time.monotonic() - start_s < 5
    assert "something else answers there" in found


FORGED = [dataclasses.asdict(Entry(0, 2, host="evil")), dataclasses.asdict(Entry(1, 2, host="b", pid=7))]


@pytest.mark.parametrize(
    ("answer", "token"),
    [
        ({"entries": FORGED}, "another"),
        ({"entries": FORGED, "refused": "x"}, "another"),  # only a refusal needs no signature of ours
        ({"error": "go home", "refused": 3}, "another"),
        ({"entries": []}, "secret"),
        ({"entries": FORGED[:1]}, "secret"),
        ({"entries": [3, {"x": 1}]}, "secret"),
        ({"entries": {"0": 1, "1": 2}}, "secret"),
    ],
)
def test_what_answers_in_the_place_of_process_0_is_not_believed(answer, token):
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours, theirs = socket.create_connection(server.getsockname()), server.accept()[0]
    with ours, theirs:
        theirs.sendall(signed_line(answer, token))
        found = roll_call._ask(ours, Entry(1, 2, host="b", pid=7), time.monotonic() + 5, "secret")
    assert found == ({"refused": answer["refused"]} if "refused" in answer else None)
