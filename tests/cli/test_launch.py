"""The launcher's options, and what those of other launchers are called here."""

import dataclasses
import re

import pytest

from zero2jax.cli.launch import HostOptions, MemoryOptions, PlaceOptions, ProcessOptions
from zero2jax.cli.main import main
from zero2jax.cli.other_launchers import OTHER_OPTIONS


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num_gpus 2 train.py", "launching with --num_gpus: unknown option. Here: --processes N"),
        ("--nproc_per_node=2 train.py", "with --nproc_per_node: unknown option. Here: --processes N"),
        ("--nproc-per-node 2 train.py", "Here: --processes N"),
        ("--master_port 1 train.py", "with --master_port: unknown option. Here: --coordinator HOST:PORT"),
        ("--module train", "with --module: unknown option. Here: a module is started by a command: "),
        ("-m train", "python -m MODULE ARGS"),
        ("-np 4 train.py", "Here: --processes N"),
        ("--processes 2 --nnodes=2 train.py", "with --nnodes: unknown option. Here: --hostfile FILE"),
        ("--include a --node_rank 0 train.py", "Here: --first-process INDEX"),
        ("--proceses 2 train.py", "with --proceses: unknown option. Did you mean '--processes'?"),
        (
            "--frobnicate train.py",
            "--frobnicate: unknown option. There is: --processes, --devices-per-process",
        ),
    ],
)
def test_options_of_other_launchers_are_answered(capsys, words, said):
    assert main(["launch", *words.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "zero2jax launch --help" in error


def test_the_answers_name_options_that_there_are():
    groups = (ProcessOptions, HostOptions, PlaceOptions, MemoryOptions)
    ours = {"--" + f.name.replace("_", "-") for group in groups for f in dataclasses.fields(group)} | {
        "--print"
    }
    for name, here in OTHER_OPTIONS.items():
        assert name not in ours
        for option in re.findall(r"(?<![\w-])--[a-z-]+", here.replace("zero2jax plan --search", "")):
            assert option in ours or option == "--local", (name, option)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--print slurm --coordinator h:1",
            "printing for slurm with --coordinator h:1 (process 0 is on the first",
        ),
        (
            "--print k8s --coordinator h:1",
            "printing for k8s with --coordinator h:1 (process 0 is in the first pod",
        ),
        ("--print slurm --max-restarts 2", "--max-restarts 2 (Slurm starts a job anew"),
        ("--print mpi --max-restarts 2", "--max-restarts 2 (mpirun starts nothing anew)"),
        (
            "--print k8s --grace-s 5 --end-with-stdin",
            "--grace-s 5.0 (the scheduler ends the processes); --end-with",
        ),
        (
            "--print mpi --first-process 1 --total-processes 4",
            "--first-process 1 (the scheduler gives the indices)",
        ),
        ("--print slurm --hostfile HOSTS --include a", "--include a (the scheduler chooses the hosts"),
        ("--print k8s --hostfile HOSTS --exclude a", "--exclude a (the scheduler chooses the hosts"),
        ("--print mpi --hostfile HOSTS --hosts 3", "with --hosts 3: the hostfile has 2 to use"),
        (
            "--hosts 2",
            "launching with --hosts 2 (it is for --print; hosts to start on stand in a --hostfile)",
        ),
        ("--hostfile HOSTS --first-process 1", "launching on 2 hosts by ssh with --first-process 1"),
    ],
)
def test_an_option_that_would_not_be_used_is_refused(tmp_path, capsys, words, said):
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb slots=2\n")
    assert main(["launch", *words.replace("HOSTS", str(hosts)).split(), "true"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert "not be used. Leave it out." in captured.err or "the hostfile has" in captured.err


def test_files_and_variables_that_cannot_be_used_are_named(tmp_path, capsys, monkeypatch):
    assert main(["launch", "--hostfile", str(tmp_path / "none"), "true"]) == 2
    error = capsys.readouterr().err
    assert (
        f"launching with --hostfile {tmp_path}/none: it cannot be read (No such file or directory)" in error
    )
    (tmp_path / "hosts").write_bytes(b"\xff\xfe")
    assert main(["launch", "--hostfile", str(tmp_path / "hosts"), "true"]) == 2
    assert "it cannot be read ('utf-8' codec" in capsys.readouterr().err
    assert main(["launch", "--logs", str(tmp_path / "hosts"), "true"]) == 2
    assert f"launching true: {tmp_path}/hosts: File exists. Check that" in capsys.readouterr().err
    monkeypatch.setenv("ZERO2JAX_RESTARTS", "x")
    assert main(["launch", "true"]) == 2
    assert "reading ZERO2JAX_RESTARTS='x': it must be a whole number" in capsys.readouterr().err
