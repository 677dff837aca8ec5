"""A tensor-like object that becomes a real tensor when something asks for its values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor


class DeferredTensor:
    """Stands in for a tensor. Whatever a subclass doesn't define is done on the tensor of ``materialise``.

    Attributes:
        lazy_functions: torch functions that a method of this class answers; the method gets the further arguments.
    """

    lazy_functions: ClassVar[dict[Callable[..., Any], str]] = {}

    def materialise(self, reason: str) -> Tensor:
        """The real tensor; ``reason`` says who asks."""
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in cls.lazy_functions:
            subject = args[0] if args else kwargs.get("input")
            if isinstance(subject, cls):
                args = args[1:] if args else args
                others = {name: value for name, value in kwargs.items() if name != "input"}
                return getattr(subject, cls.lazy_functions[func])(*args, **others)
        reason = f"torch function {getattr(func, '__name__', func)}"
        real = functools.partial(materialised, reason=reason)
        return func(*map(real, args), **{name: real(value) for name, value in kwargs.items()})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialise("pickling").detach().__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.materialise(f"attribute {name!r}"), name)


def materialised(value: Any, reason: str) -> Any:
    """``value`` with every deferred tensor in it, or in its lists and tuples, made real."""
    if isinstance(value, DeferredTensor):
        return value.materialise(reason)
    if isinstance(value, list | tuple):
        return type(value)(materialised(item, reason) for item in value)
    return value


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: DeferredTensor, *args: Any) -> Any:
        return getattr(self.materialise(f"operator {name}"), name)(*(materialised(arg, name) for arg in args))

    return operate


# Python looks these up on the class, past __getattr__. Without __imul__, `x *= 2` is `x = x * 2` and stays deferred.
for _name in (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__neg__", "__pow__", "__matmul__", "__rmatmul__", "__rtruediv__"),
    *("__mul__", "__rmul__", "__truediv__", "__getitem__", "__setitem__", "__len__", "__iter__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__float__", "__iadd__", "__isub__"),
):
    setattr(DeferredTensor, _name, _operator(_name))
