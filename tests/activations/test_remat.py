"""`remat` and policies by hand: what is saved, by name; offload policies in combinations; frameworks' blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from zero2jax.activations.policies import TENSORS, WORDS, Either, known_words, remat_policy
from zero2jax.activations.remat import layer, remat

W = 0.5 * jax.random.normal(jax.random.key(0), (4, 4))
X = jnp.ones((3, 4))


def block(x, w):
    hidden = jnp.tanh(checkpoint_name(x @ w, "hidden"))
    return jnp.sin(checkpoint_name(hidden @ w, "out")).sum()


def residuals(fn):
    """How many arrays backward needs besides the arguments."""
    _, pullback = jax.vjp(fn, X, W)
    return len([leaf for leaf in jax.tree.leaves(pullback) if leaf is not X and leaf is not W])


def test_policies_by_word_save_what_they_say():
    saved = {
        policy: residuals(remat(block, policy=policy)) for policy in ("nothing", "full", "dots", "minimal")
    }
    assert saved["nothing"] == saved["full"] < saved["dots"] == saved["minimal"]
    assert residuals(remat(block, policy={"hidden": "save"})) == saved["nothing"] + 1
    assert residuals(remat(block, policy={"hidden": "recompute"})) == saved["nothing"]


def test_every_word_is_a_policy_that_jax_takes():
    named = lambda x, w: sum(block(checkpoint_name(x, name), w) for name in TENSORS)
    expected = jax.grad(named)(X, W)
    for word in WORDS:
        assert (jax.jit(jax.grad(remat(named, policy=word)))(X, W) == expected).all(), word


def test_words_cover_jaxs_own_policies_without_arguments():
    for name in ("nothing_saveable", "everything_saveable", "dots_saveable", "checkpoint_dots"):
        assert remat_policy(name) is getattr(jax.checkpoint_policies, name)
    assert "nested" in known_words()


def test_either_takes_offload_policies():
    policy = remat_policy(["dots", {"hidden": "offload"}])
    assert isinstance(policy, Either)
    # differentiated in a loop, where what is saved shows in the types
    looped = lambda x, ws: jax.lax.scan(lambda x, w: (x * remat(block, policy=policy)(x, w), None), x, ws)[
        0
    ].sum()
    assert "<host>" in str(jax.make_jaxpr(jax.grad(looped))(X, W[None]))
    assert residuals(remat(block, policy=["nothing", {"hidden": "save"}])) == residuals(
        remat(block, policy={"hidden": "save"})
    )


def test_linen_and_nnx_blocks():
    linen = pytest.importorskip("flax.linen")
    from flax import nnx

    dense = remat(linen.Dense, policy="dots")(3)
    params = dense.init(jax.random.key(0), X)
    loss = lambda params: (dense.apply(params, X) ** 2).mean()
    plain = lambda params: (linen.Dense(3).apply(params, X) ** 2).mean()
    assert (jax.grad(loss)(params)["params"]["kernel"] == jax.grad(plain)(params)["params"]["kernel"]).all()

    linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    call = lambda m, x: (m(x) ** 2).mean()
    found = nnx.grad(nnx.remat(call, policy=remat_policy("dots")))(linear, X)
    by_hand = nnx.grad(remat(call, policy="dots"))(linear, X)
    expected = nnx.grad(call)(linear, X)
    assert (found["kernel"][...] == expected["kernel"][...]).all()
    assert (by_hand["kernel"][...] == expected["kernel"][...]).all()


def test_a_mark_changes_nothing():
    marked = layer(lambda w, *, x: block(x, w))
    assert marked(W, x=X) == jax.jit(block)(X, W)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("dot", "policy 'dot': there is none of that name. Did you mean 'dots'"),
        ("save_projection", "Did you mean 'save_projections'"),
        ("zzz", "There is: nothing, full, everything"),
        ("nested", "'nested': it cuts a stack of layers"),
        ({"hidden": "offlod"}, "tensor 'hidden' has the action 'offlod'. Did you mean 'offload'"),
        ([], "an empty sequence"),
    ],
)
def test_unknown_policies_name_the_nearest(policy, message):
    with pytest.raises(ValueError, match=message):
        remat(block, policy=policy)


def test_an_unknown_tensor_names_the_nearest():
    with pytest.raises(
        ValueError, match=r"policy to block: it names the tensor 'hiden'.*Did you mean 'hidden'"
    ):
        remat(block, policy={"hiden": "save"})(X, W)


class Stateful(nnx.Module):
    """A layer that changes its own state: running statistics, and the count of its random keys."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


@pytest.mark.parametrize(
    "wrap", [remat, functools.partial(remat, policy="dots"), layer], ids=["remat", "policy", "layer"]
)
def test_nnx_modules_keep_what_a_block_changes_in_them(wrap):
    x = jnp.arange(12.0).reshape(3, 4)
    plain, wrapped = Stateful(nnx.Rngs(0)), Stateful(nnx.Rngs(0))
    block = wrap(lambda module, x: module(x))
    for _ in range(2):
        np.testing.assert_allclose(block(wrapped, x), plain(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(wrapped.norm.mean[...], plain.norm.mean[...], rtol=1e-6)
    assert float(jnp.abs(plain.norm.mean[...]).max()) > 0


def test_a_class_is_no_layer():
    with pytest.raises(TypeError, match="marking Stateful as a layer: it is a class"):
        layer(Stateful)
