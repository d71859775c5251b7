"""GroupedTensor, a weight that is kept quantized.

E groups, K in_features, N out_features.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from grouped_linear import ops
from grouped_linear.meta_kernels.rules import ACTIVATIONS, BLOCK, E4M3, Rules, ceil_div
from grouped_linear.quantized import block_math as blocks
from grouped_linear.recipes import Float8BlockScaling, QuantizedWeight, Recipe

# How the class is shown to __tensor_unflatten__: dtype, recipe, stochastic_rounding.
Kind = tuple[torch.dtype, Float8BlockScaling, bool]


class GroupedTensor(Tensor):
    """Experts' weights in e4m3 with a scale for each 128x128 block: ``w ~ q * scale``.

    It is a tensor of a high-precision dtype to whoever uses it, and one ``nn.Parameter`` to
    modules and optimizers, whose numbers are those that `q` and `scale` hold:

    - Experts, ``t[e]``, slices of neighbouring experts, ``unbind``, iteration and ``view`` share
      memory with the tensor. What is written there is written to it. Any other view is a
      high-precision copy; ``t[...] = value`` writes through in any case, and quantizes the blocks
      that it meets again.
    - ``detach``, ``clone``, ``to``, ``copy_``, ``stack`` and ``cat`` of experts move bytes: nothing
      is lost.
    - An in-place operation computes in float32 and quantizes the result. That is how an optimizer
      steps it, whose state is in high precision: ``zeros_like`` and ``empty_like`` are plain.
    - Everything else sees :meth:`dequantize`.

    Make one with :meth:`quantize` or :meth:`from_parts`.

    Attributes:
        q: [E, N, K] e4m3, or [N, K] in one expert.
        scale: [E, ceil(N / 128), ceil(K / 128)] float32, or without E.
        q_t: [E, K, N], the bytes of q transposed, which dgrad reads; None where they were not asked
            for.
        recipe: how it is quantized when it is written.
        stochastic_rounding: whether an in-place operation rounds up or down by chance, so that on
            average nothing is lost; ``copy_`` rounds to nearest.

    >>> w = GroupedTensor.quantize(torch.ones(2, 32, 16))
    >>> w
    GroupedTensor(shape=[2, 32, 16], dtype=torch.float32, device='cpu')
    >>> w[1] *= 3
    >>> w.sum(dim=(1, 2))
    tensor([ 512., 1536.])
    """

    q: Tensor
    scale: Tensor
    q_t: Tensor | None
    recipe: Float8BlockScaling
    stochastic_rounding: bool

    # Below autograd only: torch's own functions are not intercepted.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type["GroupedTensor"],
        q: Tensor,
        scale: Tensor,
        q_t: Tensor | None,
        kind: Kind,
        size: Sequence[int] | None = None,
    ) -> "GroupedTensor":
        """A tensor of `size`, which holds as many elements as q."""
        size = q.shape if size is None else size
        offset, stride = q.storage_offset(), contiguous_stride(size)
        t: GroupedTensor = Tensor._make_wrapper_subclass(
            cls, size, strides=stride, storage_offset=offset, dtype=kind[0], device=q.device
        )
        # Who reads memory beneath torch's operations, as a collective of lists does, is told so.
        torch._C._set_throw_on_mutable_data_ptr(t)
        return t

    def __init__(
        self,
        q: Tensor,
        scale: Tensor,
        q_t: Tensor | None,
        kind: Kind,
        size: Sequence[int] | None = None,
    ) -> None:
        self.q, self.scale, self.q_t = q, scale, q_t
        _, self.recipe, self.stochastic_rounding = kind

    # --- making one ------------------------------------------------------------------------------

    @classmethod
    def quantize(
        cls,
        w: Tensor,
        recipe: Recipe | None = None,
        *,
        columnwise: bool = True,
        stochastic_rounding: bool = False,
    ) -> "GroupedTensor":
        """Quantize a weight, as :func:`grouped_linear.ops.quantize_weight` does.

        Args:
            w: [E, N, K] bfloat16, float16 or float32, N and K multiples of 16.
            recipe: how; ``Float8BlockScaling()`` by default.
            columnwise: keep q_t, which dgrad reads, as well.
            stochastic_rounding: of in-place operations later; see the class.

        Raises:
            RuntimeError: for a wrong shape or dtype.
            ValueError: for another recipe.

        >>> GroupedTensor.quantize(torch.full((2, 32, 16), 7.0)).scale.flatten()
        tensor([0.0156, 0.0156])
        """
        recipe = _check_recipe(recipe)
        q, scale, q_t = ops.quantize_weight(
            w.detach(),
            amax_epsilon=recipe.epsilon,
            power_of_two_scales=recipe.power_of_two_scales,
            columnwise=columnwise,
        )
        return cls(q, scale, q_t, (w.dtype, recipe, stochastic_rounding))

    @classmethod
    def from_parts(
        cls,
        q: Tensor,
        scale: Tensor,
        dtype: torch.dtype = torch.bfloat16,
        recipe: Float8BlockScaling | None = None,
        *,
        columnwise: bool = True,
        stochastic_rounding: bool = False,
    ) -> "GroupedTensor":
        """Take a weight that was quantized elsewhere, as it is.

        Args:
            q: [E, N, K] float8_e4m3fn, contiguous; or [N, K], for one expert. Not copied.
            scale: [E, ceil(N / 128), ceil(K / 128)] float32, contiguous; or without E. Not copied.
            dtype: that it stands for, bfloat16, float16 or float32.
            recipe: how it is quantized when it is written; ``Float8BlockScaling()`` by default.
            columnwise: keep q transposed, which dgrad reads, as well.
            stochastic_rounding: of in-place operations later; see the class.

        Raises:
            RuntimeError: for a wrong shape, dtype or device.
            ValueError: for another recipe.

        >>> q, scale = torch.ones(2, 32, 16).to(torch.float8_e4m3fn), torch.full((2, 1, 1), 0.5)
        >>> GroupedTensor.from_parts(q, scale, torch.float32)[0, 0, 0]
        tensor(0.5000)
        """
        recipe = _check_recipe(recipe)
        rules = Rules("GroupedTensor")
        rules.check(q.dim() in (2, 3), lambda: f"q must be 2-D or 3-D, got {q.dim()}-D")
        rules.dtype("q", q.dtype, (E4M3,))
        *lead, N, K = q.shape
        rules.features("N", N)
        rules.features("K", K)
        rules.dtype("scale", scale.dtype, (torch.float32,))
        rules.device("scale", scale, "q", q)
        shape = [*lead, ceil_div(N, BLOCK), ceil_div(K, BLOCK)]
        rules.check(
            list(scale.shape) == shape, lambda: f"scale must be {shape}, got {list(scale.shape)}"
        )
        rules.contiguous("q", q)
        rules.contiguous("scale", scale)
        rules.dtype("dtype", dtype, ACTIVATIONS)
        q_t = blocks.transposed(q) if columnwise else None
        return cls(q.detach(), scale.detach(), q_t, (dtype, recipe, stochastic_rounding))

    # --- reading it ------------------------------------------------------------------------------

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """``q * scale`` in a plain tensor; differentiable.

        Args:
            dtype: of the result, bfloat16, float16 or float32; the tensor's own by default.

        >>> GroupedTensor.quantize(torch.ones(2, 32, 16)).dequantize().unique()
        tensor([1.])
        """
        dtype = self.dtype if dtype is None else dtype
        Rules("GroupedTensor").dtype("dtype", dtype, ACTIVATIONS)
        w: Tensor = _Dequantize.apply(self, dtype)
        return w

    def kept(self, columnwise: bool) -> QuantizedWeight:
        """As a layer's products read it: for fprop, and where asked for dgrad."""
        self.check_whole()
        if columnwise and self.q_t is None:
            return QuantizedWeight(self.q, self.scale, blocks.transposed(self.q))
        return QuantizedWeight(self.q, self.scale, self.q_t)

    def check_whole(self) -> None:
        """Raise RuntimeError for a view of another shape, which has not the blocks of that."""
        if self.shape != self.q.shape:
            raise RuntimeError(
                f"GroupedTensor: blocks are read in the shape {list(self.q.shape)} that was "
                f"quantized, got a view as {list(self.shape)}"
            )

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"GroupedTensor(shape={list(self.shape)}, dtype={self.dtype}, device='{self.device}')"
        )

    def __setitem__(self, index: Any, value: Any) -> None:
        value = torch.as_tensor(value, device=self.device)
        part = self[index]
        if isinstance(part, GroupedTensor):
            part.copy_(value)
        else:  # a copy: put it into a whole one
            w, written = self.detach().dequantize(), self.new_zeros(self.shape, dtype=torch.bool)
            w[index] = value.to(w.dtype)
            written[index] = True
            if part.numel():
                self.copy_(self._with_blocks(w, written))

    @torch.no_grad()
    def _with_blocks(self, w: Tensor, written: Tensor) -> "GroupedTensor":
        """The blocks of w where any number was written; all others keep their bytes and scale."""
        *lead, N, K = self.q.shape
        shape = (math.prod(lead), N, K)
        q, scale, _ = ops.quantize_weight(
            w.reshape(shape),
            amax_epsilon=self.recipe.epsilon,
            power_of_two_scales=self.recipe.power_of_two_scales,
            columnwise=False,
        )
        of_blocks = F.max_pool2d(written.reshape(shape).float(), BLOCK, ceil_mode=True)
        of_numbers = blocks.multiply_(torch.ones(shape, device=w.device), of_blocks).bool()
        before = self.q.view(torch.uint8).reshape(shape)
        q = torch.where(of_numbers, q.view(torch.uint8), before).view(E4M3)
        scale = torch.where(of_blocks.bool(), scale, self.scale.reshape(scale.shape))
        parts = q.view(self.q.shape), scale.view(self.scale.shape)
        return GroupedTensor(*parts, None, self._kind, self.shape)

    @property
    def data(self) -> Tensor:
        """The tensor without its history; it cannot be put into another's place.

        Raises:
            RuntimeError: where it is set. Bytes and scales would stay those of before.
        """
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(
            "GroupedTensor: data cannot be replaced by another tensor, of its dtype or another: "
            f"write to it with copy_, got {type(value).__name__} of {value.dtype}"
        )

    def data_ptr(self) -> int:
        """0: its memory is that of its parts."""
        return 0

    def share_memory_(self) -> "GroupedTensor":
        """Raise RuntimeError: another process would not see q_t change with q."""
        raise RuntimeError(
            "GroupedTensor: memory is not shared among processes, share the tensor's q and scale"
        )

    # --- travelling ------------------------------------------------------------------------------

    @property
    def _kind(self) -> Kind:
        return self.dtype, self.recipe, self.stochastic_rounding

    def __tensor_flatten__(self) -> tuple[list[str], Kind]:
        names = ["q", "scale"] if self.q_t is None else ["q", "scale", "q_t"]
        return names, self._kind

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], kind: Kind, size: Sequence[int], stride: Sequence[int]
    ) -> "GroupedTensor":
        return GroupedTensor(parts["q"], parts["scale"], parts.get("q_t"), kind, size)

    def _stable_hash_for_caching(self) -> str:
        """What a compiled graph depends on, for torch's cache of graphs."""
        names, kind = self.__tensor_flatten__()
        parts = [getattr(self, name) for name in names]
        layouts = [(tuple(part.shape), part.stride(), part.storage_offset()) for part in parts]
        facts = (names, kind, layouts, tuple(self.shape), self.device, self.requires_grad)
        return hashlib.blake2b(repr(facts).encode()).hexdigest()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # q_t is made again: a file need not hold everything twice. q goes as bytes, because plain
        # pickle fails on float8 (torch 2.13), and options as plain values.
        options = (*astuple(self.recipe), self.stochastic_rounding)
        arguments = (
            self.q.view(torch.uint8),
            self.scale,
            self.q_t is not None,
            self.dtype,
            options,
        )
        others = {name: value for name, value in vars(self).items() if name not in _ATTRIBUTES}
        return _rebuild, (*arguments, tuple(self.shape), self.requires_grad, others)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from grouped_linear.quantized.dispatch import dispatch  # which needs this class

        return dispatch(func, args, kwargs or {})

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What FSDP2 gathers of a shard: one byte an element, and the scales.

        Where there is one process it gathers nothing and hands on one tensor alone (torch 2.13).

        Raises:
            ValueError: if experts do not divide evenly among the processes.
        """
        if outer_size[0] % mesh.size():
            raise ValueError(
                "GroupedTensor: FSDP needs as many experts on every process, "
                f"got {outer_size[0]} for {mesh.size()} processes"
            )
        return ((self.q,), self.scale) if mesh.size() == 1 else ((self.q, self.scale), None)

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        own_scale: Tensor | None,
        param_dtype: torch.dtype,
        *,
        out: "GroupedTensor | None" = None,
    ) -> tuple["GroupedTensor", tuple[Tensor]] | None:
        """The whole weight from what FSDP2 gathered; q_t, which a shard does without, is made."""
        q, scale = gathered if own_scale is None else (*gathered, own_scale)
        if out is None:
            q_t = blocks.transposed(q)
            kind = (param_dtype, self.recipe, self.stochastic_rounding)
            return GroupedTensor(q, scale, q_t, kind), (q_t,)
        assert out.q_t is not None
        # As FSDP does with what it gathers: the backward reads it after it was gathered again.
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(out.q_t):
            out.q_t.copy_(q.transpose(1, 2))
        return None


_ATTRIBUTES = ("q", "scale", "q_t", "recipe", "stochastic_rounding")


def _rebuild(
    q_bytes: Tensor,
    scale: Tensor,
    columnwise: bool,
    dtype: torch.dtype,
    options: tuple[Any, ...],
    size: tuple[int, ...],
    requires_grad: bool,
    others: dict[str, Any],
) -> GroupedTensor:
    """What was pickled."""
    q = q_bytes.view(E4M3)
    *of_recipe, stochastic_rounding = options
    kind = (dtype, Float8BlockScaling(*of_recipe), stochastic_rounding)
    t = GroupedTensor(q, scale, blocks.transposed(q) if columnwise else None, kind, size)
    vars(t).update(others)  # that it is a parameter is one of them
    t.requires_grad_(requires_grad)
    return t


torch.serialization.add_safe_globals([_rebuild])


def contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    """Of a dense tensor."""
    stride = [1]
    for n in reversed(size[1:]):
        stride.append(stride[-1] * n)
    return tuple(reversed(stride))


def _check_recipe(recipe: Recipe | None) -> Float8BlockScaling:
    if recipe is None:
        return Float8BlockScaling()
    if not isinstance(recipe, Float8BlockScaling):
        raise ValueError(f"GroupedTensor: recipe must be Float8BlockScaling, got {recipe!r}")
    return recipe


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: GroupedTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = t.dtype
        return blocks.dequantize(t.q, t.scale, dtype).view(t.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None
