"""A weight in FP8 beside its high-precision numbers, which always agree.

E experts, K in_features, N out_features.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear.meta_kernels.rules import Rules
from grouped_linear.quantized.dispatch import count_write, views_of
from grouped_linear.quantized.pickle_version import (
    check_pickle_version,
    recipe_from_pickle,
    recipe_to_pickle,
)
from grouped_linear.quantized.tensor import GroupedTensor, Handler, Metadata
from grouped_linear.recipes import (
    Float8BlockScaling,
    Format,
    Layouts,
    QuantizedWeight,
    Recipe,
    new_weight,
    refresh_weight_,
)

aten = torch.ops.aten
PICKLE_VERSION = 1

#: By overload, as in tensor.py. The entry of None has the three rules.
HANDLERS: dict[Any, Handler] = {}


class GroupedTensorWithMaster(GroupedTensor):
    """Experts' weights in high precision, with the FP8 numbers that GEMMs read beside them.

    In every operation of torch it behaves as a plain tensor of its high-precision numbers,
    ``master``. It also keeps q, q_t and scale, which are always what quantizing ``master`` gives:

    - A view is a view of ``master`` that knows the experts that it lies in.
    - An operation that writes the tensor, or a view of it, writes ``master``, and quantizes these
      experts in the same call. Call :meth:`refresh_` after a write that torch does not show, as by
      a kernel that takes ``data_ptr()``.
    - Any other operation reads ``master``.

    Make one with :meth:`quantize`, or by the option ``weights="both"`` of a layer.

    Attributes:
        master: [E, N, K] bfloat16, float16 or float32, contiguous; or [N, K] of one expert. Read
            it; write the tensor.
        q, scale, q_t, recipe: see :class:`grouped_linear.GroupedTensor`. Under
            ``Float8CurrentScaling`` ``scale`` is [E].
        has_memory: whether code that reads memory directly finds ``master`` there, as in a state
            dict. Its pickles and copies are plain tensors.

    >>> w = GroupedTensorWithMaster.quantize(torch.ones(2, 32, 16))
    >>> w[1].mul_(1.01)[0, 0], (w.q.float() * w.scale)[1, 0, 0]
    (tensor(1.0100), tensor(1.))
    """

    master: Tensor
    own: Tensor
    has_memory: bool
    # The weight that these experts are a view of. A trace quantizes all of it, because Inductor
    # scatters no FP8 into a larger tensor (torch 2.13).
    whole: "GroupedTensorWithMaster | None" = None

    _handlers = HANDLERS
    _memory = (*GroupedTensor._memory, "master", "own")
    _own_attributes = (*GroupedTensor._own_attributes, "master", "own", "has_memory", "whole")

    @staticmethod
    def __new__(
        cls: type["GroupedTensorWithMaster"],
        master: Tensor,
        parts: QuantizedWeight | None = None,
        metadata: Metadata | None = None,
        own: Tensor | None = None,
        *,
        has_memory: bool = False,
        requires_grad: bool = False,
    ) -> "GroupedTensorWithMaster":
        """Wrap a master and the FP8 numbers of it; ``own`` is the view of it that this tensor is.

        A master alone is a tensor of this class, of which accelerate makes a parameter elsewhere.
        """
        if parts is None or metadata is None:
            return nn.Parameter(master.detach(), requires_grad)  # type: ignore[return-value]
        own = master if own is None else own
        t: GroupedTensorWithMaster
        if has_memory:
            t = Tensor._make_subclass(cls, own)
        else:
            t = Tensor._make_wrapper_subclass(
                cls,
                own.shape,
                strides=own.stride(),
                storage_offset=own.storage_offset(),
                dtype=own.dtype,
                device=own.device,
            )
            # Code that reads memory directly, as collectives of lists do, then raises.
            torch._C._set_throw_on_mutable_data_ptr(t)
        t.q, t.scale, t.q_t = parts  # type: ignore[assignment]
        t.master, t.own, t.has_memory = master, own, has_memory
        _, t.recipe, t.stochastic_rounding = metadata
        return t

    @classmethod
    def quantize(
        cls,
        w: Tensor,
        recipe: Recipe | None = None,
        *,
        columnwise: bool = True,
        stochastic_rounding: bool = False,
    ) -> "GroupedTensorWithMaster":
        """Quantize a weight, and keep it.

        Args:
            w: [E, N, K] bfloat16, float16 or float32, N and K multiples of 16. A plain contiguous
                `w` is not copied; it is then this tensor's memory, and is written through it alone.
            recipe: ``Float8BlockScaling()``, the default, ``Float8CurrentScaling()``, or one whose
                weight format is a function of your own.
            columnwise: keep q_t too, which dgrad reads.
            stochastic_rounding: False: q is always what rounding ``master`` to nearest gives.

        Raises:
            RuntimeError: for a wrong shape or dtype.
            ValueError: for another recipe, or stochastic rounding.

        >>> GroupedTensorWithMaster.quantize(torch.full((2, 32, 16), 7.0)).q_t.shape
        torch.Size([2, 16, 32])
        """
        recipe = Float8BlockScaling() if recipe is None else recipe
        if not keeps_beside_master(recipe):
            raise ValueError(
                "GroupedTensorWithMaster: recipe must be Float8BlockScaling, Float8CurrentScaling "
                f"or have a weight format of your own, got {recipe!r}"
            )
        if stochastic_rounding:
            raise ValueError(
                "GroupedTensorWithMaster: stochastic_rounding must be False: small steps add up in "
                "the high-precision numbers"
            )
        Rules("GroupedTensorWithMaster", w=w).weight()
        master = w.numbers(w.dtype) if isinstance(w, GroupedTensor) else w.detach().contiguous()
        metadata = Metadata(w.dtype, recipe, False)  # type: ignore[arg-type]
        if recipe.weight.quantize is not None:
            return cls(master, _by_function(master, recipe.weight), metadata)
        E, N, K = w.shape
        parts = new_weight(recipe.weight, E, N, K, w.device, columnwise)
        return cls(master, parts, metadata).refresh_()

    def refresh_(self) -> "GroupedTensorWithMaster":
        """Quantize ``master`` again, after a write that torch does not show.

        >>> w = GroupedTensorWithMaster.quantize(torch.ones(2, 32, 16))
        >>> w.master.numpy()[1] = 3.0
        >>> w.refresh_().scale.flatten()
        tensor([0.0039, 0.0078])
        """
        if self.is_traced_part:
            assert self.whole is not None
            self.whole.refresh_()
        elif self.master.numel():
            parts, master = self.parts, self.master
            if master.dim() == 2:
                parts, master = parts.each(lambda part: part[None]), master[None]
            with torch.no_grad():
                format = self.recipe.weight
                if format.quantize is None:
                    refresh_weight_(parts, (master,), format, None)
                else:
                    made = _by_function(master, format)
                    for to, numbers in zip(parts, made, strict=True):
                        if to is not None and numbers is not None:
                            to.copy_(numbers)
                count_write(self)
        return self

    # --- reading ---------------------------------------------------------------------------------

    @property
    def parts(self) -> QuantizedWeight:
        """q, scale and q_t."""
        return QuantizedWeight(self.q, self.scale, self.q_t)

    @property
    def is_whole(self) -> bool:
        """Whether this is all of ``master``, and not a view of another shape, dtype or part."""
        alike = self.shape == self.master.shape and self.dtype == self.master.dtype
        return alike and self.is_contiguous()

    @property
    def is_traced_part(self) -> bool:
        """Whether a trace has this view of another weight, all of which it quantizes."""
        return self.whole is not None and type(self.q) is not Tensor

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The high-precision numbers in a plain tensor of its own."""
        return self.own.to(dtype, copy=True)

    def check_whole(self) -> None:
        """Raise RuntimeError for a view that is not of whole experts."""
        if not self.is_whole:
            raise RuntimeError(
                f"GroupedTensor: a layer reads whole experts, {list(self.master.shape)}, got a "
                f"view {list(self.shape)} of them"
            )

    def for_state_dict(self) -> "GroupedTensorWithMaster":
        """A view of this tensor as state dicts have it: with memory, for those who write files.

        A write to it is a write to this tensor. Pickles and copies of it are plain tensors.
        """
        with views_of(self):
            parts, own = self.parts.each(aten.alias), aten.alias(self.own)
        has_memory = type(self.own) is Tensor
        return GroupedTensorWithMaster(
            self.master, parts, self.metadata, own, has_memory=has_memory
        )

    def __repr__(self) -> str:  # type: ignore[override]
        if not self.is_whole:
            return repr(self.own)
        return (
            f"GroupedTensorWithMaster(shape={list(self.shape)}, dtype={self.dtype}, "
            f"device='{self.device}')"
        )

    # --- what a plain tensor has besides operations ----------------------------------------------

    __setitem__ = Tensor.__setitem__  # type: ignore[assignment]

    def _is_kept_alike(self, w: Tensor) -> bool:
        """Whether w's parts are what quantizing its master as this tensor is quantized gives."""
        return isinstance(w, GroupedTensorWithMaster) and w.recipe.weight == self.recipe.weight

    def _quantized_like(self, w: Tensor) -> "GroupedTensorWithMaster":
        """Numbers of another tensor, in memory of their own."""
        self._check_data(w)
        numbers = w.numbers(w.dtype) if isinstance(w, GroupedTensor) else w.detach()
        return self.of(numbers.clone(memory_format=torch.contiguous_format))

    def of(self, master: Tensor, columnwise: bool | None = None) -> "GroupedTensorWithMaster":
        """A tensor of another master, quantized as this one is."""
        recipe, columnwise = self.recipe, self.q_t is not None if columnwise is None else columnwise
        return _quantized(master, recipe, columnwise)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes that are held: those of the master, q, scale and q_t."""
        return self.master.nbytes + super().nbytes

    def element_size(self) -> int:
        """The bytes that are held of an element, besides scales."""
        return self.master.element_size() + super().element_size()

    def data_ptr(self) -> int:
        """The address of the high-precision numbers. Call :meth:`refresh_` after a write there."""
        return self.own.data_ptr()

    # --- compile, pickle, dispatch, FSDP2 --------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Metadata]:
        parts = zip(("q", "scale", "q_t"), self.parts, strict=True)
        names = [name for name, part in parts if part is not None]
        return [*names, "master", *([] if self.is_whole else ["own"])], self.metadata

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], metadata: Metadata, size: Sequence[int], stride: Sequence[int]
    ) -> "GroupedTensorWithMaster":
        quantized = QuantizedWeight(parts["q"], parts.get("scale"), parts.get("q_t"))
        return GroupedTensorWithMaster(parts["master"], quantized, metadata, parts.get("own"))

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupedTensorWithMaster":
        """Copies share memory where the tensors do, as torch has it."""
        if not self.is_leaf:
            Tensor.__deepcopy__(self, memo)  # which refuses
        parts, master, own = copy.deepcopy((self.parts, self.master, self.own), memo)
        twin = GroupedTensorWithMaster(
            master, parts, self.metadata, None if self.is_whole else own, has_memory=self.has_memory
        )
        return self._complete_copy(twin, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self.has_memory or not self.is_whole:
            return self.own.detach().__reduce_ex__(protocol)
        state = {
            "version": PICKLE_VERSION,
            "master": self.master,  # q, scale and q_t are made again from it: half the file
            "columnwise": self.q_t is not None,
            "recipe": recipe_to_pickle(self.recipe),
            "requires_grad": self.requires_grad,
            "attributes": self._attributes(),
        }
        return _rebuild, (state,)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What FSDP2 all-gathers of a shard: q and the scales, and never the master.

        In a format of your own it is the numbers in the dtype of the mixed precision policy, which
        each call then quantizes.
        """
        if self.recipe.weight.quantize is None:
            return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        return (self.own.to(mp_policy.param_dtype or self.dtype),), None

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        own_scale: Tensor | None,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """The whole weight from what FSDP2 gathered: in FP8 alone, or plain."""
        if self.recipe.weight.quantize is None:
            return super().fsdp_post_all_gather(gathered, own_scale, param_dtype, out=out)
        return None if out is not None else (gathered[0], ())


def keeps_beside_master(recipe: Recipe) -> bool:
    """Whether a weight can be kept in the recipe's format beside its high-precision numbers."""
    return recipe.weight.scaling in ("block", "group") or recipe.weight.quantize is not None


def _quantized(master: Tensor, recipe: Recipe, columnwise: bool) -> GroupedTensorWithMaster:
    """A tensor of the weight of all experts, or of one."""
    if master.dim() == 3:
        return GroupedTensorWithMaster.quantize(master, recipe, columnwise=columnwise)
    whole: Any = GroupedTensorWithMaster.quantize(master[None], recipe, columnwise=columnwise)
    return whole[0]


@torch.no_grad()
def _by_function(master: Tensor, format: Format) -> QuantizedWeight:
    """What a format's function makes of a weight, in tensors of their own.

    One tensor for both layouts is stored once: ``columnwise`` is then None.
    """
    made = format.by_function(master, None, Layouts(True, True))
    if made.columnwise_scale is not made.rowwise_scale:
        raise ValueError(
            "GroupedTensorWithMaster: both layouts of a weight must have one scale tensor, the "
            "function of the weight's format returned two"
        )
    columnwise = None if made.columnwise is made.rowwise else made.columnwise
    kept = QuantizedWeight(made.rowwise, made.rowwise_scale, columnwise)  # type: ignore[arg-type]
    return kept.each(torch.clone)


def _rebuild(state: dict[str, Any]) -> GroupedTensorWithMaster:
    """A tensor from its pickled state."""
    check_pickle_version("GroupedTensorWithMaster", state["version"], PICKLE_VERSION)
    recipe = recipe_from_pickle(state["recipe"])
    # Tensors that were saved together may share memory. Each has its own here, so that a write to
    # one of them leaves no other with old quantized numbers.
    t = _quantized(state["master"].clone(), recipe, state["columnwise"])
    vars(t).update(state["attributes"])
    t.requires_grad_(state["requires_grad"])
    return t


torch.serialization.add_safe_globals([_rebuild])
