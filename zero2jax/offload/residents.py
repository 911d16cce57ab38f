"""Which leaves stay on the devices when the host takes a part of the state. On shapes, before anything is placed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zero2jax.offload.chunks import Flat
from zero2jax.offload.host_step import Handed, HostStep
from zero2jax.offload.parts import Split
from zero2jax.zero.state import Layout
from zero2jax.zero.step import StepProgram


def update_split(program: StepProgram) -> Split:
    """The parts of the update of a program whose layout has a host."""
    layout, settings, home = program.layout, program.settings, program.layout.host
    assert home is not None
    shapes = layout.abstract_state(program.mesh)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    handed: Any = (scalar, scalar, jax.ShapeDtypeStruct((), jnp.bool_), scalar)
    sums = [
        jax.ShapeDtypeStruct(settings.plan.leaves[i].rest_shape, settings.gradient_dtype(i))
        for i in settings.trained
    ]
    args = (layout.trained(shapes.params), shapes.opt_state, sums, Handed(*handed), dict[str, Any]())
    return Flat.of(HostStep(program, home).update, args).split()


def with_residents(program: StepProgram, ratio: float) -> Layout:
    """The program's layout, its host storing about `ratio` of the bytes of masters and optimizer state.

    Leaves that the optimizer ties together go together; what depends on no gradient, a few scalars, is on the host.

    Raises:
      ValueError: the optimizer ties all leaves together, so there is no part.
    """
    layout = program.layout
    if ratio == 1 or layout.host is None:
        return layout
    whole = update_split(program)
    param_bytes = [leaf.rest_bytes for leaf in layout.trained_params.leaves]
    state_bytes = [leaf.rest_bytes for leaf in layout.opt_state.leaves]
    if len(whole.parts) < 2:
        raise ValueError(
            f"offloading {ratio:g} of the state: the optimizer updates no leaf apart from the others, for it looks at "
            f"all gradients itself. Clip by clip_norm= (gradient_clipping in a JSON) instead of in the optimizer, or "
            f"offload all of it: ratio=1."
        )
    on_host = whole.on_host(param_bytes, state_bytes, ratio).parts
    resident = whole.parts[len(on_host) :]
    return dataclasses.replace(
        layout,
        resident_params=frozenset(i for part in resident for i in part.params),
        resident_state=frozenset(j for part in resident for j in part.state),
    )
