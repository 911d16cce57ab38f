"""Start-up: what the environment says, the roll call, and refusals by name. No test here starts more than it needs."""

import dataclasses
import json
import pkgutil
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from spawn import environment, launch, results, write_program

import zero2jax
from zero2jax.launching.local import free_port
from zero2jax.processes import roll_call
from zero2jax.processes.addresses import grpc_proxy, is_loopback, split_address
from zero2jax.processes.cluster_env import find_place, first_slurm_host
from zero2jax.processes.roll_call import Entry, StartError, call_roll

SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PLAIN = {"MASTER_ADDR": "node1", "MASTER_PORT": "1234", "WORLD_SIZE": "4", "RANK": "2"}
TORCHRUN = {**PLAIN, "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
LOCAL = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


# (environment, source, index, count, address, local devices)
@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ("single process", 0, 1, None, None)),
        ({"WORLD_SIZE": "1"}, ("single process", 0, 1, None, None)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, ("single process (WORLD_SIZE and RANK)", 0, 1, None, None)),
        (
            {**PLAIN, "WORLD_SIZE": "1", "RANK": "0"},
            ("single process (WORLD_SIZE and RANK)", 0, 1, None, None),
        ),
        (
            {**PLAIN, "WORLD_SIZE": "1", "RANK": "0", "ZERO2JAX_RESTARTS": "0"},
            ("zero2jax launch", 0, 1, "node1:1234", None),
        ),
        (PLAIN, ("WORLD_SIZE and RANK", 2, 4, "node1:1234", None)),
        ({**PLAIN, **LOCAL}, ("WORLD_SIZE and RANK", 2, 4, "node1:1234", (0,))),
        ({**PLAIN, **LOCAL, "CUDA_VISIBLE_DEVICES": "5"}, ("WORLD_SIZE and RANK", 2, 4, "node1:1234", None)),
        ({**PLAIN, **LOCAL, "LOCAL_WORLD_SIZE": "1"}, ("WORLD_SIZE and RANK", 2, 4, "node1:1234", None)),
        ({**PLAIN, "MASTER_ADDR": "fd00::1"}, ("WORLD_SIZE and RANK", 2, 4, "[fd00::1]:1234", None)),
        (TORCHRUN, ("torchrun", 2, 4, "node1:1235", None)),
        # srun starts torchrun once per node, and torchrun the processes.
        ({**SLURM, **TORCHRUN}, ("torchrun", 2, 4, "node1:1235", None)),
        (SLURM, ("Slurm", 5, 8, "node003:61444", (1,))),
        ({**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, ("Slurm", 1, 2, "node003:61444", None)),
        ({**SLURM, "MASTER_ADDR": "ib3"}, ("Slurm", 5, 8, "ib3:29500", (1,))),
        ({**SLURM, "JAX_COORDINATOR_ADDRESS": "c:1"}, ("Slurm", 5, 8, "c:1", (1,))),
        ({**SLURM, "WORLD_SIZE": "8", "RANK": "5"}, ("Slurm", 5, 8, "node003:61444", (1,))),
        (
            {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", **PLAIN},
            ("WORLD_SIZE and RANK", 2, 4, "node1:1234", None),
        ),
        ({**SLURM, **PLAIN, "ZERO2JAX_RESTARTS": "0"}, ("zero2jax launch", 2, 4, "node1:1234", None)),
        ({**OPEN_MPI, "MASTER_ADDR": "h"}, ("Open MPI", 3, 4, "h:29500", (1,))),
        ({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}, ("Open MPI", 3, 4, None, (1,))),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "MASTER_ADDR": "h"}, ("MPI", 1, 2, "h:29500", None)),
    ],
)
def test_the_first_source_that_is_there_counts(env, expected):
    found = find_place(env)
    assert (
        found.source,
        found.process_index,
        found.num_processes,
        found.coordinator_address,
        found.local_device_ids,
    ) == expected
    assert found.distributed == (not expected[0].startswith("single"))


def test_arguments_come_first_and_need_each_other():
    found = find_place(SLURM, "a:1", 2, 0, (3, 4))
    assert (found.source, found.num_processes, found.local_device_ids) == ("arguments", 2, (3, 4))
    with pytest.raises(ValueError, match="num_processes and process_id not given"):
        find_place({}, "a:1")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({**PLAIN, "RANK": "4"}, r"WORLD_SIZE=4 and RANK=4: the index of a process counts from 0"),
        ({**PLAIN, "RANK": "two"}, r"RANK='two': it must be a whole number"),
        ({**SLURM, "WORLD_SIZE": "16", "RANK": "5"}, r"WORLD_SIZE=16 .* SLURM_NTASKS=8 .* contradict each other"),
        ({**SLURM, "MASTER_ADDR": "127.0.0.1"}, r"8 processes on 2 hosts: .*127.0.0.1:29500 is a loopback"),
        ({**PLAIN, **LOCAL, "MASTER_ADDR": "localhost"}, r"4 processes on 2 hosts: .* is a loopback"),
        ({**PLAIN, "http_proxy": "http://p:1"}, r"the proxy of http_proxy=http://p:1 .*no_proxy=\$no_proxy,node1"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, r"2 processes by WORLD_SIZE and RANK: no coordinator. Set MASTER_ADDR"),
        (OPEN_MPI, r"4 processes by Open MPI: no coordinator. Set MASTER_ADDR.*mpi4py"),
        ({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "1"}, r"pod 1 of an indexed Kubernetes.*jax\[k8s\]"),
        ({**PLAIN, "JAX_COORDINATOR_ADDRESS": "node1"}, r"address 'node1': write host:port"),
    ],
)  # fmt: skip
def test_what_would_hang_is_refused_by_name(env, message):
    with pytest.raises(ValueError, match=message):
        find_place(env)


def test_a_kubernetes_job_is_asked_through_jax(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "kubernetes")
    found = find_place({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "1"})
    assert (found.source, found.process_index, found.num_processes, found.distributed) == (
        "Kubernetes",
        1,
        None,
        True,
    )


# As seen with jax 0.12.0.1: a proxy of the upper-case name, or of all_proxy, is not used; `no_proxy=*` excepts nothing.
@pytest.mark.parametrize(
    ("env", "proxy"),
    [
        ({"HTTP_PROXY": "p", "all_proxy": "p"}, None),
        ({"http_proxy": "p"}, "http_proxy"),
        ({"grpc_proxy": "p", "no_proxy": "*"}, "grpc_proxy"),
        ({"https_proxy": "p", "no_proxy": "10.0.0.1, .0.0.1"}, None),
        ({"https_proxy": "p", "no_proxy": "127.0.0.0/8"}, None),
        ({"https_proxy": "p", "no_proxy": "127.0.0.1", "no_grpc_proxy": "other"}, "https_proxy"),
    ],
)
def test_proxies_are_read_as_grpc_reads_them(env, proxy):
    assert grpc_proxy("127.0.0.1", env) == proxy


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node001", "node001"),
        ("node001,other", "node001"),
        ("node[001-004,007],login1", "node001"),
        ("rack1-[07,09]-ib", "rack1-07-ib"),
    ],
)
def test_first_host_of_a_slurm_list(nodes, host):
    assert first_slurm_host(nodes) == host


def test_addresses():
    assert split_address("[::1]:80") == ("::1", 80)
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert is_loopback("127.1.2.3")
    assert not is_loopback("node1")
    assert not is_loopback("10.0.0.1")


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


def test_a_single_process_starts_nothing(monkeypatch):
    for name in environment().keys() ^ dict(__import__("os").environ).keys():
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        assert zero2jax.init_distributed() == zero2jax.Startup("single process", 0, 1)
    zero2jax.expect_same("anything", object())


def test_one_that_never_arrives_is_named_by_a_real_process():
    code = "import zero2jax; zero2jax.init_distributed(initialization_timeout_s=1)"
    env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="2", RANK="0")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1  # and not SIGABRT, as from JAX's own time-out
    assert "StartError: starting 2 processes: process 1 did not arrive" in done.stderr


# Twice started; one value alike and one not; times of which one is long.
AGREE = """
import json, time
import jax, numpy as np, optax, zero2jax
from zero2jax.base.batches import place_batch

startup = zero2jax.init_distributed(initialization_timeout_s=120)
again = zero2jax.init_distributed()
assert (again.process_index, again.num_processes) == (startup.process_index, 3), again
zero2jax.expect_same("the seed", 7)
clock = zero2jax.StepClock()
time.sleep(0.5 if startup.process_index == 2 else 0)
clock.step_done()
times = clock.gather()
order_mesh = zero2jax.make_mesh()
order = zero2jax.BatchOrder(10, 6, order_mesh, seed=3)
try:
    place_batch(np.arange(3) + startup.process_index, order_mesh, "data")
except ValueError as error:
    other_batch = str(error)
try:
    stage = 1 if startup.process_index == 1 else 2
    zero2jax.initialize(lambda p, b: 0.0, optax.sgd(0.1), {"zero_optimization": {"stage": stage}})
except ValueError as error:
    print(json.dumps([str(error)]).replace("[", "{\\"error\\":[", 1) + "}", flush=True)
try:
    zero2jax.init_distributed(None, 5, 0)
except ValueError as error:
    refusals = {"batch": other_batch, "again": str(error)}
    found = {**refusals, "slowest": times.slowest, "own_s": times.own_s, "rows": next(order).tolist()}
    print(json.dumps(found), flush=True)
"""


def test_processes_must_agree_and_stragglers_are_named(tmp_path):
    found = results(launch(write_program(tmp_path, AGREE), processes=3))
    assert sorted(found) == [0, 1, 2]
    for refusal, rest in found.values():
        assert "the configuration and the mesh over 3 processes: process 1 (host" in refusal["error"][0]
        assert "started already, with 3" in rest["again"]
        assert "an array of shape (3,) is not the same in all 3 processes" in rest["batch"]
        assert rest["slowest"] == 2
        assert rest["own_s"][2] > 0.5 > rest["own_s"][0]
    rows = [set(found[i][1]["rows"]) for i in range(3)]
    assert len(set.union(*rows)) == 6
    assert all(len(part) == 2 for part in rows)
