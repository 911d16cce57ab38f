"""The launcher's options, and what those of other launchers are called here."""

import dataclasses
import re

import pytest

from zero2jax.cli.launch import HostOptions, PlaceOptions, ProcessOptions
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
    groups = (ProcessOptions, HostOptions, PlaceOptions)
    ours = {"--" + f.name.replace("_", "-") for group in groups for f in dataclasses.fields(group)} | {
        "--print"
    }
    for name, here in OTHER_OPTIONS.items():
        assert name not in ours
        for option in re.findall(r"(?<![\w-])--[a-z-]+", here.replace("zero2jax plan --search", "")):
            assert option in ours or option == "--local", (name, option)
