"""A call's tensors: unwrapped, checked against each other, and flattened to tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .agreement import CallRecord
from .collectives import TensorParallelGroup, resolve_group
from .kernels.filtering import is_permutation
from .kernels.interface import LocalImplementation, SamplingSize
from .kernels.select import choose
from .options import SUPPORTED_DTYPES, Filtered, LossOptions, Sampled
from .shard import VocabShard

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def resolve_tensor_parallel_group(weight: Tensor, group: dist.ProcessGroup | None) -> TensorParallelGroup:
    """The group of a call: the one passed, or that of a DTensor weight's mesh.

    Raises:
        TypeError, ValueError: ``group`` is unusable, or isn't the mesh's.
    """
    if not isinstance(weight, DTensor):
        return resolve_group(group)
    if weight.device_mesh.ndim != 1:
        raise ValueError(
            f"linear_weight is a DTensor over a mesh of {weight.device_mesh.ndim} dimensions with placements "
            f"{weight.placements}; expected Shard(0) over one. If FSDP has sharded it as well, call the loss inside "
            f"the forward of the module that owns it, where FSDP has gathered it; else pass its local shard and group"
        )
    mesh_group = weight.device_mesh.get_group()
    if group is not None and dist.get_process_group_ranks(group) != dist.get_process_group_ranks(mesh_group):
        raise ValueError(
            f"group has ranks {dist.get_process_group_ranks(group)}, but linear_weight is a DTensor over ranks "
            f"{dist.get_process_group_ranks(mesh_group)}; leave group out or pass the mesh's"
        )
    return resolve_group(mesh_group)


def _local(name: str, value: Tensor | None, weight_is_dtensor: bool) -> Tensor | None:
    """The rank's rows of a weight, bias or ``main_grad`` that may be a DTensor."""
    if value is None or not isinstance(value, DTensor):
        return value
    if not weight_is_dtensor:
        raise TypeError(f"{name} is a DTensor but linear_weight is a plain tensor; pass {name}.to_local()")
    if value.device_mesh.ndim != 1 or value.placements != (Shard(0),):
        raise ValueError(f"{name} is a DTensor with placements {value.placements}; expected (Shard(0),)")
    return value.to_local()


def _autocast(value: Tensor | None, device_type: str) -> Tensor | None:
    if value is None or not value.is_floating_point() or not torch.is_autocast_enabled(device_type):
        return value
    return value.to(torch.get_autocast_dtype(device_type))


def _check_gathered(weight: Tensor) -> None:
    """Refuse a parameter of which this process holds only a placeholder or a flattened piece."""
    status = getattr(getattr(weight, "ds_status", None), "name", "")
    advice = (
        "Compute the loss inside the forward of the module that owns it (cce_tp.deepspeed.install and "
        "cce_tp.transformers.patch do so), or under deepspeed.zero.GatheredParameters around forward and backward"
    )
    if hasattr(weight, "ds_id") and (weight.numel() == 0 or status in ("NOT_AVAILABLE", "INFLIGHT")):
        raise ValueError(
            f"linear_weight has shape {tuple(weight.shape)}: DeepSpeed ZeRO-3 has partitioned it. {advice}"
        )
    if weight.ndim == 1:
        raise ValueError(
            f"linear_weight has shape {tuple(weight.shape)}, expected [V_local, D]: it looks like a parameter that "
            f"ZeRO-3 or FSDP has partitioned or flattened. {advice}"
        )


@dataclass(frozen=True)
class Arguments:
    """The tensors of one call, DTensors unwrapped and autocast applied.

    ``input`` is ``[..., D]`` and ``target`` ``[...]``; under sequence parallelism both have the sharded dimension
    first.
    """

    input: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    main_grad: Tensor | None
    group: TensorParallelGroup
    shard: VocabShard
    shard_is_given: bool
    sequence_dim: int
    options: LossOptions
    implementation: LocalImplementation

    @property
    def num_tokens(self) -> int:
        return self.target.numel()

    def agreement_key(self) -> tuple[object, ...]:
        """What is the same on every rank of a group, by contract.

        The rank's own bounds are no part of it: two splits of one vocabulary may give some ranks the same rows and
        others not, and then only those others would wait for an exchange.
        """
        return (self.shard.vocab_size, *self._kind().items(), *self.options.structure())

    def record(self) -> CallRecord:
        common = {"the number of tokens": self.num_tokens, **self._kind(), **self.options.agreed()}
        return CallRecord(
            common,
            self.shard,
            target=None if self.options.validate else self.target,
            class_weight=self.class_weight,
            weight=None if self.shard_is_given else self.weight,
        )

    def _kind(self) -> dict[str, Any]:
        return {
            "the hidden size": self.weight.shape[1],
            "the dtype": str(self.input.dtype),
            "whether input requires grad": self.input.requires_grad and torch.is_grad_enabled(),
            "whether weight (class weights) is given": self.class_weight is not None,
            "whether linear_bias is given": self.bias is not None,
        }

    def flattened(self) -> tuple[Tensor, Tensor]:
        """Tokens ``[N, D]`` (``[N/T, D]`` under sequence parallelism) and labels ``[N]`` int64."""
        tokens = self.input.shape[:-1].numel()
        return self.input.reshape(tokens, self.input.shape[-1]), self.target.reshape(-1)

    def unflatten(self, per_token: Tensor) -> Tensor:
        """``[N]`` back to the shape and order of the caller's target."""
        shaped = per_token.reshape(self.target.shape)
        return shaped.movedim(0, self.sequence_dim) if self.options.sequence_parallel else shaped


def gather_arguments(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    main_grad: Tensor | None,
    group: TensorParallelGroup,
    shard: VocabShard | None,
    options: LossOptions,
) -> Arguments:
    """Unwrap and check.

    Raises:
        TypeError: an argument is no tensor or of an unsupported dtype.
        ValueError: shapes, devices, shard or labels don't fit.
    """
    for name, value in (("input", input), ("linear_weight", weight), ("target", target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
    for name, value in (("input", input), ("target", target)):
        if isinstance(value, DTensor):
            raise TypeError(f"{name} is a DTensor with placements {value.placements}; pass {name}.to_local()")
    if shard is not None and not isinstance(shard, VocabShard):
        raise TypeError(f"shard={shard!r} must be a cce_tp.VocabShard or None")
    for name, optional in (("linear_bias", bias), ("weight", class_weight), ("main_grad", main_grad)):
        if optional is not None and not isinstance(optional, Tensor):
            raise TypeError(f"{name} must be a tensor or None, not {type(optional).__name__}")
    _check_storage(input, target)
    is_dtensor = isinstance(weight, DTensor)
    if shard is None and is_dtensor:
        shard = VocabShard.chunk(max(1, weight.shape[0]), group.rank, group.size)
    shard_is_given = shard is not None
    local_weight = _local("linear_weight", weight, is_dtensor)
    assert local_weight is not None
    _check_gathered(local_weight)
    if local_weight.ndim != 2:
        raise ValueError(f"linear_weight has shape {tuple(local_weight.shape)}, expected [V_local, D]")
    shard = _default_shard(local_weight, group) if shard is None else shard
    _check_rows(shard, local_weight)

    device_type = input.device.type
    input = _require(_autocast(input, device_type))
    local_weight = _require(_autocast(local_weight, device_type))
    bias = _local("linear_bias", bias, is_dtensor)
    main_grad = _local("main_grad", main_grad, is_dtensor)
    _check_dtypes(input, local_weight, target)
    _check_devices(
        input, {"linear_weight": local_weight, "target": target, "linear_bias": bias, "weight": class_weight}
    )
    _check_vectors(bias, class_weight, local_weight.shape[0], shard.vocab_size)
    _check_main_grad(main_grad, local_weight)
    sequence_dim = _check_shapes(input, local_weight, target, group, options)
    if options.sequence_parallel:
        input, target = input.movedim(sequence_dim, 0), target.movedim(sequence_dim, 0)
    target = target.long()
    if options.validate and options.unknown_labels == "nan":
        _check_labels(target, shard.vocab_size, options, sequence_dim)
    _check_order(options, local_weight)
    implementation = choose(options.implementation, input.device, input.dtype)
    _check_workspace(options, implementation, target.numel(), local_weight, shard)
    return Arguments(
        input,
        local_weight,
        target,
        bias,
        class_weight,
        main_grad,
        group,
        shard,
        shard_is_given,
        sequence_dim,
        options,
        implementation,
    )


def _check_storage(input: Tensor, target: Tensor) -> None:
    for name, value in (("input", input), ("target", target)):
        if value.layout != torch.strided:
            raise TypeError(f"{name} has layout {value.layout}, expected a dense tensor (torch.strided)")
    if input.is_meta:
        raise TypeError("input is on the meta device and holds no values")


def _require(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _default_shard(weight: Tensor, group: TensorParallelGroup) -> VocabShard:
    rows = weight.shape[0]
    if rows == 0:
        raise ValueError(
            "linear_weight has no rows: say which part of the vocabulary this rank holds with "
            "shard=cce_tp.VocabShard(...)"
        )
    return VocabShard(start=group.rank * rows, stop=(group.rank + 1) * rows, vocab_size=group.size * rows)


def _check_rows(shard: VocabShard, weight: Tensor) -> None:
    if weight.shape[0] != shard.num_rows:
        raise ValueError(
            f"linear_weight has {weight.shape[0]} rows, but {shard} holds {shard.num_rows}: pass this rank's rows of "
            f"the classifier, padding included"
        )


def _check_dtypes(input: Tensor, weight: Tensor, target: Tensor) -> None:
    if input.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"input has dtype {input.dtype}, expected one of {SUPPORTED_DTYPES}")
    if weight.dtype != input.dtype:
        raise TypeError(
            f"linear_weight has dtype {weight.dtype} but input has {input.dtype}; cast one, or use torch.autocast"
        )
    if target.dtype not in _INTEGERS:
        raise TypeError(f"target has dtype {target.dtype}, expected vocabulary ids of one of {_INTEGERS}")


def _check_devices(input: Tensor, others: dict[str, Tensor | None]) -> None:
    for name, value in others.items():
        if value is not None and value.device != input.device:
            raise ValueError(f"{name} is on {value.device} but input is on {input.device}; move it there")


def _check_vectors(bias: Tensor | None, class_weight: Tensor | None, rows: int, vocab_size: int) -> None:
    for name, value, length in (("linear_bias", bias, rows), ("weight", class_weight, vocab_size)):
        if value is None:
            continue
        if not value.is_floating_point():
            raise TypeError(f"{name} has dtype {value.dtype}, expected a floating-point dtype")
        if tuple(value.shape) != (length,):
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected ({length},)")
    if class_weight is not None and class_weight.requires_grad:
        raise ValueError("weight (class weights) requires grad, but is not differentiable; pass weight.detach()")


def _check_main_grad(main_grad: Tensor | None, weight: Tensor) -> None:
    if main_grad is None:
        return
    if main_grad.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"main_grad has dtype {main_grad.dtype}, expected one of {SUPPORTED_DTYPES}")
    if main_grad.shape != weight.shape:
        raise ValueError(f"main_grad has shape {tuple(main_grad.shape)}, expected {tuple(weight.shape)}")
    if main_grad.device != weight.device:
        raise ValueError(f"main_grad is on {main_grad.device} but linear_weight is on {weight.device}")
    if main_grad.ndim == 2 and main_grad.shape[1] > 1 and main_grad.stride(1) != 1:
        raise ValueError(f"main_grad has strides {main_grad.stride()}, expected a contiguous last dimension")
    if torch.is_grad_enabled() and not weight.requires_grad:
        raise ValueError("main_grad was given but linear_weight does not require grad; leave main_grad out")


def _check_shapes(
    input: Tensor, weight: Tensor, target: Tensor, group: TensorParallelGroup, options: LossOptions
) -> int:
    """Check input against weight and target; return ``sequence_dim`` counted from the front."""
    if input.ndim < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input has shape {tuple(input.shape)}, expected [..., {weight.shape[1]}] to match linear_weight "
            f"{tuple(weight.shape)}"
        )
    expected = list(input.shape[:-1])
    dim = options.sequence_dim
    if options.sequence_parallel:
        dim = dim + input.ndim if dim < 0 else dim
        if not 0 <= dim < len(expected):
            raise ValueError(
                f"sequence_dim={options.sequence_dim} must be one of the token dimensions of input {tuple(input.shape)}"
            )
        expected[dim] *= group.size
    if list(target.shape) != expected:
        hint = ""
        if options.sequence_parallel:
            hint = (
                f": under sequence_parallel input is this rank's 1/{group.size} of dimension {dim}, target is whole, "
                f"and that dimension must be divisible by {group.size}"
            )
        raise ValueError(
            f"target has shape {tuple(target.shape)}, expected {tuple(expected)} for input {tuple(input.shape)}{hint}"
        )
    return dim


def _check_labels(target: Tensor, vocab_size: int, options: LossOptions, sequence_dim: int) -> None:
    wrong = ((target < 0) | (target >= vocab_size)) & (target != options.ignored)
    if options.sequence_parallel:
        wrong, target = wrong.movedim(0, sequence_dim), target.movedim(0, sequence_dim)
    if bool(wrong.any()):
        position = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"target holds {int(target[position])} at position {position}: expected an id in [0, V={vocab_size}) "
            f"or ignore_index={options.ignored}"
        )


def _check_workspace(
    options: LossOptions, implementation: LocalImplementation, num_tokens: int, weight: Tensor, shard: VocabShard
) -> None:
    if options.workspace is None:
        return
    rows, hidden_size = weight.shape
    mode = options.mode
    if isinstance(mode, Sampled):
        size = SamplingSize(mode.reference_rows, mode.most_entries, max(shard.vocab_size, shard.start + rows))
        bound = implementation.least_sampled_workspace(num_tokens, hidden_size, rows, weight.dtype, size)
        if bound is None:
            raise ValueError(
                f"workspace={options.workspace} can't bound backward='sampled' in the {implementation.name} "
                f"implementation; leave workspace out"
            )
        least = bound
    else:
        least = implementation.least_workspace(num_tokens, hidden_size, rows, weight.dtype)
    if options.workspace < least:
        raise ValueError(
            f"workspace={options.workspace} bytes is too small: the {implementation.name} implementation needs at "
            f"least {least} for {num_tokens} tokens of size {hidden_size} and {rows} classifier rows of {weight.dtype}"
        )


def _check_order(options: LossOptions, weight: Tensor) -> None:
    """A permutation of the rank's rows; on a GPU its values are looked at only under ``validate``."""
    if not isinstance(options.mode, Filtered) or isinstance(options.mode.order, str):
        return
    order, rows = options.mode.order, weight.shape[0]
    if order.shape[0] != rows:
        raise ValueError(
            f"Filtered: order has {order.shape[0]} elements, expected a permutation of this rank's {rows} rows"
        )
    if order.device != weight.device:
        raise ValueError(f"Filtered: order is on {order.device} but linear_weight is on {weight.device}; move it there")
    if options.validate or order.device.type == "cpu":
        inside = bool(((order >= 0) & (order < rows)).all())
        if not (inside and bool(is_permutation(order))):
            raise ValueError(f"Filtered: order is no permutation of this rank's rows 0 to {rows - 1}")
