"""Split the experts of a layer over two processes (expert parallelism).

Run it with torchrun, or alone, which starts the two processes itself:

    torchrun --nproc_per_node 2 examples/expert_parallel.py
    python examples/expert_parallel.py

Each process has half of the tokens and half of the experts. Tokens travel to the processes of their
experts, and the outputs come back. Each process prints its experts and the bytes that it sent, and
checks that its outputs and the gradients of its experts have the bits of one process with all
tokens and all experts. The processes use NCCL if each of them has a GPU, else gloo on CPUs.
"""

import os
import socket

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import grouped
from grouped.parallel import ExpertParallel

RANKS, HIDDEN, INNER, EXPERTS, TOKENS = 2, 64, 32, 8, 64


def build(device):
    """Return the same layer in each process."""
    torch.manual_seed(0)
    return grouped.nn.MoE(
        HIDDEN,
        INNER,
        num_experts=EXPERTS,
        top_k=2,
        recipe=grouped.recipes.FP8Block(),
        dtype=torch.bfloat16,
    ).to(device)


def work():
    """Run in each process."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh(device, (RANKS,), mesh_dim_names=("ep",))

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(RANKS * TOKENS, HIDDEN, generator=generator).bfloat16().to(device)

    # One process with everything, to compare with.
    whole = build(device)
    wanted = whole(tokens)
    wanted.float().square().mean().backward()

    # The parameters become DTensors: those of the experts are sharded, that of the router is not.
    moe = parallelize_module(build(device), mesh["ep"], ExpertParallel())
    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    out = moe(tokens[mine])
    # Gradients are sums over the ranks. The mean over all tokens is the mean of the ranks' means.
    (out.float().square().mean() / RANKS).backward()

    weight = moe.experts.down.weight
    local = weight.to_local()
    sent = moe.exchange.sent["dispatch"]
    print(f"rank {rank}: {len(local)} of {len(weight)} experts, sent {sent} bytes of tokens")
    assert len(local) == EXPERTS // RANKS
    assert torch.equal(out, wanted[mine])
    experts = slice(rank * len(local), (rank + 1) * len(local))
    assert torch.equal(weight.grad.to_local(), whole.experts.down.weight.grad[experts])
    dist.barrier()  # No rank closes its connections while another one works.
    dist.destroy_process_group()


def start(rank, port):
    """Set what torchrun sets, then work."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), **address)
    work()


def main():
    """Work if torchrun started this process; otherwise start two processes."""
    if "RANK" in os.environ:  # started by torchrun
        work()
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(start, (port,), nprocs=RANKS)
    print("outputs and gradients have the bits of one process")


if __name__ == "__main__":
    main()
