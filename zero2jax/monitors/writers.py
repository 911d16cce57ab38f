"""Metrics in the files, or with the service, of one library each; thin, and imported when they are asked for.

A writer has `write(samples, values)`, numbers by name and how many examples have been trained on, and `close()`. The
libraries are extras of this package. Where each puts things, and the names, are those of DeepSpeed's monitors.
"""

import csv
import importlib
import importlib.util
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "comet": "comet_ml"}
"""What is to be installed, by the extra of this package that installs it."""


class Writer(Protocol):
    """What `Monitors` writes to."""

    def write(self, samples: int, values: Mapping[str, float]) -> None:
        """Write numbers by their names, after so many examples."""

    def close(self) -> None:
        """Write what is left, and let go."""


class TensorBoardWriter:
    """An event file in a folder, for TensorBoard."""

    def __init__(self, folder: str | os.PathLike[str]):
        library = _library("tensorboard")
        self._scalar = importlib.import_module("tensorboardX.summary").scalar
        self._event = importlib.import_module("tensorboardX.proto.event_pb2").Event
        os.makedirs(folder, exist_ok=True)
        # Its SummaryWriter has a thread of its own: on a full disk that dies, and `add_scalar` then waits for ever.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = library.RecordWriter(os.path.join(folder, name))
        self._write(file_version="brain.Event:2")

    def _write(self, **fields: Any) -> None:
        self._file.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def write(self, samples: int, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        for name, value in values.items():
            self._write(step=samples, summary=self._scalar(name, value))
        self._file.flush()

    def close(self) -> None:
        """See `Writer`."""
        self._file.close()


class CsvWriter:
    """A file per metric in a folder, with a column for the examples and one for the value."""

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, samples: int, values: Mapping[str, float]) -> None:
        """See `Writer`. Rows of an earlier run stay."""
        for name, value in values.items():
            path = self._folder / (name.replace("/", "_").replace(" ", "_") + ".csv")
            with path.open("a", newline="") as file:
                rows = csv.writer(file)
                if file.tell() == 0:
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([samples, value])

    def close(self) -> None:
        """See `Writer`. Nothing is open between two writes."""


class WandbWriter:
    """A run of Weights & Biases; `options` are those of `wandb.init`."""

    def __init__(self, options: Mapping[str, Any]):
        self._run = _library("wandb").init(**options)

    def write(self, samples: int, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        self._run.log(dict(values), step=samples)

    def close(self) -> None:
        """See `Writer`."""
        self._run.finish()


class CometWriter:
    """An experiment of Comet; `options` are those of `comet_ml.start`.

    Args:
      options: see above; besides, `experiment_name`, and `samples_log_interval`, after how many examples to write
        again.
    """

    def __init__(self, options: Mapping[str, Any]):
        options = dict(options)
        name, self._interval = options.pop("experiment_name", None), options.pop("samples_log_interval", 100)
        self._experiment = _library("comet").start(**options)
        if name is not None:
            self._experiment.set_name(name)
        self._next = 0

    def write(self, samples: int, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        if samples >= self._next:
            self._next = samples + self._interval
            self._experiment.log_metrics(dict(values), step=samples)

    def close(self) -> None:
        """See `Writer`."""
        self._experiment.end()


def why_missing(extra: str) -> str:
    """The line that installs what an extra has, where that is not installed; else nothing."""
    package = _PACKAGES.get(extra)
    return "" if package is None or importlib.util.find_spec(package) is not None else _install(extra)


def _install(extra: str) -> str:
    return f"{_PACKAGES[extra]} is not installed: pip install 'zero2jax[{extra}]'"


def _library(extra: str) -> Any:
    """The package of an extra; an ImportError with the line that installs it."""
    try:
        return importlib.import_module(_PACKAGES[extra])
    except ModuleNotFoundError as error:
        raise ImportError(_install(extra)) from error
