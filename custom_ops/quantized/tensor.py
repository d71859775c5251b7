"""GroupedTensor, a weight that is kept quantized.

dispatch.py imports this module and registers what torch's operations do to a GroupedTensor.

E experts, K in_features, N out_features.
"""

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from grouped_linear import ops
from grouped_linear.meta_kernels.rules import ACTIVATIONS, BLOCK, E4M3, Rules, ceil_div, dtype_name
from grouped_linear.quantized import block_math
from grouped_linear.quantized.pickle_version import (
    check_pickle_version,
    recipe_from_pickle,
    recipe_to_pickle,
)
from grouped_linear.recipes import Float8BlockScaling, QuantizedWeight, Recipe

PICKLE_VERSION = 2  # 1 had no subclass of Float8BlockScaling


class Metadata(NamedTuple):
    """All of a GroupedTensor but its parts and its shape."""

    dtype: torch.dtype
    recipe: Float8BlockScaling
    stochastic_rounding: bool


# Bit 55: user space on x86-64 and on Arm, and GPUs, have their addresses below.
NO_ADDRESS = 1 << 55

#: ``handler(overload, args, kwargs)`` is called in place of an overload that has a GroupedTensor
#: among its arguments.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

#: By overload. The entry of None handles every overload without an entry of its own.
HANDLERS: dict[Any, Handler] = {}


class GroupedTensor(Tensor):
    """Experts' weights in e4m3 with a scale for each 128x128 block: ``w ~ q * scale``.

    It behaves like a tensor of a high-precision dtype that holds ``q * scale``, and can be an
    ``nn.Parameter`` of modules and optimizers:

    - One expert ``t[e]``, slices of neighbouring experts, ``unbind``, iteration and ``view`` are
      views: they share memory with the tensor. Any other view is a high-precision copy. Assignment
      ``t[...] = value`` writes to the tensor in either case, to the blocks that it meets.
    - ``detach``, ``clone``, ``to``, ``copy_``, and ``stack`` and ``cat`` of experts keep the
      quantized bytes, so they lose nothing.
    - An in-place operation, as an optimizer's, computes in float32 and quantizes the result.
      ``zeros_like`` and ``empty_like``, for its state, give plain tensors.
    - Any other operation is given the result of :meth:`dequantize`.

    Make one with :meth:`quantize` or :meth:`from_parts`.

    Attributes:
        q: [E, N, K] e4m3, or [N, K] in one expert.
        scale: [E, ceil(N / 128), ceil(K / 128)] float32, or without E.
        q_t: [E, K, N], q transposed, which dgrad reads; None if columnwise data was not requested.
        recipe: how it is quantized when it is written.
        stochastic_rounding: whether what is written rounds stochastically, so that the expected
            value is exact and small steps add up. ``fill_``, ``zero_``, ``uniform_``, ``normal_``,
            ``load_state_dict`` and ``t.copy_(GroupedTensor.quantize(w, t.recipe))`` round to
            nearest, and numbers of the format stay exact.

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
    is_part: bool = False
    """Whether ``split`` or ``chunk`` returned it; ``empty_like`` is then quantized too."""

    _handlers: ClassVar[dict[Any, Handler]] = HANDLERS
    _memory: ClassVar[tuple[str, ...]] = ("q", "scale", "q_t")
    _own_attributes: ClassVar[tuple[str, ...]] = (
        *_memory,
        "recipe",
        "stochastic_rounding",
        "is_part",
    )

    # Operations are intercepted below autograd, in __torch_dispatch__, and only there.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type["GroupedTensor"],
        q: Tensor,
        scale: Tensor | None = None,
        q_t: Tensor | None = None,
        metadata: Metadata | None = None,
        size: Sequence[int] | None = None,
        *,
        requires_grad: bool = False,
    ) -> "GroupedTensor":
        """A tensor of `size`; or a parameter of one tensor, as accelerate moves it to a device."""
        if scale is None or metadata is None:
            return _as_parameter(q, requires_grad)
        size = q.shape if size is None else size
        offset, stride = q.storage_offset(), block_math.contiguous_stride(size)
        t: GroupedTensor = Tensor._make_wrapper_subclass(
            cls, size, strides=stride, storage_offset=offset, dtype=metadata.dtype, device=q.device
        )
        # Code that reads memory directly, as collectives of lists do, then raises.
        torch._C._set_throw_on_mutable_data_ptr(t)
        t.q, t.scale, t.q_t = q, scale, q_t
        _, t.recipe, t.stochastic_rounding = metadata
        return t

    # --- construction ----------------------------------------------------------------------------

    @classmethod
    def quantize(
        cls,
        w: Tensor,
        recipe: Recipe | None = None,
        *,
        columnwise: bool = True,
        stochastic_rounding: bool = True,
    ) -> "GroupedTensor":
        """Quantize a weight with :func:`grouped_linear.ops.quantize_weight`.

        Args:
            w: [E, N, K] bfloat16, float16 or float32, N and K multiples of 16.
            recipe: how; ``Float8BlockScaling()`` by default.
            columnwise: keep q_t too, which dgrad reads.
            stochastic_rounding: for writes later; see the class.

        Raises:
            RuntimeError: for a wrong shape or dtype.
            ValueError: for another recipe.

        >>> GroupedTensor.quantize(torch.full((2, 32, 16), 7.0)).scale.flatten()
        tensor([0.0156, 0.0156])
        """
        recipe = _check_recipe(recipe)
        options = recipe.weight.scale_options
        q, scale, q_t = ops.quantize_weight(w.detach(), columnwise=columnwise, **options)
        assert q is not None
        return cls(q, scale, q_t, Metadata(w.dtype, recipe, stochastic_rounding))

    @classmethod
    def from_parts(
        cls,
        q: Tensor,
        scale: Tensor,
        dtype: torch.dtype = torch.bfloat16,
        recipe: Float8BlockScaling | None = None,
        *,
        columnwise: bool = True,
        stochastic_rounding: bool = True,
    ) -> "GroupedTensor":
        """Wrap a weight that was quantized elsewhere.

        Args:
            q: [E, N, K] float8_e4m3fn, contiguous; or [N, K], for one expert. Not copied.
            scale: [E, ceil(N / 128), ceil(K / 128)] float32, contiguous; or without E. Not copied.
            dtype: the tensor's dtype, bfloat16, float16 or float32.
            recipe, columnwise, stochastic_rounding: as :meth:`quantize` has them.

        Raises:
            RuntimeError: for a wrong shape, dtype or device.
            ValueError: for another recipe.

        >>> q, scale = torch.ones(2, 32, 16).to(torch.float8_e4m3fn), torch.full((2, 1, 1), 0.5)
        >>> GroupedTensor.from_parts(q, scale, torch.float32)[0, 0, 0]
        tensor(0.5000)
        """
        recipe = _check_recipe(recipe)
        rules = Rules("GroupedTensor", q=q, scale=scale, dtype=dtype)
        rules.check(q.dim() in (2, 3), lambda: f"q must be 2-D or 3-D, got {q.dim()}-D")
        rules.dtype("q", E4M3)
        *lead, N, K = q.shape
        rules.features("N", N)
        rules.features("K", K)
        rules.dtype("scale", torch.float32)
        rules.device("scale", "q")
        shape = [*lead, ceil_div(N, BLOCK), ceil_div(K, BLOCK)]
        rules.check(
            list(scale.shape) == shape, lambda: f"scale must be {shape}, got {list(scale.shape)}"
        )
        rules.contiguous("q")
        rules.contiguous("scale")
        rules.dtype("dtype", *ACTIVATIONS)
        q_t = block_math.transposed(q) if columnwise else None
        metadata = Metadata(dtype, recipe, stochastic_rounding)
        return cls(q.detach(), scale.detach(), q_t, metadata)

    # --- reading ---------------------------------------------------------------------------------

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """``q * scale`` in a plain tensor; differentiable.

        Args:
            dtype: the result's, bfloat16, float16 or float32; the tensor's own by default.

        >>> GroupedTensor.quantize(torch.ones(2, 32, 16)).dequantize().unique()
        tensor([1.])
        """
        dtype = self.dtype if dtype is None else dtype
        Rules("GroupedTensor", dtype=dtype).dtype("dtype", *ACTIVATIONS)
        return block_math.differentiable(self, dtype)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """``q * scale`` in a plain tensor; not differentiable."""
        return block_math.dequantize(self.q, self.scale, dtype).view(self.shape)

    def quantized_weight(self) -> QuantizedWeight:
        """The parts that a layer's GEMMs read. Without q_t a backward transposes q for itself."""
        self.check_whole()
        return QuantizedWeight(self.q, self.scale, self.q_t)

    def check_whole(self) -> None:
        """Raise RuntimeError if this is a view of another shape: blocks are those of q's shape."""
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
        else:  # a high-precision copy: write to a whole one, and store that
            w, written = self.detach().dequantize(), self.new_zeros(self.shape, dtype=torch.bool)
            w[index] = value.to(w.dtype)
            written[index] = True
            if part.numel():
                q, scale = block_math.with_blocks(
                    self.q, self.scale, w, written, self.recipe, self.stochastic_rounding
                )
                self.copy_(GroupedTensor(q, scale, None, self.metadata, self.shape))

    @property
    def data(self) -> Tensor:
        """The tensor without its autograd history.

        Assign a tensor that is kept alike, and this one has its memory, shape and dtype from then
        on; the recipe stays. Any other tensor is quantized into new memory: later writes to that
        one do not reach this one. RuntimeError for another shape, and for float64 or no float
        dtype. Alike are two tensors in FP8 alone, and two with masters whose formats are equal.
        """
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not self._is_kept_alike(value):
            value = self._quantized_like(value)
        # Shape, dtype and device are torch's, which refuses before it writes.
        torch._C.TensorBase.data.__set__(self, value)  # type: ignore[attr-defined]
        for name in self._memory:
            setattr(self, name, getattr(value, name))

    def _is_kept_alike(self, w: Tensor) -> bool:
        """Whether w's parts can be this tensor's own: a master would not see writes to them."""
        return isinstance(w, GroupedTensor)

    def _quantized_like(self, w: Tensor) -> "GroupedTensor":
        """A tensor in high precision, quantized as this one is."""
        rules = Rules("GroupedTensor")
        rules.check(
            type(w) in (Tensor, nn.Parameter) or isinstance(w, GroupedTensor),
            lambda: f"data must be a GroupedTensor or a plain tensor, got {type(w).__name__}",
        )
        self._check_data(w)
        twin = self.detach().to(w.device, w.dtype, copy=True)
        twin.copy_(w)
        return twin  # type: ignore[return-value]

    def _check_data(self, w: Tensor) -> None:
        """Raise RuntimeError for plain data of another dtype or shape."""
        rules = Rules("GroupedTensor")
        rules.check(
            w.dtype in ACTIVATIONS,
            lambda: (
                "a quantized weight stands for bfloat16, float16 or float32, got data of "
                f"{dtype_name(w.dtype)}: assign its dequantize() to a plain parameter"
            ),
        )
        rules.check(
            w.shape == self.shape,
            lambda: f"plain data must have the shape {list(self.shape)}, got {list(w.shape)}",
        )

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes that are held: those of q, scale and q_t."""
        return sum(part.nbytes for part in (self.q, self.scale, self.q_t) if part is not None)

    def element_size(self) -> int:
        """The bytes that are held of an element, besides scales: 1, or 2 with q_t."""
        return 1 if self.q_t is None else 2

    def data_ptr(self) -> int:
        """A number that tells tensors apart: q's address, moved to where no process has memory.

        A kernel that reads there fails, instead of taking e4m3 for high precision. 0 on meta.
        """
        address = self.q.data_ptr()
        return address and address + NO_ADDRESS

    def share_memory_(self) -> "GroupedTensor":
        """Raise RuntimeError: another process would not see q_t change with q."""
        raise RuntimeError(
            "GroupedTensor: memory is not shared among processes, share the tensor's q and scale"
        )

    # --- compile, pickle, dispatch, FSDP2 --------------------------------------------------------

    @property
    def metadata(self) -> Metadata:
        """Its dtype and how it is quantized."""
        return Metadata(self.dtype, self.recipe, self.stochastic_rounding)

    def __tensor_flatten__(self) -> tuple[list[str], Metadata]:
        names = ["q", "scale"] if self.q_t is None else ["q", "scale", "q_t"]
        return names, self.metadata

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], metadata: Metadata, size: Sequence[int], stride: Sequence[int]
    ) -> "GroupedTensor":
        return GroupedTensor(parts["q"], parts["scale"], parts.get("q_t"), metadata, size)

    def _stable_hash_for_caching(self) -> str:
        """What a compiled graph depends on, for torch's cache of graphs."""
        names, metadata = self.__tensor_flatten__()
        parts = [getattr(self, name) for name in names]
        layouts = [(tuple(part.shape), part.stride(), part.storage_offset()) for part in parts]
        cls = type(self.recipe)  # a recipe prints a name that two classes may have
        own = tuple(self.shape), self.device, self.requires_grad, cls.__module__, cls.__qualname__
        facts = (names, metadata, layouts, *own)
        return hashlib.blake2b(repr(facts).encode()).hexdigest()

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupedTensor":
        """Copies share memory where the tensors do, as torch has it: all parts of them."""
        if not self.is_leaf:
            super().__deepcopy__(memo)  # which refuses
        parts = copy.deepcopy((self.q, self.scale, self.q_t), memo)
        twin = GroupedTensor(*parts, self.metadata, self.shape)
        return self._complete_copy(twin, memo)

    def _complete_copy(self, twin: Any, memo: dict[int, Any]) -> Any:
        """Give a deep copy's tensor what a tensor has besides its numbers."""
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(self._attributes(), memo))
        twin.requires_grad_(self.requires_grad)
        twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    def _attributes(self) -> dict[str, Any]:
        """Attributes that others set. One of them makes it a parameter."""
        own = self._own_attributes
        return {name: value for name, value in vars(self).items() if name not in own}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = {
            "version": PICKLE_VERSION,
            "q": self.q.view(torch.uint8),  # plain pickle fails on float8 (torch 2.13)
            "scale": self.scale,
            "columnwise": self.q_t is not None,  # q_t is made again from q: half the file
            "shape": tuple(self.shape),
            "dtype": self.dtype,
            "recipe": recipe_to_pickle(self.recipe),
            "stochastic_rounding": self.stochastic_rounding,
            "requires_grad": self.requires_grad,
            "attributes": self._attributes(),
        }
        return _rebuild, (state,)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = cls._handlers.get(func, cls._handlers[None])
        return handler(func, args, kwargs or {})

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What FSDP2 all-gathers of a shard: one byte an element, and the scales.

        With one process it gathers nothing and passes on one tensor only (torch 2.13), so the
        scales go as metadata. ValueError if experts do not divide evenly among the processes.
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
    ) -> tuple["GroupedTensor", tuple[Tensor, ...]] | None:
        """The whole weight from what FSDP2 gathered, without q_t: a backward transposes q."""
        if out is not None:  # FSDP2 has filled its tensors again
            return None
        q, scale = gathered if own_scale is None else (*gathered, own_scale)
        return GroupedTensor(q, scale, None, self.metadata._replace(dtype=param_dtype)), ()


def _as_parameter(t: Tensor, requires_grad: bool) -> GroupedTensor:
    if not isinstance(t, GroupedTensor):
        raise ValueError(
            "GroupedTensor: make one with GroupedTensor.quantize or GroupedTensor.from_parts, "
            f"got a {type(t).__name__} of {dtype_name(t.dtype)}"
        )
    if t.is_meta:
        raise ValueError(
            "GroupedTensor: a quantized weight cannot be offloaded, as accelerate would do: leave "
            "its module on a device, where it takes half of bfloat16's memory"
        )
    return nn.Parameter(t.detach(), requires_grad)  # type: ignore[return-value]


def _rebuild(state: dict[str, Any]) -> GroupedTensor:
    """A tensor from its pickled state."""
    check_pickle_version("GroupedTensor", state["version"], PICKLE_VERSION)
    q, scale, q_t = state["q"].view(E4M3), state["scale"], None
    if state["columnwise"]:
        # Torch lets tensors that were saved together share memory. A write to one of them would
        # not reach the q_t of another, so each has its own.
        q, scale, q_t = q.clone(), scale.clone(), block_math.transposed(q)
    recipe: Any = recipe_from_pickle(state["recipe"])
    metadata = Metadata(state["dtype"], recipe, state["stochastic_rounding"])
    t = GroupedTensor(q, scale, q_t, metadata, state["shape"])
    vars(t).update(state["attributes"])
    t.requires_grad_(state["requires_grad"])
    return t


torch.serialization.add_safe_globals([_rebuild])


def _check_recipe(recipe: Recipe | None) -> Float8BlockScaling:
    if recipe is None:
        return Float8BlockScaling()
    if not isinstance(recipe, Float8BlockScaling):
        raise ValueError(f"GroupedTensor: recipe must be Float8BlockScaling, got {recipe!r}")
    return recipe
