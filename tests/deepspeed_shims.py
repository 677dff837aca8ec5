"""DeepSpeed on the CPU: what it would build or remember is kept away."""

from __future__ import annotations

import gc
import os
from typing import Any

import hf_models as hf
import torch
import torch.distributed as dist

LEARNING_RATE = 0.5
_engines: list[Any] = []


def prepare(rank: int, world_size: int) -> None:
    """Get DeepSpeed ready in a process that has its gloo process group already; once."""
    import deepspeed

    if deepspeed.comm.is_initialized():
        return
    os.environ.update(
        DS_ACCELERATOR="cpu",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        DEEPSPEED_LOG_LEVEL="error",
    )
    hf.quiet()
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # slow, but torch has it
    deepspeed.init_distributed("gloo")
    gc.freeze()


def reset() -> None:
    """Make DeepSpeed forget the groups of an earlier engine."""
    from deepspeed.utils import groups

    groups.mesh_device = groups.mpu = None
    for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "_WORLD_GROUP"):
        setattr(groups, name, None)
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    groups._MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE = groups._MPU_TENSOR_MODEL_PARALLEL_RANK = None
    for table in (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP, groups._ALL_TO_ALL_GROUP):
        table.clear()


def destroy_groups(known: set[dist.ProcessGroup]) -> None:
    """Destroy all but these, which DeepSpeed does not: an engine makes several, and each keeps threads that poll."""
    reset()
    for made in _engines:
        made.destroy()  # else hooks keep it, and it keeps its groups
    _engines.clear()
    gc.collect()
    dist.barrier()  # no rank is still at work in a group that another destroys
    for group in [group for group in dist.distributed_c10d._world.pg_map if group not in known]:
        dist.destroy_process_group(group)


def config(stage: int = 0, accumulation: int = 1, tp: int = 1, dtype: str = "fp32", **changes: Any) -> dict[str, Any]:
    """A configuration without clipping."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if dtype == "bf16":
        settings["bf16"] = {"enabled": True}
    if dtype == "fp16":
        settings["fp16"] = {"enabled": True, "initial_scale_power": 12}
    if tp > 1:
        settings["tensor_parallel"] = {"autotp_size": tp, "vocab_parallel_lm_head": True}
    for name, value in changes.items():
        settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
    return settings


def engine(model: Any, settings: dict[str, Any], **arguments: Any) -> Any:
    """The engine of a model, with plain SGD unless the configuration says otherwise."""
    import deepspeed

    reset()
    if "optimizer" not in settings:
        arguments["optimizer"] = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    made, *_ = deepspeed.initialize(model=model, config=settings, dist_init_required=False, **arguments)
    _engines.append(made)
    return made


def weights(made: Any) -> dict[str, torch.Tensor]:
    """This rank's parameters, in fp32; whole ones where ZeRO-3 has partitioned them."""
    import deepspeed

    parameters = dict(made.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: value.detach().float().clone() for name, value in parameters.items()}
