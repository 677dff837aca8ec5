"""The loss in a script of your own: a vocabulary-parallel head over all ranks, checked against ordinary logits.

    torchrun --standalone --nproc_per_node 2 examples/minimal.py

NCCL and bf16 on GPUs, gloo and fp32 on the CPU. The vocabulary (1,001 ids) is odd, so the
shards are uneven: ``VocabShard.chunk`` says which rows a rank holds.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import cce_tp

VOCAB, HIDDEN, BATCH, SEQUENCE = 1001, 64, 4, 32


def main() -> None:
    """One forward and backward pass, and the same with the whole logits."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    group = dist.group.WORLD  # all ranks form one tensor-parallel group; with data parallelism, pass the tp group

    torch.manual_seed(0)  # a tensor-parallel group shares its tokens
    dtype = torch.bfloat16 if on_gpu else torch.float32
    hidden = torch.randn(BATCH, SEQUENCE, HIDDEN, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCAB, (BATCH, SEQUENCE), device=device)  # shifted already; -100 where there is none
    whole = torch.randn(VOCAB, HIDDEN, device=device, dtype=dtype) * 0.1

    shard = cce_tp.VocabShard.chunk(VOCAB, dist.get_rank(group), dist.get_world_size(group))
    weight = whole[shard.start : shard.stop].clone().requires_grad_()
    loss = cce_tp.linear_cross_entropy(hidden, weight, labels, group=group, shard=shard)
    loss.backward()  # hidden.grad is whole, the same on every rank; weight.grad belongs to this rank's rows

    reference = hidden.detach().float().requires_grad_()
    logits = F.linear(reference, whole.float())
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    assert hidden.grad is not None
    assert reference.grad is not None
    error = float((hidden.grad - reference.grad).norm() / reference.grad.norm())
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}, with logits {expected.item():.6f}; gradient off by {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
