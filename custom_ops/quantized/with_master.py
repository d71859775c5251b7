# SPDX-License-Identifier: Apache-2.0
"""A weight in FP8 beside its high-precision numbers, which always agree.

E experts, K in_features, N out_features.
"""

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear.meta_kernels.rules import E4M3, Rules
from grouped_linear.quantized.gathered import GatheredWeight, views_of
from grouped_linear.quantized.master_dispatch import HandledTensor, count_write
from grouped_linear.recipes import Float8BlockScaling, Float8CurrentScaling, Format, Recipe
from grouped_linear.recipes.quantize_weight import (
    QuantizedWeight,
    new_weight,
    refresh_weight_,
    store_weight,
    stores,
)

aten = torch.ops.aten

#: The tensors that it holds. Q and scale come first, as GEMMs read them.
_TENSORS = ("q", "scale", "q_t", "master", "numbers")
#: The recipes that files have by name and options, so that they name no modules.
_PICKLED_BY_NAME = {cls.__name__: cls for cls in (Float8BlockScaling, Float8CurrentScaling)}
_OWN_ATTRIBUTES = (*_TENSORS, "recipe", "has_memory", "whole", "is_part", "taken")


class GroupedTensorWithMaster(HandledTensor):
    """Experts' weights in high precision, with the FP8 numbers that GEMMs read beside them.

    In every operation of torch it behaves as a plain tensor of its high-precision numbers,
    ``master``. It also keeps q, q_t and scale, which are always what quantizing ``master`` gives:

    - A view is a view of ``master`` that records its experts.
    - An operation that writes the tensor, or a view of it, writes ``master``, and quantizes these
      experts in the same call. Call :meth:`refresh_` after a write that torch does not show, as by
      a kernel that takes ``data_ptr()``.
    - Any other operation reads ``master``.

    Make one with :meth:`quantize`, or by the option ``weights="both"`` of a layer.

    A view of whole experts has the master and the FP8 numbers of these. Any other view, as a slice
    of features or a transposed one, has no FP8 numbers of its own: its ``master``, q, q_t and scale
    are those of all experts that it touches. A write to it quantizes these experts.

    Attributes:
        master: [E, N, K] bfloat16, float16 or float32, contiguous; or [N, K] of one expert. Read
            it; write the tensor.
        q: [E, N, K] e4m3, or [N, K] in one expert; under ``Format(qat="mxfp4")`` q and scale are
            those of :class:`grouped_linear.ops.Mxfp4Weight`, and q_t is None.
        scale: [E, ceil(N / 128), ceil(K / 128)] float32, or [E] under ``Float8CurrentScaling``;
            without E in one expert.
        q_t: [E, K, N], q transposed, which dgrad reads; None if columnwise data was not requested.
        recipe: how it is quantized when it is written.
        has_memory: whether code that reads memory directly finds ``master`` there, as in a state
            dict. Its pickles and copies are plain tensors.

    >>> w = GroupedTensorWithMaster.quantize(torch.ones(2, 32, 16))
    >>> w[1].mul_(1.01)[0, 0], (w.q.float() * w.scale)[1, 0, 0]
    (tensor(1.0100), tensor(1.))
    """

    master: Tensor
    numbers: Tensor  # in high precision: master, or a view of it
    q: Tensor
    scale: Tensor
    q_t: Tensor | None
    recipe: Recipe
    has_memory: bool
    # The weight that this is a view of experts of. A trace quantizes all of it, because Inductor
    # scatters no FP8 into a larger tensor (torch 2.13).
    whole: tuple[Tensor, QuantizedWeight] | None = None
    # Whether split or chunk returned it; empty_like is then of this class too.
    is_part: bool = False
    # Of a parameter on the meta device: the tensor that a load assigned to it, and what it became.
    taken: Any = None

    @staticmethod
    def __new__(
        cls: type["GroupedTensorWithMaster"],
        data: Tensor,
        requires_grad: bool = False,
        **attributes: Any,
    ) -> "GroupedTensorWithMaster":
        """A parameter, as accelerate asks a parameter's class for another.

        ``data`` is of this class, or plain: then it is quantized by the default recipe.
        ``attributes`` are those of a parameter that it takes the place of.
        """
        if not isinstance(data, GroupedTensorWithMaster):
            data = GroupedTensorWithMaster.quantize(data)
        parameter: Any = nn.Parameter(data.detach(), requires_grad)
        vars(parameter).update(
            {name: a for name, a in attributes.items() if name not in _OWN_ATTRIBUTES}
        )
        return parameter  # type: ignore[no-any-return]

    @classmethod
    def _of_parts(
        cls,
        master: Tensor,
        parts: QuantizedWeight,
        recipe: Recipe,
        numbers: Tensor | None = None,
        has_memory: bool = False,
    ) -> "GroupedTensorWithMaster":
        """A master, its FP8 numbers, and the view of it that this tensor is, ``numbers``."""
        numbers = master if numbers is None else numbers
        t: GroupedTensorWithMaster
        if has_memory:
            t = Tensor._make_subclass(cls, numbers)
        else:
            t = Tensor._make_wrapper_subclass(
                cls,
                numbers.shape,
                strides=numbers.stride(),
                storage_offset=numbers.storage_offset(),
                dtype=numbers.dtype,
                device=numbers.device,
            )
            # Code that reads memory directly, as collectives of lists do, then raises.
            torch._C._set_throw_on_mutable_data_ptr(t)
        t.q, t.scale, t.q_t = parts  # type: ignore[assignment]
        t.master, t.numbers, t.recipe, t.has_memory = master, numbers, recipe, has_memory
        return t

    @classmethod
    def quantize(
        cls, w: Tensor, recipe: Recipe | None = None, *, columnwise: bool = True
    ) -> "GroupedTensorWithMaster":
        """Quantize a weight, and keep it.

        Args:
            w: [E, N, K] bfloat16, float16 or float32, N and K multiples of 16. A plain contiguous
                `w` is not copied; it is then this tensor's memory, and is written through it alone.
            recipe: ``Float8BlockScaling()``, the default, ``Float8CurrentScaling()``, or one whose
                weight format is a function of your own or ``Format(qat="mxfp4")``.
            columnwise: keep q_t too, which dgrad reads.

        Raises:
            RuntimeError: for a wrong shape or dtype.
            ValueError: for another recipe.

        >>> GroupedTensorWithMaster.quantize(torch.full((2, 32, 16), 7.0)).q_t.shape
        torch.Size([2, 16, 32])
        """
        recipe = Float8BlockScaling() if recipe is None else recipe
        if not isinstance(recipe, Recipe) or not recipe.keeps_weights_as("both"):
            raise ValueError(
                "GroupedTensorWithMaster: recipe must be Float8BlockScaling, Float8CurrentScaling "
                "or have a weight format that is a function or Format(qat='mxfp4'), got "
                f"{recipe!r}"
            )
        Rules("GroupedTensorWithMaster", w=w).weight()
        w = w.detach()
        master = w.dequantize() if isinstance(w, GroupedTensorWithMaster) else w.contiguous()
        with torch.no_grad():
            parts = store_weight(master, recipe.weight, columnwise)
        return cls._of_parts(master, parts, recipe)

    def refresh_(self) -> "GroupedTensorWithMaster":
        """Quantize ``master`` again, after a write that torch does not show.

        >>> w = GroupedTensorWithMaster.quantize(torch.ones(2, 32, 16))
        >>> w.master.numpy()[1] = 3.0
        >>> w.refresh_().scale.flatten()
        tensor([0.0039, 0.0078])
        """
        master, parts = self.master, self.parts
        if self.is_traced_part:
            assert self.whole is not None
            master, parts = self.whole
        to = parts
        if master.dim() == 2:
            to, master = parts.each(lambda part: part[None]), master[None]
        if master.numel():
            with torch.no_grad():
                refresh_weight_(to, (master,), self.recipe.weight, None)
            count_write(parts)  # a forward may have saved them for its backward
        return self

    # --- reading ---------------------------------------------------------------------------------

    @property
    def parts(self) -> QuantizedWeight:
        """q, scale and q_t. Without q_t a backward transposes q for itself."""
        return QuantizedWeight(self.q, self.scale, self.q_t)

    @property
    def format_options(self) -> tuple[Any, ...]:
        """Those of its recipe's format for weights, see :attr:`Format.compared`."""
        return self.recipe.weight.compared

    def quantized_weight(self) -> QuantizedWeight:
        """The parts that a layer's GEMMs read. RuntimeError for a view that is no whole experts."""
        whole = self.parts_if_whole()
        if whole is None:
            raise RuntimeError(
                f"GroupedTensorWithMaster: a view {list(self.shape)} of experts "
                f"{list(self.master.shape)} has no FP8 numbers: take those of the weight, or of a "
                "view of whole experts"
            )
        return whole

    def parts_if_whole(self) -> QuantizedWeight | None:
        """The parts of a view of whole experts, else None.

        A method, because Dynamo makes constants of the properties of a tensor that is made in a
        graph, as the local part of a DTensor (torch 2.13).
        """
        return self.parts if self.is_whole else None

    @property
    def is_whole(self) -> bool:
        """Whether this is all of ``master``, and not a view of another shape, dtype or part."""
        master = self.master
        alike = self.shape == master.shape and self.dtype == master.dtype
        begins = self.storage_offset() == master.storage_offset()  # not so: by as_strided
        return alike and begins and self.is_contiguous()  # type: ignore[return-value]

    @property
    def is_traced_part(self) -> bool:
        """Whether this is a view in a trace, which quantizes the whole weight."""
        return self.whole is not None and type(self.q) is not Tensor

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """The high-precision numbers in a plain tensor with memory of its own; differentiable.

        Args:
            dtype: the result's; the tensor's own by default.

        >>> GroupedTensorWithMaster.quantize(torch.full((2, 32, 16), 1.01)).dequantize().unique()
        tensor([1.0100])
        """
        return self.mul(1).to(self.dtype if dtype is None else dtype)  # a product is plain

    def for_state_dict(self) -> "GroupedTensorWithMaster":
        """A view of this tensor as state dicts have it: with memory, for those who write files.

        A write to it is a write to this tensor. Pickles and copies of it are plain tensors.
        """
        with views_of(self):
            parts, numbers = self.parts.each(aten.alias), aten.alias(self.numbers)
        has_memory = type(self.numbers) is Tensor
        return self._of_parts(self.master, parts, self.recipe, numbers, has_memory)

    def __repr__(self) -> str:  # type: ignore[override]
        if not self.is_whole:
            return repr(self.numbers)
        return (
            f"GroupedTensorWithMaster(shape={list(self.shape)}, dtype={self.dtype}, "
            f"device='{self.device}')"
        )

    # --- what a plain tensor has besides operations ----------------------------------------------

    @property
    def data(self) -> Tensor:
        """The tensor without its autograd history.

        Assign a tensor of the same format, and this one has its memory, shape and dtype from then
        on; the recipe stays. The numbers of any other tensor are copied: later writes to that one
        do not reach this one. RuntimeError for another shape, and for float64 or no float dtype.
        """
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        is_kept = isinstance(value, GroupedTensorWithMaster)
        if not is_kept or value.recipe.weight != self.recipe.weight:
            if value.shape != self.shape:
                raise RuntimeError(
                    f"GroupedTensorWithMaster: data must have the shape {list(self.shape)}, got "
                    f"{list(value.shape)}"
                )
            numbers = value.dequantize() if is_kept else value.clone()
            value = self.of(numbers.detach().contiguous())
        if self.has_memory:
            value = value.for_state_dict()
        # Shape, dtype and device are torch's, which refuses before it writes.
        torch._C.TensorBase.data.__set__(self, value)  # type: ignore[attr-defined]
        for name in (*_TENSORS, "whole"):
            setattr(self, name, getattr(value, name))

    def of(self, master: Tensor, columnwise: bool | None = None) -> "GroupedTensorWithMaster":
        """A tensor of another master, quantized as this one is."""
        columnwise = self.q_t is not None if columnwise is None else columnwise
        whole: Any = master if master.dim() == 3 else master[None]
        whole = GroupedTensorWithMaster.quantize(whole, self.recipe, columnwise=columnwise)
        return whole if master.dim() == 3 else whole[0]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes that are held: those of the master, q, scale and q_t."""
        held = (self.master, *self.parts) if self.is_whole else (self.numbers,)
        return sum(part.nbytes for part in held if part is not None)

    def element_size(self) -> int:
        """The bytes that an element takes, without scales."""
        of_parts = (1 if self.q_t is None else 2) if self.is_whole else 0
        return self.numbers.element_size() + of_parts

    def numpy(self, *, force: bool = False) -> Any:
        """A copy of the high-precision numbers: nothing shows what is written to an array."""
        return self.numbers.clone().requires_grad_(self.requires_grad).numpy(force=force)

    def tolist(self) -> list[Any]:
        """The high-precision numbers."""
        return self.numbers.tolist()

    def data_ptr(self) -> int:
        """The address of the high-precision numbers. Call :meth:`refresh_` after a write there."""
        return self.numbers.data_ptr()

    def share_memory_(self) -> "GroupedTensorWithMaster":
        """Raise RuntimeError: another process would not see the FP8 numbers change."""
        raise RuntimeError(
            "GroupedTensorWithMaster: a weight in both precisions is not shared among processes: "
            "share its dequantize(), a plain copy"
        )

    # --- compile, pickle, dispatch, FSDP2 --------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Recipe]:
        parts = zip(("q", "scale", "q_t"), self.parts, strict=True)
        names = [name for name, part in parts if part is not None]
        return [*names, "master", *([] if self.is_whole else ["numbers"])], self.recipe

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], recipe: Recipe, size: Sequence[int], stride: Sequence[int]
    ) -> "GroupedTensorWithMaster":
        quantized = QuantizedWeight(parts["q"], parts.get("scale"), parts.get("q_t"))
        make = GroupedTensorWithMaster._of_parts
        return make(parts["master"], quantized, recipe, parts.get("numbers"))

    def _stable_hash_for_caching(self) -> str:
        """Everything a compiled graph depends on, for torch's cache of graphs."""
        names, recipe = self.__tensor_flatten__()
        parts = [getattr(self, name) for name in names]
        layouts = [(tuple(part.shape), part.stride(), part.storage_offset()) for part in parts]
        cls = type(recipe)  # a recipe prints a name that two classes may have
        tensor = tuple(self.shape), self.dtype, self.device, self.requires_grad
        facts = (names, recipe, cls.__module__, cls.__qualname__, layouts, tensor)
        return hashlib.blake2b(repr(facts).encode()).hexdigest()

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupedTensorWithMaster":
        """Copies share memory where the tensors do, as torch has it."""
        if not self.is_leaf:
            super().__deepcopy__(memo)  # which refuses
        parts, master, numbers = copy.deepcopy((self.parts, self.master, self.numbers), memo)
        view = None if self.is_whole else numbers
        twin = self._of_parts(master, parts, self.recipe, view, self.has_memory)
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(self._attributes(), memo))
        twin.requires_grad_(self.requires_grad)
        twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    def _attributes(self) -> dict[str, Any]:
        """Attributes that others set. One of them makes it a parameter."""
        return {name: a for name, a in vars(self).items() if name not in _OWN_ATTRIBUTES}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if not (isinstance(self, nn.Parameter) and self.is_whole):
            plain = self.numbers.detach()
            if isinstance(self, nn.Parameter):
                plain = nn.Parameter(plain, self.requires_grad)
            return plain.__reduce_ex__(protocol)
        recipe = self.recipe
        by_name = type(recipe) in _PICKLED_BY_NAME.values()
        bits = self.parts.each(lambda part: part.view(torch.uint8) if part.dtype == E4M3 else part)
        state = {
            # The same memory as another storage. Tensors that are saved together and share one
            # share the loaded one, and a plain one among them would write past the FP8 numbers.
            "master": self.master if self.is_meta else torch.utils.dlpack.from_dlpack(self.master),
            # Loading computes nothing: torch's older file format has no numbers there yet. That
            # format has no float8 either.
            "parts": tuple(bits),
            "recipe": (type(recipe).__name__, recipe.options()) if by_name else recipe,
            "requires_grad": self.requires_grad,
            "attributes": self._attributes(),
        }
        return _rebuild, (state,)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """FSDP2 all-gathers a shard's FP8 numbers and scales, never its master.

        They are of the dtype of the mixed precision policy, as a plain weight is quantized after
        FSDP2 has cast and gathered it. In a format of your own FSDP2 gathers those numbers, which
        each call then quantizes. With one process FSDP2 gathers nothing and passes on one tensor
        only (torch 2.13), so the scales go as metadata. ValueError if experts do not divide evenly
        among the processes.
        """
        numbers = self.numbers.to(mp_policy.param_dtype or self.dtype)
        if not stores(self.recipe.weight):
            return (numbers,), None
        if outer_size[0] % mesh.size():
            raise ValueError(
                "GroupedTensorWithMaster: FSDP needs as many experts on every process, "
                f"got {outer_size[0]} for {mesh.size()} processes"
            )
        quantized = self if numbers is self.numbers else self.of(numbers, False)
        q, scale, _ = quantized.quantized_weight()
        assert scale is not None
        return ((q,), scale) if mesh.size() == 1 else ((q, scale), None)

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        own_scale: Tensor | None,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight from what FSDP2 gathered: in FP8 alone, or plain."""
        if out is not None:  # FSDP2 has filled what it gathers again, which metadata is not
            if own_scale is not None:
                out.scale = own_scale
            return None
        if not stores(self.recipe.weight):
            return gathered[0], ()
        q, scale = gathered if own_scale is None else (*gathered, own_scale)
        return GatheredWeight(q, scale, self.recipe, param_dtype), ()


def _rebuild(state: dict[str, Any]) -> GroupedTensorWithMaster:
    """A parameter from its pickled state. It refuses what a file could plant."""
    master, attributes = state["master"], state["attributes"]
    for name in attributes:
        if name in _OWN_ATTRIBUTES or hasattr(GroupedTensorWithMaster, name):
            raise ValueError(
                f"GroupedTensorWithMaster: the file has an attribute {name!r} of the class itself"
            )
    recipe = state["recipe"]
    if not isinstance(recipe, Recipe):
        name, options = recipe
        recipe = _PICKLED_BY_NAME[name](**options)
    parts = QuantizedWeight(*state["parts"])
    if recipe.weight.stored_as != "mxfp4":  # whose parts are bytes
        parts = parts.each(lambda part: part.view(E4M3) if part.dtype == torch.uint8 else part)
    _check_parts(master, parts, recipe.weight)
    t = GroupedTensorWithMaster._of_parts(master.detach(), parts, recipe)
    vars(t).update(attributes)
    t.requires_grad_(state["requires_grad"])
    return t


def _check_parts(master: Tensor, parts: QuantizedWeight, format: Format) -> None:
    """Raise ValueError for parts of a file that kernels would read outside of."""
    if not stores(format):  # a function's have any shape, and each call quantizes
        return
    E, N, K = (1, *master.shape) if master.dim() == 2 else master.shape
    expected = new_weight(format, E, N, K, "meta", columnwise=parts.columnwise is not None)
    if master.dim() == 2:
        expected = expected.each(lambda part: part[0])
    for part, like in zip(parts, expected, strict=True):
        facts = [(t.shape, t.dtype, t.is_contiguous()) for t in (part, like) if t is not None]
        if (part is None) != (like is None) or len({*facts}) > 1:
            raise ValueError(
                f"GroupedTensorWithMaster: the file has FP8 numbers that are not those of a weight "
                f"{list(master.shape)}"
            )


torch.serialization.add_safe_globals([_rebuild, Recipe, Format])
