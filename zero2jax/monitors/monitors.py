"""`Monitors`: the metrics of a run, written in the background by one process.

Outside of the step. Arrays are handed over as they come out of it and are read in a thread of their own once their step
is done, so that the loop waits for nothing. What fails is warned of once and switched off.
"""

import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero2jax.base import notices
from zero2jax.base.pytrees import path_string
from zero2jax.monitors.background import Background
from zero2jax.monitors.outlets import Outlet, warn_of_failures
from zero2jax.monitors.writers import CometWriter, CsvWriter, TensorBoardWriter, WandbWriter, Writer

PREFIX = "Train/Samples/"
_NAMES = {"loss": "train_loss", "learning_rate": "lr"}
_KINDS = (np.floating, np.integer, np.bool_)
_OMITTED = ("activation_profile", "loss_scale_exhausted")


class Monitors:
    """Writes metrics to TensorBoard, CSV files, Weights & Biases and Comet, and to writers of your own.

    In the first process only: in the others it does nothing. A writer that cannot be opened, or that fails later, is
    warned of once, with the line that installs its package if that is missing, and never stops the run.

    Args:
      *writers: objects with `write(samples, values)`, numbers by name, and `close()`.
      tensorboard: folder of the event file; needs the extra `tensorboard`.
      csv: folder of the files, one per metric.
      wandb: arguments of `wandb.init`; needs the extra `wandb`.
      comet: arguments of `comet_ml.start`, besides `experiment_name` and `samples_log_interval`; needs the extra
        `comet`.

    Example:
      >>> import pathlib, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> with Monitors(csv=folder) as monitors:
      ...     for step in range(3):
      ...         monitors.record(8 * (step + 1), {"loss": 1.0 / (step + 1)})
      >>> print(pathlib.Path(folder, "Train_Samples_train_loss.csv").read_text().split())
      ['step,train_loss', '8,1.0', '16,0.5', '24,0.3333333333333333']
    """

    def __init__(
        self,
        *writers: Writer,
        tensorboard: str | os.PathLike[str] | None = None,
        csv: str | os.PathLike[str] | None = None,
        wandb: Mapping[str, Any] | None = None,
        comet: Mapping[str, Any] | None = None,
    ):
        self._outlets: list[Outlet] = []
        self._background = Background("zero2jax-monitors", functools.partial(_close, self._outlets))
        self._is_behind = False
        if jax.process_index() != 0:
            return
        asked: list[tuple[str, Callable[[Any], Writer], Any]] = [
            ("tensorboard", TensorBoardWriter, tensorboard),
            ("csv", CsvWriter, csv),
            ("wandb", WandbWriter, wandb),
            ("comet", CometWriter, comet),
        ]
        for name, open_writer, argument in asked:
            if argument is not None:
                self._outlets.append(_opened(f"monitor {name}", open_writer, argument))
        self._outlets += [Outlet(f"monitor {type(w).__name__}", w.write, w.close) for w in writers]
        warn_of_failures(self._outlets)

    def record(self, samples: int, metrics: Mapping[str, Any]) -> None:
        """Have the metrics of a step written once it is done; returns at once.

        Args:
          samples: examples trained on so far, the x axis.
          metrics: what `engine.step` returned, or any numbers and scalar arrays by name. `loss` is written as
            `Train/Samples/train_loss`, `learning_rate` as `Train/Samples/lr`, the others under their paths,
            `Train/Samples/aux/accuracy`. What is no scalar is left out.
        """
        self.warn_of_failures()
        if not self.put(samples, metrics):
            self.say_behind()

    def put(self, samples: int, metrics: Mapping[str, Any]) -> bool:
        """As `record`, from any thread: it gives no warning. False, and nothing, where too much waits already."""
        return not self._outlets or self._background.put(lambda: self._write(samples, numbers(metrics)))

    def _write(self, samples: int, values: Mapping[str, float]) -> None:
        named = {PREFIX + _NAMES.get(name, name): value for name, value in values.items()}
        for outlet in self._outlets if named else ():
            outlet(samples, named)

    def warn_of_failures(self) -> None:
        """Warn of what has failed since the last time, as `record` and `close` do."""
        warn_of_failures(self._outlets)

    def say_behind(self) -> None:
        """Warn, once, that metrics are lost because writing them takes longer than the steps."""
        if not self._is_behind:
            self._is_behind = True
            notices.warn(
                "writing metrics: the monitors are a thousand steps behind, and the metrics of some steps are left "
                "out. Write to a faster disk or service, or record fewer steps."
            )

    def close(self) -> None:
        """Wait until everything is written, 30 seconds at most; later records are not."""
        if not self._background.close():
            notices.warn("closing the monitors: the last metrics were not written within 30 seconds.")
        self.warn_of_failures()
        self._outlets = []

    def __enter__(self) -> "Monitors":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(outlets: list[Outlet]) -> None:
    for outlet in outlets:
        outlet.close()


def _opened(name: str, open_writer: Callable[[Any], Writer], argument: Any) -> Outlet:
    """The outlet of a writer that is opened now; if that fails, one that has failed."""
    opened: list[Writer] = []
    opening = Outlet(name, lambda: opened.append(open_writer(argument)))
    opening()
    return Outlet(name, opened[0].write, opened[0].close) if opened else opening


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The scalars among metrics as Python's numbers, by their path: `loss`, `aux/accuracy`.

    Waits for the step that the arrays come from; nothing if that failed, which the loop is told by the arrays it reads.
    """
    leaves = jax.tree_util.tree_leaves_with_path(
        {name: x for name, x in metrics.items() if name not in _OMITTED}
    )
    scalars = {path_string(path): x for path, x in leaves if _is_scalar(x)}
    try:
        values = {name: float(x) for name, x in jax.device_get(scalars).items()}
    except RuntimeError:  # the step failed, or someone has donated its metrics
        return {}
    no_rate = math.isnan(values.get("learning_rate", 0.0))  # the optimizer's state does not show it
    return {name: value for name, value in values.items() if not (no_rate and name == "learning_rate")}


def _is_scalar(x: Any) -> bool:
    if not hasattr(x, "dtype"):
        return isinstance(x, (bool, int, float))
    return np.shape(x) == () and any(jnp.issubdtype(x.dtype, kind) for kind in _KINDS)
