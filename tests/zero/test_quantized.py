"""What travels in 8 or 4 bits: its arithmetic, a step and its bytes, each against NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import assert_trees_equal
from jax.sharding import PartitionSpec as P

import zero2jax
from zero2jax.programs.audit import audit
from zero2jax.zero.quantized import Wire, dequantized, quantized

RNG = np.random.default_rng(0)
LARGEST = {8: 127, 4: 7}


def rounded(x, wire):
    """`x` after it has been quantised and back, flattened into the blocks of one message."""
    num_blocks = -(-x.size // wire.block_size)
    length = -(-x.size // num_blocks)
    length += length % 2 if wire.bits == 4 else 0
    flat = np.zeros(num_blocks * length, np.float32)
    flat[: x.size] = x.ravel()
    blocks, most = flat.reshape(num_blocks, length), LARGEST[wire.bits]
    scale = np.abs(blocks).max(1, keepdims=True) * np.float32(1 / most)
    scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
    numbers = np.clip(np.rint(blocks / np.where(scale == 0, 1, scale)), -most, most)
    return (numbers * scale).ravel()[: x.size].reshape(x.shape)


# --- the arithmetic --------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=1)
def there_and_back(x, wire):
    packed = quantized(x, wire)
    return packed, dequantized(packed, x.shape[-1], wire)


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_are_rounded_as_numpy_rounds_them_and_by_half_a_quantum_at_most(bits):
    wire = Wire(bits, 64)
    x = RNG.normal(size=(3, 201)).astype(np.float32) * np.float32([[1e-30], [1], [1e30]])
    x[1, :60] = 0  # the first of its blocks, of 51 numbers, or, in pairs, 52
    packed, found = there_and_back(x, wire)
    assert packed.dtype == jnp.uint8
    assert packed.shape == (3, wire.num_bytes(201)) == (3, {8: 4 * (51 + 2), 4: 4 * (26 + 2)}[bits])
    np.testing.assert_array_equal(found, np.stack([rounded(row, wire) for row in x]))
    np.testing.assert_array_equal(found[1, :51], 0)
    # half a quantum, of a scale that bf16 rounds up by at most a 256th
    bound = np.abs(x).max(1, keepdims=True) / LARGEST[bits] / 2 * (1 + 2**-8)
    assert np.all(np.abs(found - x) <= bound)


def test_every_pair_of_4_bit_numbers_comes_back():
    low, high = np.meshgrid(np.arange(-7, 8), np.arange(-7, 8))
    x = np.stack([low.ravel(), high.ravel()], 1).astype(np.float32)
    x = np.concatenate([x, np.full((225, 2), 7, np.float32)], 1)[:, [0, 2, 1, 3]]  # 7 makes the scale 1
    wire = Wire(4, 4)
    packed, found = there_and_back(x, wire)
    assert packed.shape == (225, 4)
    np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_nothing_of_a_block_that_is_not_finite_arrives_finite(bits, bad):
    wire = Wire(bits, 4)
    x = np.ones(10, np.float32)  # blocks of 4, 4, 2
    x[5] = bad
    _, found = there_and_back(x, wire)
    np.testing.assert_array_equal(np.isfinite(found), [True] * 4 + [False] * 4 + [True] * 2)


def test_settings_refuse_what_they_cannot_be():
    settings = zero2jax.QuantizeSettings
    for wrong, words in (
        ({"params_bits": 4}, "params_bits is 4"),
        ({"grads_bits": 16}, r"grads_bits is 16; it is one of \(None, 8, 4\)"),
        ({"grads_bits": 8, "block_size": 1}, "block_size is 1; it is a whole number of at least 2"),
        ({"grads_bits": 8, "min_size": -1}, "min_size is -1"),
        ({}, "nothing is. Give params_bits=8"),
    ):
        with pytest.raises(ValueError, match=words):
            settings(**wrong)
    precision = zero2jax.Precision(quantize=settings(grads_bits=4))
    assert precision.plain[3:] == ["fp32_sum", "gradients int4 in blocks of 64", "from 4096 on"]
    with pytest.raises(
        ValueError, match=r"Precision.quantize \(gradients int4 .*at stage 0.*stage from 1 up"
    ):
        zero2jax.Engine(lambda p, b: 0.0, optax.sgd(1.0), stage=0, precision=precision)


def test_settings_that_quantise_nothing_say_so_and_what_to_do():
    """Matrices side by side look like stacked layers until the loss is read."""
    params = {"a": np.ones((16, 16), np.float32), "b": np.ones((16, 16), np.float32)}
    batch = np.ones((8, 16), np.float32)

    def engine():
        return zero2jax.Engine(
            lambda params, x: ((x @ params["a"]) @ params["b"]).mean(),
            optax.sgd(0.1),
            zero2jax.make_mesh(data=2),
            precision=zero2jax.Precision(
                "fp32", quantize=zero2jax.QuantizeSettings(grads_bits=4, min_size=256)
            ),
        )

    guessed = engine()
    state = guessed.init(params)
    with pytest.warns(UserWarning, match=r"gradients int4 in blocks of 64.*no parameter is.*batch=batch"):
        guessed.step(state, batch)
    read = engine()
    read.step(read.init(params, batch=batch), batch)  # a warning would be an error


# --- a step ----------------------------------------------------------------------------------------------------------

PARAMS = {
    "b": RNG.normal(size=9).astype(np.float32),
    "count": np.arange(16, dtype=np.int32).reshape(8, 2),
    "base": RNG.normal(size=(8, 6)).astype(np.float32),
    "none": np.zeros((0, 3), np.float32),
    "w": RNG.normal(size=(7, 10)).astype(np.float32),
}
BITS = {"params_bits": 8, "grads_bits": 4, "block_size": 16, "min_size": 0}


def loss(params, batch):
    """Linear and quadratic in w: its gradient, the mean of the batch plus w, is w as the loss sees it."""
    w, b = 1.0 * params["w"], params["b"]  # one use: what is used twice is reduced at each use
    value = jnp.mean((batch * w[None]).sum((1, 2))) + 0.5 * (w**2).sum() + b.sum() + params["none"].sum()
    return value, {"base": params["base"], "count": params["count"], "w": w}


def sliced(x, num, dim):
    """The shards of `x`, padded."""
    padding = [(0, -size % num if i == dim else 0) for i, size in enumerate(x.shape)]
    return np.split(np.pad(x, padding), num, axis=dim)


@dataclasses.dataclass
class Case:
    mesh: dict
    stage: int
    grads_bits: int = 8
    over: bool = False
    frozen_bits: int | None = None

    @property
    def wire(self):
        return Wire(self.grads_bits, BITS["block_size"])

    @property
    def sizes(self):
        return self.mesh.get("replica", 1), self.mesh["data"]

    def gathered(self, x, dim):
        """A parameter as the loss sees it, gathered over the groups first if the state is sharded over them."""
        replica, data = self.sizes
        wire = dataclasses.replace(self.wire, bits=8)
        shards = sliced(x, replica * data if self.over else data, dim)
        if self.over:
            groups = [shards[i * replica : (i + 1) * replica] for i in range(data)]
            shards = [np.concatenate([rounded(s, wire) for s in group], dim) for group in groups]
        return np.concatenate([rounded(s, wire) for s in shards], dim)[tuple(map(slice, x.shape))]

    def summed(self, addends, dim):
        """The sum of the devices' addends, of (replica, data, rows, columns)."""
        replica, data = self.sizes
        num, shape = replica * data if self.over else data, addends.shape[2:]
        addends = np.concatenate(sliced(addends, num, dim + 2), dim + 2)
        over_devices = lambda slices: [
            sum(rounded(s, self.wire) for s in of) for of in zip(*slices, strict=True)
        ]
        sums = [over_devices([np.split(x, data, dim) for x in group]) for group in addends]
        result = sums[0] if replica == 1 else []
        for shards in zip(*sums, strict=True) if replica > 1 else ():  # of one device, over the groups
            if self.over:
                result += over_devices([np.split(shard, replica, dim) for shard in shards])
                continue
            flat = over_devices([sliced(shard.ravel(), replica, 0) for shard in shards])
            back = [rounded(x, dataclasses.replace(self.wire, bits=8)) for x in flat]
            result.append(np.concatenate(back)[: shards[0].size].reshape(shards[0].shape))
        return np.concatenate(result, dim)[tuple(map(slice, shape))]


CASES = [
    Case({"data": 2}, 1, 8, frozen_bits=8),
    Case({"data": 3}, 2, 4),
    Case({"data": 8}, 3, 8),
    Case({"replica": 2, "data": 2}, 3, 4, over=True, frozen_bits=8),
    Case({"replica": 2, "data": 3}, 2, 4),
    Case({"data": 2, "model": 2}, 3, 8),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_what_numpy_makes_of_the_quantised_shards(case):
    settings = zero2jax.QuantizeSettings(
        **BITS | {"grads_bits": case.grads_bits, "frozen_bits": case.frozen_bits}
    )
    has_model = "model" in case.mesh
    engine = zero2jax.Engine(
        loss,
        optax.sgd(1.0),
        zero2jax.make_mesh(**case.mesh),
        stage=case.stage,
        precision=zero2jax.Precision("fp32", quantize=settings),
        trainable=lambda path, _: path in ("w", "b", "none"),
        param_specs={**dict.fromkeys(PARAMS, P()), "w": P(None, "model")} if has_model else None,
        shard_over_replicas=case.over,
        skip_nonfinite=True,
    )
    replica, data = case.sizes
    num = replica * data
    batch = np.random.default_rng(1).normal(size=(num * 2, 7, 10)).astype(np.float32)
    start = engine.init(PARAMS)
    state, metrics = engine.step(start, batch)

    dims = {leaf.path: leaf.dim for leaf in engine.layout.params.leaves}
    parts = np.split(PARAMS["w"], 2, axis=1) if has_model else [PARAMS["w"]]
    w = np.concatenate([case.gathered(part, dims["w"]) for part in parts], 1)
    aux = metrics["aux"]
    np.testing.assert_allclose(aux["w"], w, rtol=1e-6)
    np.testing.assert_array_equal(aux["count"], num * PARAMS["count"])
    frozen = case.gathered(PARAMS["base"], dims["base"]) if case.frozen_bits else PARAMS["base"]
    np.testing.assert_allclose(aux["base"], frozen, rtol=1e-6)

    addends = batch.reshape(replica, data, 2, 7, 10).mean(2) + w
    halves = np.split(addends, 2, axis=3) if has_model else [addends]
    mean = np.concatenate([case.summed(half, dims["w"]) for half in halves], 1) / num
    params = engine.params(state)
    # a tie may be rounded to the other side where the addend is off by its last bit: none is at this seed
    np.testing.assert_allclose(params["w"], PARAMS["w"] - mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(params["b"], PARAMS["b"] - 1, rtol=1e-6)
    # each hop rounds by half a quantum of the largest addend at most; what comes back between groups in 8 bits, too
    quantum = np.abs(addends).max() / LARGEST[case.grads_bits] / 2 * 1.01
    hops = 1 if replica == 1 else 3
    assert 0 < np.abs(mean - addends.mean((0, 1))).max() <= hops * quantum

    batch[0, 3, 3] = np.inf
    after, metrics = engine.step(state, batch)
    assert not bool(metrics["applied"])
    assert not np.isfinite(metrics["grad_norm"])
    np.testing.assert_array_equal(engine.params(after)["w"], params["w"])


# --- the bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "over", "stage", "bits"),
    [
        ({"data": 3}, False, 1, 8),
        ({"data": 2}, False, 2, 4),
        ({"data": 8}, False, 3, 4),
        ({"replica": 2, "data": 4}, True, 3, 8),
        ({"replica": 2, "data": 2}, False, 2, 4),
    ],
    ids=str,
)
def test_the_compiled_step_sends_the_bytes_of_the_formula(mesh, over, stage, bits):
    def loss(params, x):
        layer = lambda x, w: (jnp.tanh(x @ w), None)
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params["stack"])[0])

    settings = zero2jax.QuantizeSettings(params_bits=8, grads_bits=bits)
    engine = zero2jax.Engine(
        loss,
        optax.adam(1e-2),
        zero2jax.make_mesh(**mesh),
        stage=stage,
        precision=zero2jax.Precision(quantize=settings),
        shard_over_replicas=over,
    )
    shapes, batch = (
        {"stack": jax.ShapeDtypeStruct((3, 64, 64), jnp.float32)},
        jax.ShapeDtypeStruct((48, 64), "float32"),
    )
    engine.abstract_state(shapes, batch=batch)
    found = audit(engine.lower(batch).compile(), mesh=engine.mesh)
    rows = {(row.kind, row.axis): row.bytes_per_step for row in found.rows() if row.largest_bytes > 512}

    replica, data = mesh.get("replica", 1), mesh["data"]
    num = -(-64 // data) * 64  # numbers of a layer's shard
    params, grads = settings.wire(8), settings.wire(bits)
    gathers = 2 if stage == 3 else 1
    expected = {
        ("all-gather", "data"): 3 * gathers * data * params.num_bytes(num),
        ("all-to-all", "data"): 3 * data * grads.num_bytes(num),
    }
    if replica > 1:
        part = num // replica
        expected[("all-to-all", "replica")] = 3 * replica * grads.num_bytes(part)
        expected[("all-gather", "replica")] = 3 * replica * Wire(8, grads.block_size).num_bytes(part)
    assert rows == expected
    full = 3 * data * num * 2  # bytes in bf16
    assert rows["all-gather", "data"] <= 0.505 * gathers * full
    assert rows["all-to-all", "data"] <= {8: 0.505, 4: 0.267}[bits] * full


def test_checkpoints_go_from_a_quantised_engine_to_another_and_back(tmp_path):
    def engine_of(num_devices, quantize):
        return zero2jax.Engine(
            loss,
            optax.adam(1e-2),
            zero2jax.make_mesh(data=num_devices),
            precision=zero2jax.Precision(quantize=quantize),
            trainable=lambda path, _: path in ("w", "b", "none"),
        )

    engine = engine_of(3, zero2jax.QuantizeSettings(**BITS))
    state = engine.init(PARAMS)
    for i, (num_devices, quantize) in enumerate([(2, None), (4, zero2jax.QuantizeSettings(**BITS))]):
        with zero2jax.Checkpointer(tmp_path / str(i), engine) as checkpointer:
            checkpointer.save(0, state)
        engine = engine_of(num_devices, quantize)
        engine.abstract_state(PARAMS)
        state, _ = zero2jax.Checkpointer(tmp_path / str(i)).restore(engine)
        assert_trees_equal(engine.params(state), PARAMS)


def test_parameters_in_host_memory_are_quantised_where_they_are_fetched():
    """Of bf16 there, and not of the fp32 masters."""
    case = Case({"data": 2}, 3)
    settings = zero2jax.QuantizeSettings(params_bits=8, block_size=16, min_size=0)
    engine = zero2jax.Engine(
        loss,
        optax.sgd(1.0),
        zero2jax.make_mesh(data=2),
        stage=3,
        precision=zero2jax.Precision(quantize=settings),
        trainable=lambda path, _: path in ("w", "b", "none"),
        offload=zero2jax.OffloadSettings(params=True),
    )
    state = engine.init(PARAMS)
    _, metrics = engine.step(state, np.ones((2, 7, 10), np.float32))
    (dim,) = (leaf.dim for leaf in engine.layout.params.leaves if leaf.path == "w")
    stored = PARAMS["w"].astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = case.gathered(stored, dim).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(metrics["aux"]["w"], np.float32), expected)
