"""PyTorch FSDP2 and DeepSpeed ZeRO-2 as rows of the table: N processes each, of any interpreter that has them."""

import contextlib
import json
import os
import selectors
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

PROGRAM = Path(__file__).with_name("torch_step.py")
KINDS = {"PyTorch FSDP2": "fsdp2", "DeepSpeed ZeRO-2": "deepspeed"}
PATIENCE_S = 400  # eight processes import DeepSpeed on two cores


class Absent(Exception):
    """Why a row cannot be had."""


class Peer:
    """The processes of one row, waiting; each `step` runs one in all of them.

    Args:
      name: one of `KINDS`.
      python: the interpreter.
      num_processes: of them.
      params: full parameters by path, `blocks.qkv` for instance.
      batches: (steps, B, T + 1); they come round again.
      settings: what `torch_step.py` reads of the case.

    Raises:
      Absent: they did not start; says what they said.
    """

    def __init__(
        self,
        name: str,
        python: str,
        num_processes: int,
        params: dict[str, np.ndarray],
        batches: np.ndarray,
        **settings: Any,
    ):
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "case.json").write_text(json.dumps({"kind": KINDS[name], **settings}))
        np.savez(folder / "case.npz", batches=batches, **params)
        if shutil.which(python) is None:
            raise Absent(f"there is no interpreter {python}")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._errors = open(folder / "errors", "w+")  # noqa: SIM115 (closed in `close`)
        self._processes = [
            subprocess.Popen(
                [python, str(PROGRAM), str(folder)],
                stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=self._errors,
                bufsize=0,
                env={
                    **{key: x for key, x in os.environ.items() if key != "PYTHONPATH"},
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(num_processes),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                    "DS_ACCELERATOR": "cpu",
                },
            )
            for rank in range(num_processes)
        ]
        self._first = self._processes[0]
        self._output = selectors.DefaultSelector()
        self._output.register(self._first.stdout, selectors.EVENT_READ)
        self._unread = b""
        try:
            self.versions = self._answer()["versions"]
        except Absent:
            self.close()
            raise

    def step(self) -> dict[str, float]:
        """One step in all processes: `loss`, `seconds`, `sent_bytes` of process 0."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its last words are read below
            self._first.stdin.write(b"step\n")
        return self._answer()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        for file in (self._first.stdin, self._first.stdout, self._errors):
            file.close()
        self._folder.cleanup()

    def _answer(self) -> Any:
        """The next line that begins with @; the libraries print others."""
        while True:
            line, newline, rest = self._unread.partition(b"\n")
            if newline:
                self._unread = rest
                if line.startswith(b"@"):
                    return json.loads(line[1:])
                continue
            if not self._output.select(PATIENCE_S):
                raise Absent(f"no answer within {PATIENCE_S} s")
            more = os.read(self._first.stdout.fileno(), 1 << 16)
            if not more:
                self._errors.seek(0)
                said = [x for x in self._errors.read().splitlines() if x and x[0] != " "]
                errors = [x for x in said if "Error" in x.split(":")[0]]
                raise Absent((errors or said or ["it ended without a word"])[0][:200])
            self._unread += more
