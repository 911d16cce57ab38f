"""One process of a PyTorch row: the model of `gpt.py` in torch, on CPU processes that speak through gloo.

Started by `peers.py` with torch's usual variables and one argument, a folder with `case.json` and `case.npz` (first
parameters, batches). Process 0 prints a line `@{"versions": ...}` when it is ready, then for each line it reads takes a
step and prints `@{"loss": ..., "seconds": ..., "sent_bytes": ...}`; the others follow it.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

SENT = [0.0]  # bytes that this process has sent, by the ring algorithms


def count_bytes() -> None:
    """Have the collectives that sharding uses add to `SENT`; before DeepSpeed is imported, which keeps them."""
    once = (
        "all_gather_into_tensor",
        "all_gather_single",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
        "reduce",
    )

    def counted(name: str, passes: int) -> None:
        collective = getattr(dist, name)

        def call(*args, **kwargs):
            sizes = [x.nbytes for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            count = dist.get_world_size(kwargs.get("group"))
            SENT[0] += passes * max(sizes) * (count - 1) / count  # the largest is the full value
            return collective(*args, **kwargs)

        setattr(dist, name, call)

    for name in (*once, "all_reduce"):
        if hasattr(dist, name):  # the last ones of their kind are new in torch 2.13
            counted(name, 2 if name == "all_reduce" else 1)


class Block(torch.nn.Module):
    def __init__(self, params: dict, num_heads: int):
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, torch.nn.Parameter(torch.tensor(value)))
        self.num_heads = num_heads

    def inner(self, x):
        q, k, v = (
            (norm(x, self.norm1) @ self.qkv)
            .view(*x.shape[:2], self.num_heads, -1)
            .transpose(1, 2)
            .chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).reshape(x.shape) @ self.out
        return x + F.gelu(norm(x, self.norm2) @ self.up, approximate="tanh") @ self.down

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class GPT(torch.nn.Module):
    """(B, T + 1) tokens -> the mean cross-entropy."""

    def __init__(self, params: dict, num_layers: int, num_heads: int):
        super().__init__()
        for name in ("embed", "position", "norm"):
            self.register_parameter(name, torch.nn.Parameter(torch.tensor(params[name])))
        layers = {name.split(".")[1]: x for name, x in params.items() if name.startswith("blocks.")}
        self.blocks = torch.nn.ModuleList(
            Block({name: x[i] for name, x in layers.items()}, num_heads) for i in range(num_layers)
        )

    def forward(self, tokens):
        x = F.embedding(tokens[:, :-1], self.embed) + self.position
        for block in self.blocks:
            x = block(x)
        logits = norm(x, self.norm) @ self.embed.T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def norm(x, scale):
    return F.layer_norm(x, scale.shape, scale, eps=1e-6)


def adamw(model, case):
    return torch.optim.AdamW(model.parameters(), lr=case["learning_rate"], weight_decay=case["weight_decay"])


def fsdp2(model, case):
    """A function from tokens to the loss, that trains."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = adamw(model, case)

    def step(tokens):
        loss = model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), case["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, {}


def deepspeed_zero2(model, case):
    """The same with DeepSpeed's engine."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": case["batch_size"] // dist.get_world_size(),
        "gradient_clipping": case["clip_norm"],
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model, case), config=config)

    def step(tokens):
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss

    return step, {"deepspeed": deepspeed.__version__}


def main() -> None:
    folder = Path(sys.argv[1])
    case = json.loads((folder / "case.json").read_text())
    arrays = np.load(folder / "case.npz")
    torch.set_num_threads(1)
    count_bytes()
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    model = GPT(arrays, case["num_layers"], case["num_heads"])
    step, versions = {"fsdp2": fsdp2, "deepspeed": deepspeed_zero2}[case["kind"]](model, case)
    batches = np.split(arrays["batches"], count, axis=1)[rank]  # (steps, B / N, T + 1)
    if rank == 0:
        print("@" + json.dumps({"versions": {"torch": torch.__version__, **versions}}), flush=True)
    for i in range(sys.maxsize):
        go = torch.tensor(0)
        if rank == 0:
            go += bool(sys.stdin.readline())
        dist.broadcast(go, 0)
        if not go:
            break
        tokens = torch.tensor(batches[i % len(batches)], dtype=torch.long)
        dist.barrier()
        start, sent = time.perf_counter(), SENT[0]
        loss = step(tokens).detach() / count
        dist.barrier()
        seconds, sent = time.perf_counter() - start, SENT[0] - sent
        dist.all_reduce(loss)
        if rank == 0:
            assert math.isfinite(loss)
            print("@" + json.dumps({"loss": loss.item(), "seconds": seconds, "sent_bytes": sent}), flush=True)
    os._exit(0)  # DeepSpeed's exit hooks wait for one another


if __name__ == "__main__":
    main()
