"""One small network with normalization, in Flax Linen and in Flax NNX: scanned or unrolled, with remat or without."""

import flax.linen as nn
from flax import nnx

LAYERS, WIDTH = 3, 5


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.LayerNorm()(x)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(h))), None


class LinenModel(nn.Module):
    scanned: bool
    remat: bool

    @nn.compact
    def __call__(self, x):
        block = nn.remat(LinenBlock, prevent_cse=not self.scanned) if self.remat else LinenBlock
        if self.scanned:
            scan = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            x, _ = scan(name="blocks")(x, None)
        else:
            for i in range(LAYERS):
                x, _ = block(name=f"block_{i}")(x)
        return nn.Dense(WIDTH, name="head")(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class NnxModel(nnx.Module):
    def __init__(self, scanned, remat, rngs):
        self.scanned, self.remat = scanned, remat
        if scanned:
            self.blocks = nnx.vmap(NnxBlock, in_axes=0, out_axes=0)(rngs.split(LAYERS))
        else:
            self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        apply = lambda block, x: block(x)
        apply = nnx.remat(apply) if self.remat else apply
        if self.scanned:
            x = nnx.scan(lambda x, block: apply(block, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.blocks
            )
        else:
            for block in self.blocks:
                x = apply(block, x)
        return self.head(x)
