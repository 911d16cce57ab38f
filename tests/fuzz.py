"""Random combinations of what a step can be, each against the same optax transformation on one device, unsharded.

    make fuzz N=1 FIRST=17          repeats the draw of seed 17
    make fuzz N=2000 FIRST=1000     2000 draws from seed 1000 on

`check(draw(seed))` trains two steps and evaluates, on 1 to 8 simulated devices and by the oracle below, and compares
losses, gradient norms, what the loss returns, parameters and the evaluation.

The oracle is plain jax and optax: it calls the user's loss for each slice of the batch (device, microbatch), or once
for the full batch where the loss is a mean over examples, weighs losses and gradients, and updates.

The tolerance is what the oracle itself moves by when each gradient is off by what rounding may do to it: ROUNDINGS
roundings (fp32; bf16 where the gradient is reduced in bf16) of the largest addend in its leaf, on a slice. All
gradients are moved up, all down, and each at random: an elementwise optimizer lies between the first two, also where it
takes a sign, and the others are smooth. Masters and moments in bf16 move by a unit in the last place a step, likewise.
To this, FLOOR times the value (at least 1) for fp32 sums in another order.

Quantised in 8 bits, a number is off by half a quantum, a 254th of the largest in its block: gradients, three times at
most (two hops and a way back), move as where they are bf16, by sixteen 512ths; so do parameters that the loss sees.
"""

import dataclasses
import functools
import warnings
from typing import Any

import fuzz_models
import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import OPTIMIZERS, VOCAB

import zero2jax

FLOOR = 16 * 2**-24
ROUNDINGS = 16
NUM_STEPS = 2
MESHES = (
    *({"data": n} for n in (1, 2, 3, 8)),
    {"replica": 2, "data": 2},
    {"replica": 2, "data": 4},
    {"data": 2, "replica": 3},
    {"data": 3, "model": 2},
    {"model": 2, "data": 2},
    {"replica": 2, "data": 2, "model": 2},
)
TRANSFORMATIONS = OPTIMIZERS | {
    "plateau": lambda: optax.chain(
        optax.adam(1e-2), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=1.0)
    ),
    "schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 8)),
    "ema": lambda: optax.chain(optax.sgd(1e-2), optax.ema(0.9)),
}
# of which a relative error of parameters and moments moves the update by no more than as much, or about so
SMOOTH = ("sgd_momentum", "clip_adamw", "schedule", "lamb")
KEEP = {"vectors": lambda path, leaf: len(leaf.shape) < 2, "matrices": lambda path, leaf: len(leaf.shape) > 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """One combination; everything follows from it."""

    seed: int
    model: str
    stage: int
    mesh: dict
    over_replicas: bool
    num_microbatches: int
    rows: int
    gather: str
    optimizer: str
    clip_norm: float | None
    reduction: str
    compute_dtype: str
    reduce_dtype: str | None
    keep_fp32: str | None
    frozen: float
    weights: str
    takes_rng: bool
    stored: str | None
    activations: dict | None
    reads_layers: bool
    makes_params: bool
    skip_nonfinite: bool
    loss_scale: float | None
    fp32_sum: bool
    arena: bool
    master_dtype: str = "fp32"
    state_dtype: str = "fp32"
    stochastic_rounding: bool | None = None
    quantize: tuple = ()

    @property
    def num_devices(self) -> int:
        """Devices that hold different examples."""
        return self.mesh["data"] * self.mesh.get("replica", 1)

    @functools.cached_property
    def trainable(self) -> list[bool]:
        """Of each leaf of the parameters."""
        rng = np.random.default_rng(self.seed)
        leaves = jax.tree_util.tree_leaves_with_path(self.params)
        may = [path[0].key == "model" and jnp.issubdtype(x.dtype, jnp.floating) for path, x in leaves]
        flags = [m and rng.uniform() >= self.frozen for m in may]
        return flags if any(flags) else may

    @functools.cached_property
    def kind(self) -> fuzz_models.Model:
        return fuzz_models.MODELS[self.model]()

    @functools.cached_property
    def params(self) -> Any:
        return self.make_params()

    def make_params(self) -> Any:
        """The model's parameters, and where `stored` says so, two frozen leaves that the loss returns."""
        state = {"count": jnp.int32(0), "mean": jnp.zeros(fuzz_models.WIDTH)}
        return {"model": self.kind.make_params()} | ({self.stored: state} if self.stored else {})

    @functools.cached_property
    def loss(self) -> Any:
        """The user's loss function."""

        def loss(params, batch, rng=None):
            # In fp32 from here on: what a gradient in bf16 may be off by is then its own rounding alone.
            model_params = jax.tree.map(
                lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, params["model"]
            )
            out = self.kind.loss(model_params, batch)
            value, aux = out if isinstance(out, tuple) else (out, {})
            if rng is not None:
                value = value * (1 + 0.3 * jax.random.normal(rng))
            aux = aux | {"value": value, "rows": batch["x"].shape[0]}
            if self.weights != "none":
                aux["weight"] = batch["weight"].sum()
            if self.stored:
                old = params[self.stored]
                new = {"count": old["count"] + 1, "mean": 0.5 * old["mean"] + batch["x"].mean(0)}
                aux["frozen"] = {self.stored: new}
            return value, aux

        return loss if self.takes_rng else lambda params, batch: loss(params, batch)

    @functools.cached_property
    def batches(self) -> list[Any]:
        rng = np.random.default_rng(self.seed)
        size = self.num_devices * self.num_microbatches * self.rows

        def batch():
            x = rng.normal(size=(size, fuzz_models.WIDTH)).astype(np.float32)
            tokens = {name: rng.integers(0, VOCAB, size).astype(np.int32) for name in ("x", "y")}
            weight = rng.uniform(0.5, 2, size).astype(np.float32)
            tokens["weight"] = weight
            if self.weights == "some zero":
                weight = weight * (np.arange(size) >= self.rows)
            return {"x": x, "tokens": tokens, "weight": weight}

        return [batch() for _ in range(NUM_STEPS)]

    def compute(self, leaf: Any) -> Any:
        """The dtype in which the loss sees a trainable leaf."""
        kept = self.keep_fp32 and KEEP[self.keep_fp32]("", leaf)
        return jnp.dtype("float32" if kept else self.compute_dtype)

    def is_narrow(self, leaf: Any) -> bool:
        """Whether a trainable leaf is stored in bf16."""
        kept = self.keep_fp32 and KEEP[self.keep_fp32]("", leaf)
        return self.master_dtype == "bf16" and not kept


def draw(seed: int) -> Draw:
    """The combination of a seed. Models and stages come in turn."""
    rng = np.random.default_rng([0, seed])  # the first hundred hold every choice: `test_property` asks for it
    pick = lambda *choices: choices[rng.integers(len(choices))]
    names = list(fuzz_models.MODELS)
    model = names[seed % len(names)]
    stage = (seed + seed // len(names)) % 4
    mesh, bf16 = pick(*MESHES), rng.uniform() < 0.25
    layers = fuzz_models.MODELS[model]().layers
    drawn = Draw(
        seed=seed,
        model=model,
        stage=stage,
        mesh=mesh,
        over_replicas="replica" in mesh and stage > 0 and pick(True, False),
        num_microbatches=pick(1, 1, 2, 3),
        rows=pick(1, 2, 3),
        gather=pick("auto", "use", "once") if stage == 2 else pick("auto", "use"),
        optimizer=_fitting(model, pick(*TRANSFORMATIONS)),
        clip_norm=pick(None, None, 0.02, 100.0),
        reduction=pick("mean", "mean", "sum"),
        compute_dtype="bfloat16" if bf16 else "float32",
        reduce_dtype=pick(None, "float32") if bf16 else None,
        keep_fp32=pick(None, *KEEP) if bf16 else None,
        frozen=pick(0.0, 0.0, 0.3, 0.6),
        weights=pick("none", "none", "positive", "some zero"),
        takes_rng=pick(False, False, True),
        stored=pick(None, "a_state", "z_state"),
        activations=_draw_activations(rng, layers, mesh) if layers and pick(True, False) else None,
        reads_layers=pick(True, False),
        makes_params=pick(True, False),
        skip_nonfinite=pick(True, False),
        loss_scale=pick(None, None, 8.0),
        fp32_sum=pick(False, False, True),
        arena=pick(False, False, True),
    )
    stored = _draw_stored(rng, drawn.optimizer)
    may = (
        () if stage == 0 else ("params_bits", "grads_bits") if drawn.optimizer in SMOOTH else ("grads_bits",)
    )
    quantize = tuple(name for name in may if pick(True, False, False))
    return dataclasses.replace(drawn, **stored, quantize=quantize)


def _draw_stored(rng: np.random.Generator, optimizer: str) -> dict:
    """In which dtypes masters and moments are stored."""
    pick = lambda *choices: choices[rng.integers(len(choices))]
    masters, moments = (pick("fp32", "bf16") if optimizer in SMOOTH else "fp32" for _ in range(2))
    at_random = pick(None, True, False) if "bf16" in (masters, moments) else None
    return {"master_dtype": masters, "state_dtype": moments, "stochastic_rounding": at_random}


def _fitting(model: str, optimizer: str) -> str:
    """The optimizer, but not muon for a matrix without rows, by which it divides."""
    return "lamb" if (model, optimizer) == ("odd_leaves", "muon") else optimizer


def _draw_activations(rng: np.random.Generator, layers: int, mesh: dict) -> dict:
    pick = lambda *choices: choices[rng.integers(len(choices))]
    return {
        "policy": pick(None, "nothing", "dots", "everything", "nested"),
        "num_checkpoints": pick(None, *range(1, layers + 1)),
        "partition_axis": pick(None, "model") if "model" in mesh else None,
        "offload": pick(True, False, False),
        "barrier": pick(True, False, False),
    }


# --- the engine ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """What both sides give; per step where it is a list."""

    loss: list
    grad_norm: list
    aux: list
    params: Any
    evaluated: tuple


def by_engine(draw: Draw) -> Result:
    structure = jax.tree.structure(draw.params)
    specs = None
    if "model" in draw.mesh and draw.kind.specs is not None:
        specs = jax.tree.map(lambda x: None, draw.params) | {"model": draw.kind.specs}
    engine = zero2jax.Engine(
        draw.loss,
        TRANSFORMATIONS[draw.optimizer](),
        zero2jax.make_mesh(**draw.mesh),
        stage=draw.stage,
        num_microbatches=draw.num_microbatches,
        precision=zero2jax.Precision(
            compute_dtype=draw.compute_dtype,
            reduce_dtype=draw.reduce_dtype,
            keep_fp32=None if draw.keep_fp32 is None else KEEP[draw.keep_fp32],
            fp32_sum=draw.fp32_sum,
            master_dtype=draw.master_dtype,
            state_dtype=draw.state_dtype,
            stochastic_rounding=draw.stochastic_rounding,
            quantize=zero2jax.QuantizeSettings(**dict.fromkeys(draw.quantize, 8), block_size=4, min_size=0)
            if draw.quantize
            else None,
        ),
        clip_norm=draw.clip_norm,
        reduction=draw.reduction,
        skip_nonfinite=draw.skip_nonfinite,
        loss_scale=draw.loss_scale,
        trainable=jax.tree.unflatten(structure, draw.trainable),
        param_specs=specs,
        gather=draw.gather,
        seed=draw.seed,
        shard_over_replicas=draw.over_replicas,
        arena=draw.arena,
        activations=None if draw.activations is None else zero2jax.ActivationSettings(**draw.activations),
    )
    batch = draw.batches[0] if draw.reads_layers else None
    state = engine.init(draw.make_params if draw.makes_params else draw.params, batch=batch)
    stored, metrics = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state), []
    for batch in draw.batches:
        state, found = engine.step(state, batch)
        metrics.append(found)
        assert bool(found["applied"])
        assert ("grad_norm_clipped" in found) == (draw.clip_norm is not None)
        if draw.clip_norm is not None:
            clipped = min(float(found["grad_norm"]), draw.clip_norm)
            np.testing.assert_allclose(found["grad_norm_clipped"], clipped, rtol=1e-6)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state) == stored
    return Result(
        loss=[m["loss"] for m in metrics],
        grad_norm=[m["grad_norm"] for m in metrics],
        aux=[m["aux"] | ({} if draw.weights == "none" else {"weight": m["weight"]}) for m in metrics],
        params=engine.params(state),
        evaluated=engine.evaluate(state, draw.batches[0]),
    )


# --- the oracle ------------------------------------------------------------------------------------------------------


class Oracle:
    """The same training on one device. `run(noise)` with gradients off by `noise` (-1 to 1) times their rounding."""

    def __init__(self, draw: Draw):
        self.draw = draw
        leaves, self.structure = jax.tree.flatten(draw.params)
        self.trained = [i for i, t in enumerate(draw.trainable) if t]
        stored = self._stored([jnp.asarray(x) for x in leaves])
        self.leaves = [x.astype(y.dtype) for x, y in zip(stored, leaves, strict=True)]
        limit = optax.clip_by_global_norm(draw.clip_norm) if draw.clip_norm else optax.identity()
        self.tx = optax.with_extra_args_support(optax.chain(limit, TRANSFORMATIONS[draw.optimizer]()))
        self.start = jax.jit(self.tx.init)([self.leaves[i] for i in self.trained])
        self.means, self.update = jax.jit(self._means, static_argnums=3), jax.jit(self._update)

    def run(self, noise: list[np.ndarray]) -> Result:
        draw, leaves, opt_state, found = self.draw, self.leaves, self.start, []
        for step, batch in enumerate(draw.batches):
            slices = draw.num_devices * draw.num_microbatches
            *terms, grads, addends = self.means(self._seen(leaves, noise), batch, step, slices)
            leaves, opt_state, norm = self.update(leaves, opt_state, terms, grads, addends, noise)
            found.append((*terms, norm))
        losses, auxes, _, norms = zip(*found, strict=True)
        seen = self._seen(leaves, noise)
        loss, aux, *_ = self.means(seen, draw.batches[0], NUM_STEPS, draw.num_devices)
        aux.pop("weight", None)  # a metric of the step
        params = self.structure.unflatten(self._stored(leaves))
        return Result(list(losses), list(norms), list(auxes), params, (loss, aux))

    def _seen(self, leaves: list, noise: list) -> list:
        """As the loss sees them: matrices off by a rounding of their largest entry, if they are quantised."""
        seen = list(leaves)
        for i, n in zip(self.trained, noise, strict=True):
            if "params_bits" in self.draw.quantize and seen[i].ndim > 1:
                largest = jnp.max(jnp.abs(seen[i]), initial=0.0)
                seen[i] = seen[i] + (n * largest * ROUNDINGS * 2**-9).astype(seen[i].dtype)
        return seen

    def _stored(self, leaves: list) -> list:
        """Those that are stored in bf16 in it."""
        narrow = [i for i in self.trained if self.draw.is_narrow(leaves[i])]
        return [x.astype(jnp.bfloat16) if i in narrow else x for i, x in enumerate(leaves)]

    def _means(self, leaves: list, batch: Any, step: int, slices: int) -> tuple:
        """Loss, aux, new frozen values, gradients, and the largest addend of each gradient, over the slices."""
        draw = self.draw
        if draw.kind.is_mean and not draw.takes_rng and draw.weights == "none":
            slices = 1
        values = [leaves[i] for i in self.trained]
        parts = jax.tree.map(lambda x: x.reshape(slices, -1, *x.shape[1:]), batch)

        def one(inputs):
            index, part = inputs

            def scalar(values):
                full = list(leaves)
                for i, x in zip(self.trained, values, strict=True):
                    full[i] = x.astype(draw.compute(x))
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(draw.seed), step), index)
                arguments = (key,) if draw.takes_rng else ()
                return draw.loss(self.structure.unflatten(full), part, *arguments)

            (value, aux), grads = jax.value_and_grad(scalar, has_aux=True)(values)
            return value, jax.tree.map(jnp.asarray, aux), grads

        value, aux, grads = jax.lax.map(one, (jnp.arange(slices), parts))
        weight = aux.pop("weight", jnp.ones(slices))
        frozen = jax.tree.map(
            lambda x: x.mean(0) if jnp.issubdtype(x.dtype, jnp.floating) else x.max(0), aux.pop("frozen", {})
        )
        total = jnp.where(weight.sum() == 0, 1, weight.sum())  # without any weight every mean is 0
        mean = lambda x: jnp.tensordot(weight, x.astype(jnp.float32), 1) / total
        means = jax.tree.map(lambda x: mean(x) if jnp.issubdtype(x.dtype, jnp.floating) else x.sum(0), aux)
        if draw.weights != "none":
            means["weight"] = weight.sum()
        largest = [jnp.max(jnp.abs(g), initial=0.0) * weight.max() * slices / total for g in grads]
        return mean(value), means, frozen, [mean(g) for g in grads], largest

    def _update(
        self, leaves: list, opt_state: Any, terms: list, grads: list, addends: list, noise: list
    ) -> tuple:
        draw = self.draw
        loss, _, frozen = terms
        scale = draw.num_devices if draw.reduction == "sum" else 1
        values = [leaves[i] for i in self.trained]
        moved = []
        for x, g, size, n in zip(values, grads, addends, noise, strict=True):
            quantized = "grads_bits" in draw.quantize and x.ndim > 1
            exact = draw.compute(x) == jnp.float32 and draw.state_dtype == "fp32" and not quantized
            rounding = max(draw.kind.rounding, 2**-24 if exact else 2**-9)
            moved.append(scale * (g + n * size * rounding * ROUNDINGS))
        updates, opt_state = self.tx.update(moved, opt_state, values, value=loss)
        new = list(leaves)
        for i, x, u, n in zip(self.trained, values, updates, noise, strict=True):
            new[i] = x + (u * (1 + 2**-6 * n) if draw.state_dtype == "bf16" else u)
            if draw.is_narrow(x):
                new[i] *= 1 + 2**-7 * n  # a unit in the last place of a bf16 number is no larger
        params = self.structure.unflatten(new) | frozen
        return jax.tree.leaves(params), opt_state, optax.tree.norm(moved)


def expected(draw: Draw) -> tuple[Result, list[Result]]:
    """What the oracle gives, and what it gives with gradients off by their rounding."""
    oracle = Oracle(draw)
    rng = np.random.default_rng(draw.seed)
    shapes = [oracle.leaves[i].shape for i in oracle.trained]
    full = lambda value: [np.full(shape, value, np.float32) for shape in shapes]
    random = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]
    return oracle.run(full(0)), [oracle.run(noise) for noise in (full(1), full(-1), random)]


def compare(found: Result, exact: Result, moved: list[Result]) -> float:
    """Raise an AssertionError that names the value; returns the largest part of a tolerance that was used."""
    fields = [vars(result) for result in (found, exact, *moved)]
    structures = {jax.tree.structure(tree) for tree in fields}
    assert len(structures) == 1, structures
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(fields[0])]
    worst = 0.0
    for path, x, y, *others in zip(paths, *map(jax.tree.leaves, fields), strict=True):
        assert x.dtype == y.dtype, (path, x.dtype, y.dtype)
        x, y, *others = (np.asarray(a, np.float64) for a in (x, y, *others))
        tolerance = FLOOR * np.maximum(1, np.abs(y)) + 2 * np.max([np.abs(o - y) for o in others], 0)
        used = np.max(np.abs(x - y) / tolerance, initial=0)
        worst = max(worst, used)
        assert used <= 1, f"{jax.tree_util.keystr(path)}: found\n{x}\nexpected\n{y}\nwithin\n{tolerance}"
    return worst


def check(draw: Draw) -> float:
    """Raise an error, with the command that repeats the draw, where the engine and the oracle differ."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # advice on memory
            return compare(by_engine(draw), *expected(draw))
    except Exception as error:
        error.add_note(f"{draw}\nRepeat it with: make fuzz N=1 FIRST={draw.seed}")
        raise
