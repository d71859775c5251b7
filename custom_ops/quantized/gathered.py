# SPDX-License-Identifier: Apache-2.0
"""The whole weight that FSDP2 gathered from shards with their masters: FP8 numbers alone.

And the context in which tensors that handle torch's operations below autograd make views.

E experts, K in_features, N out_features.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from grouped_linear.recipes import Recipe
from grouped_linear.recipes.quantize_weight import QuantizedWeight

aten = torch.ops.aten


@contextmanager
def views_of(t: Tensor) -> Iterator[None]:
    """The context in which views of t's parts are made, with the parts' own version counters.

    Handlers run below autograd, where a view would get a counter of its own. In inference mode
    nothing is counted, and a view of a tensor from outside of it must be made outside too.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(t.is_inference()):
            yield
    else:
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            yield


class GatheredWeight(Tensor):
    """Experts' weights in FP8, which layers read and nobody writes.

    FSDP2 makes it a parameter of its module between an all-gather and the next reshard. A backward
    transposes q for itself. Any other operation raises RuntimeError: the high-precision numbers
    are in the shards.
    """

    q: Tensor  # [E, N, K] e4m3, or codes of MXFP4
    scale: Tensor  # [E, ceil(N / 128), ceil(K / 128)], [E] or MXFP4's, as the recipe has it
    recipe: Recipe  # by which the shards are quantized

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type["GatheredWeight"], q: Tensor, scale: Tensor, recipe: Recipe, dtype: torch.dtype
    ) -> "GatheredWeight":
        """Wrap what was gathered; ``dtype`` is that of the numbers it stands for."""
        like, format = q, recipe.weight
        if format.stored_as == "mxfp4":
            E, N, K = *q.shape[:2], 2 * q.size(2)
            like = torch.empty((E, N, K) if format.qat_dim == -1 else (E, K, N), device="meta")
        t: GatheredWeight = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=dtype, device=q.device
        )
        t.q, t.scale, t.recipe = q, scale, recipe
        return t

    @property
    def kind(self) -> tuple[str | None, str | None]:
        """What GEMMs must know of it: constants, see :attr:`Format.compared`."""
        return self.recipe.weight.scaling, self.recipe.weight.qat

    def quantized_weight(self) -> QuantizedWeight:
        """The numbers that a layer's GEMMs read."""
        return QuantizedWeight(self.q, self.scale, None)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"GatheredWeight(shape={list(self.shape)}, dtype={self.dtype}, device='{self.device}')"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Recipe, torch.dtype]]:
        return ["q", "scale"], (self.recipe, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor],
        metadata: tuple[Recipe, torch.dtype],
        size: Sequence[int],
        stride: Sequence[int],
    ) -> "GatheredWeight":
        return GatheredWeight(parts["q"], parts["scale"], *metadata)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        t = args[0]
        layout = tuple(t.shape), t.stride(), t.storage_offset()
        alike = func in (aten.detach.default, aten.alias.default)
        if func is aten.view.default:
            alike = tuple(args[1]) == t.shape
        elif func is aten.as_strided.default:
            size, stride, *offset = args[1:]
            alike = (tuple(size), tuple(stride), *(offset or layout[2:])) == layout
        if not alike:
            raise RuntimeError(
                f"GatheredWeight: FSDP2 gathers FP8 numbers alone, which layers read, got {func}: "
                "read and write the shards, as after FSDPModule.reshard()"
            )
        with views_of(t):
            q, scale = aten.alias(t.q), aten.alias(t.scale)
        out = GatheredWeight(q, scale, t.recipe, t.dtype)
        return return_and_correct_aliasing(func, args, kwargs or {}, out)
