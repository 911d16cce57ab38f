"""Buffers for files: lent for as long as anybody looks at them, XLA included."""

import jax
import jax.numpy as jnp
import numpy as np

from zero2jax.offload.disk_buffers import ALIGNMENT, Buffers


def test_a_buffer_is_free_again_when_its_last_view_is_gone():
    buffers = Buffers(1024)
    view = np.asarray(buffers.take(128).view(np.float32).reshape(4, 8))[1:].reshape(-1)[2:]
    assert view.ctypes.data % ALIGNMENT == 8 * 4 + 2 * 4
    view[:] = 3
    second = buffers.take(1024)  # no room: memory of its own
    assert (buffers.num_own, second.ctypes.data % ALIGNMENT) == (1, 0)
    second[:] = 0
    assert (view == 3).all()
    place = view.ctypes.data - 40
    del view
    assert buffers.take(1024).ctypes.data == place
    assert buffers.num_own == 1


def test_xla_takes_a_buffer_as_it_is_and_lets_it_go_when_it_is_used():
    buffers = Buffers(256)
    array = buffers.take(256)
    array[:], place = 1, array.ctypes.data
    x = jax.device_put(array.view(np.float32), jax.devices()[0])
    del array
    assert x.unsafe_buffer_pointer() == place
    assert buffers.take(256).ctypes.data != place
    y = jax.block_until_ready(jnp.negative(x))
    x.delete()
    del x
    assert buffers.take(256).ctypes.data == place
    assert y.unsafe_buffer_pointer() != place
