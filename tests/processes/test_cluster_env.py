"""What the environment says of a process's place, and refusals by name. Nothing is started."""

import pytest

from zero2jax.processes.cluster_env import find_place, first_slurm_host
from zero2jax.processes.launcher_variables import num_restarts

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
CRAY = {"PMI_SIZE": "4", "PMI_RANK": "3", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
MVAPICH = {
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
FLUX = {"FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "3", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"}
JSRUN = {"JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_LOCAL_RANK": "1"}
JAX_OWN = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:29655", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
HOSTS = {"NNODES": "2", "NODE_RANK": "1"}
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
        ({**CRAY, "MASTER_ADDR": "h"}, ("MPI", 3, 4, "h:29500", (1,))),
        ({**MVAPICH, "MASTER_ADDR": "h"}, ("MVAPICH", 3, 4, "h:29500", (1,))),
        ({**FLUX, "MASTER_ADDR": "h"}, ("Flux", 3, 4, "h:29500", (1,))),
        ({**JSRUN, "MASTER_ADDR": "h"}, ("jsrun", 3, 4, "h:29500", (1,))),
        (
            {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h"},
            ("PALS", 3, 4, "h:29500", (1,)),
        ),
        ({"PMIX_RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h"}, ("PMIx", 3, 4, "h:29500", None)),
        # A script that computes RANK from its launcher's index is believed.
        ({**PLAIN, "PMIX_RANK": "1"}, ("WORLD_SIZE and RANK", 2, 4, "node1:1234", None)),
        (JAX_OWN, ("JAX_NUM_PROCESSES and JAX_PROCESS_ID", 1, 2, "127.0.0.1:29655", None)),
        ({**HOSTS, "MASTER_ADDR": "h"}, ("NNODES and NODE_RANK", 1, 2, "h:29500", None)),
        ({**HOSTS, **PLAIN}, ("WORLD_SIZE and RANK", 2, 4, "node1:1234", None)),
        ({**HOSTS, **SLURM}, ("Slurm", 5, 8, "node003:61444", (1,))),
        ({"NNODES": "1", "NODE_RANK": "0"}, ("single process (NNODES and NODE_RANK)", 0, 1, None, None)),
        ({"NNODES": "1"}, ("single process", 0, 1, None, None)),
        # srun --preserve-env inside of a larger allocation
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "6"}, ("Slurm", 5, 6, "node003:61444", (1,))),
        (
            {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
            ("single process (in a Slurm job of 4 tasks, without srun)", 0, 1, None, None),
        ),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "h", "PMIX_RANK": "3"}, ("single process", 0, 1, None, None)),
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
        ({**PLAIN, "WORLD_SIZE": "9" * 5000}, r"9': it must be a whole number, of 18 digits at most"),
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


# Each of these was two processes that each believed to be alone.
@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, "=h:1 tell .* without JAX_NUM_PROCESSES and JAX_PROCESS_ID"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2"}, r"JAX_NUM_PROCESSES .*without JAX_PROCESS_ID"),
        ({"JAX_PROCESS_ID": "0"}, "JAX_PROCESS_ID without JAX_NUM_PROCESSES"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 tell .*: WORLD_SIZE without RANK"),
        ({"RANK": "0"}, "RANK without WORLD_SIZE"),
        ({"MASTER_ADDR": "h"}, "MASTER_ADDR without WORLD_SIZE and RANK"),
        ({"MASTER_ADDR": "h", "NNODES": "2"}, "MASTER_ADDR=h, NNODES=2 tell .*; NNODES without NODE_RANK"),
        ({"NODE_RANK": "1"}, "NODE_RANK without NNODES"),
        ({**HOSTS, "WORLD_SIZE": "16"}, "WORLD_SIZE without RANK"),
        ({**HOSTS, "LOCAL_RANK": "0"}, "LOCAL_RANK without WORLD_SIZE and RANK"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK without WORLD_SIZE and RANK"),
        ({"MV2_COMM_WORLD_RANK": "1"}, "MV2_COMM_WORLD_RANK without MV2_COMM_WORLD_SIZE"),
        ({"PMI_RANK": "1"}, "PMI_RANK without PMI_SIZE"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, "PMIX_RANK without WORLD_SIZE"),
        ({"PALS_RANKID": "1"}, "PALS_RANKID without WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "without OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_RANK"),
        ({"SLURM_STEP_NODELIST": "a", "SLURM_NTASKS": "2"}, "NODELIST without SLURM_PROCID and SLURM_JOB_ID"),
        ({"FLUX_TASK_RANK": "1"}, "FLUX_TASK_RANK without FLUX_JOB_SIZE"),
        ({**JAX_OWN, "WORLD_SIZE": "4", "RANK": "1"}, "WORLD_SIZE=4 .* JAX_NUM_PROCESSES=2 .* contradict each other"),
    ],
)  # fmt: skip
def test_an_incomplete_set_of_variables_is_never_a_single_process(env, message):
    with pytest.raises(ValueError, match=message) as error:
        find_place(env)
    if "contradict" not in message:
        assert "Set what is missing" in str(error.value)
        assert "WORLD_SIZE=1 if this process is to train alone" in str(error.value)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({**PLAIN, "MASTER_PORT": "70000"}, "reading MASTER_PORT=70000: a port is a number from 1 to 65535"),
        ({**PLAIN, "MASTER_PORT": "0"}, "reading MASTER_PORT=0: a port"),
        ({**PLAIN, "MASTER_ADDR": "127.0.0.1:29731"}, "127.0.0.1:29731: .* without a port. Set MASTER_PORT=29731"),
        ({**PLAIN, "MASTER_ADDR": "a b"}, "reading the coordinator 'a b': write HOST"),
        ({**TORCHRUN, "MASTER_PORT": "65535"}, "=65535, and the port after it, as torchrun .* this is 65536"),
        ({**PLAIN, "JAX_COORDINATOR_ADDRESS": "h:70000"}, "reading the coordinator 'h:70000'"),
        ({**PLAIN, "JAX_COORDINATOR_ADDRESS": "[127.0.0.1:1]:2"}, "reading the coordinator"),
        ({**PLAIN, "JAX_COORDINATOR_ADDRESS": ""}, "reading the coordinator ''"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "reading Slurm's list of hosts '': it names no host. Set MASTER_ADDR"),
    ],
)  # fmt: skip
def test_addresses_and_ports_are_checked_wherever_they_are_read(env, message):
    with pytest.raises(ValueError, match=message):
        find_place(env)
    for address in ("127.0.0.1:70000", "127.0.0.1", "a:b:1", "[a]:1", ":1"):
        with pytest.raises(ValueError, match="reading the coordinator"):
            find_place({}, address, 2, 0)


def test_a_kubernetes_job_is_asked_through_jax(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "kubernetes")
    found = find_place({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "1"})
    assert (found.source, found.process_index, found.num_processes, found.distributed) == (
        "Kubernetes",
        1,
        None,
        True,
    )


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node001", "node001"),
        ("node001,other", "node001"),
        ("node[001-004,007],login1", "node001"),
        ("rack1-[07,09]-ib", "rack1-07-ib"),
        ("rack[1-2]n[1-4]", "rack1n1"),
        ("rack[1-2]n[1-4],other[3]", "rack1n1"),
    ],
)
def test_first_host_of_a_slurm_list(nodes, host):
    assert first_slurm_host(nodes) == host


def test_the_number_of_restarts_is_read_as_a_number():
    assert [num_restarts(env) for env in ({}, {"ZERO2JAX_RESTARTS": ""}, {"ZERO2JAX_RESTARTS": "3"})] == [
        0,
        0,
        3,
    ]
    with pytest.raises(ValueError, match="reading ZERO2JAX_RESTARTS='x': it must be a whole number"):
        num_restarts({"ZERO2JAX_RESTARTS": "x"})
