"""The roll call: who is missing, wrong, or runs other code, said by name to all who arrived."""

import dataclasses
import json
import pkgutil
import shutil
import socket
import threading
import time
from pathlib import Path

import zero2jax
from zero2jax.launching.local import free_port
from zero2jax.processes import roll_call
from zero2jax.processes.roll_call import Entry, StartError, call_roll


def roll(*entries, timeout_s=5.0, address=None):
    """What each of the given entries gets of the roll call: a list of entries, or the message of its error."""
    address = address or f"127.0.0.1:{free_port()}"
    found = {}

    def one(i, entry):
        try:
            found[i] = call_roll(entry, address, timeout_s)
        except StartError as error:
            found[i] = str(error)

    threads = [threading.Thread(target=one, args=item) for item in enumerate(entries)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[i] for i in range(len(entries))]


def test_all_processes_get_the_list_of_all():
    entries = [Entry(i, 3, host=f"host{i}", code={"jax": "1"}) for i in range(3)]
    assert roll(*entries) == [entries, entries, entries]
    assert call_roll(Entry(0, 1), f"127.0.0.1:{free_port()}", 1) == [Entry(0, 1)]  # alone: asks nobody


def test_who_is_missing_is_named_to_all_who_arrived():
    found = roll(*(Entry(i, 4, host=f"host{i}") for i in (0, 2)), timeout_s=1.0)
    assert found[0] == found[1]
    assert "process 1, 3 did not arrive at 127.0.0.1:" in found[0]
    assert "arrived: process 0 (host host0, pid" in found[0]
    assert "process 2 (host host2" in found[0]
    assert "Other hosts cannot reach 127.0.0.1" in found[0]


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

    def come_and_go():
        while True:
            try:
                with socket.create_connection(address) as connection:
                    connection.sendall(
                        json.dumps(dataclasses.asdict(Entry(2, 3, host="gone"))).encode() + b"\n"
                    )
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
