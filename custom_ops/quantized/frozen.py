# SPDX-License-Identifier: Apache-2.0
"""Weights that are frozen in few bits: bytes in parameters of any module.

E experts, K in_features, N out_features.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grouped_linear import ops
from grouped_linear.meta_kernels.rules import (
    ACTIVATIONS,
    BLOCK,
    E4M3,
    MX_BLOCK,
    Rules,
    ceil_div,
    dtype_name,
)
from grouped_linear.quantized.keep import SCALE, as_master, distributed_like, is_dtensor, local_part
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import Recipe
from grouped_linear.recipes.quantize_weight import QuantizedWeight

Parts = tuple[Tensor, Tensor]


def _quantize_blocks(w_ENK: Tensor, recipe: Recipe | None) -> Parts:
    assert recipe is not None
    options = recipe.weight.scale_options
    q, scale, _ = ops.quantize_weight(w_ENK, columnwise=False, **options)
    assert q is not None
    return q, scale


def dequantize_blocks(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``q * scale`` of each 128x128 block, rounded once: every dtype holds all e4m3 numbers."""
    w, (*_, N, K) = q.to(dtype), q.shape
    whole = N // BLOCK
    per_column = scale[..., None].expand(*scale.shape, BLOCK).flatten(-2)[..., :K]
    w[..., : whole * BLOCK, :].unflatten(-2, (-1, BLOCK)).mul_(per_column[..., :whole, None, :])
    if N % BLOCK:
        w[..., whole * BLOCK :, :].mul_(per_column[..., whole:, :])
    return w


class FrozenBytes(nn.Parameter):
    """Bytes of a frozen weight's numbers, or of its scales, in a parameter that takes bytes alone.

    Copying numbers of another dtype to it raises RuntimeError, and so does assigning other bytes on
    its device to ``data``, as a merge of adapters does. The average of equal bytes is these bytes.
    All operations give what they give of a plain tensor, and FSDP2 makes plain parameters of it.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> "FrozenBytes":
        """Make it as a parameter that requires no gradient."""
        return super().__new__(cls, data, requires_grad)

    def detach(self) -> "FrozenBytes":  # type: ignore[override]
        """The same memory, which takes bytes alone, too: averages are written there."""
        return Tensor._make_subclass(FrozenBytes, Tensor.detach(self))

    def copy_(self, src: Tensor, non_blocking: bool = False) -> "FrozenBytes":
        """Copy bytes. An average of equal bytes in floating point has them up to a rounding."""
        is_average = src.is_floating_point() and src.dtype.itemsize > 1 and src.shape == self.shape
        if is_average and torch.equal(src.round().to(self.dtype), self):
            return self
        self._check(src)
        return super().copy_(src, non_blocking)  # type: ignore[return-value]

    def requires_grad_(self, requires_grad: bool = True) -> "FrozenBytes":
        """RuntimeError for True, in a sentence that torch's own lacks."""
        if requires_grad:
            raise RuntimeError(
                "FrozenBytes: a frozen weight cannot learn: call requires_grad_() of parameters of "
                "floating point alone, or take weights='both' or None in place of 'fp8' or 'mxfp4'"
            )
        return super().requires_grad_(False)  # type: ignore[return-value]

    @property
    def data(self) -> Tensor:
        """The memory as a plain tensor."""
        return torch._C.TensorBase.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        self._check(value)
        own = self.data
        beside = value.device == own.device and value.shape == own.shape and not own.is_meta
        if beside and value.data_ptr() != own.data_ptr() and not torch.equal(value, own):
            self._refuse("other bytes")
        torch._C.TensorBase.data.__set__(self, value)  # type: ignore[attr-defined]

    def _check(self, new: Tensor) -> None:
        if new.dtype != self.dtype:
            self._refuse(dtype_name(new.dtype))

    def _refuse(self, what: str) -> None:
        raise RuntimeError(
            f"FrozenBytes: bytes of a frozen weight stay as they are, got {what}: load_state_dict "
            "quantizes, adapters stay beside the weight, and averages leave out parameters that "
            "require no gradient"
        )


class Storage(NamedTuple):
    """How a frozen weight's bytes are read."""

    values: torch.dtype  # of the numbers in the bytes
    scale: torch.dtype
    block: tuple[int, int]  # how many bytes [N, K] of the parameter share a scale
    per_entry: int  # how many numbers of a row a byte holds
    quantize: Callable[[Tensor, Recipe | None], Parts]  # a weight [E, N, K] in high precision
    dequantize: Callable[[Tensor, Tensor, torch.dtype], Tensor]


#: The storage for each frozen ``weights`` of layers.
STORAGES = {
    "fp8": Storage(E4M3, torch.float32, (BLOCK, BLOCK), 1, _quantize_blocks, dequantize_blocks),
    "mxfp4": Storage(
        torch.uint8,
        torch.uint8,
        (1, MX_BLOCK // 2),
        2,
        lambda w_ENK, recipe: ops.quantize_mxfp4(w_ENK),
        ops.dequantize_mxfp4,
    ),
}


def as_bytes(parts: Parts) -> Parts:
    """Numbers and scales as parameters and state dicts have them, in the same memory.

    The last dimension of scales is the bytes of one scale. No file of numbers and scales has that
    shape, so a program that knows nothing of bytes notices that it mixes the two.
    """
    q, scale = (local_part(part.detach()).contiguous() for part in parts)
    bits = q.view(torch.uint8), scale.unsqueeze(-1).view(torch.uint8)
    return distributed_like(parts[0], bits[0]), distributed_like(parts[1], bits[1])


def as_numbers(storage: Storage, bits: Parts) -> Parts:
    """Numbers and scales of these bytes, in the same memory."""
    q, scale = map(local_part, bits)
    q = q if storage.values == q.dtype else q.view(storage.values)
    scale = scale if storage.scale == scale.dtype else scale.view(storage.scale)
    return distributed_like(bits[0], q), distributed_like(bits[1], scale.squeeze(-1))


class Frozen(NamedTuple):
    """How one weight of a module is frozen."""

    weights: str  # the key of its Storage
    recipe: Recipe | None  # quantizes high precision that is loaded; MXFP4 has no options
    dtype: torch.dtype  # of the high-precision weight, and of what it is dequantized to

    @property
    def storage(self) -> Storage:
        """Its dtypes and blocks."""
        return STORAGES[self.weights]


class KeepsFrozen(nn.Module):
    """A module some of whose weights may be frozen in few bits; the first of a class's bases.

    A frozen weight is two parameters of uint8 that require no gradient: ``weight``, the numbers'
    bytes, and ``weight_scale_inv``, the scales' bytes. They move, copy, pickle, shard and gather as
    any integers do, and nothing casts them. State dicts have the same bytes under the same names.
    Loading takes these, or numbers and scales as a checkpoint in FP8 or MXFP4 has them, or high
    precision, which it rounds to nearest; a weight that learns takes each of them, too. An
    operation on the bytes computes with bytes. See :class:`FrozenBytes` for what they refuse.

    >>> from grouped_linear import Float8BlockScaling
    >>> class Layer(KeepsFrozen):
    ...     pass
    >>> layer = Layer()
    >>> layer.freeze("weight", torch.ones(4, 32, 16), Float8BlockScaling())  # quantizes
    >>> {name: (p.dtype, list(p.shape)) for name, p in layer.named_parameters()}
    {'weight': (torch.uint8, [4, 32, 16]), 'weight_scale_inv': (torch.uint8, [4, 1, 1, 4])}
    >>> layer.dequantize("weight").dtype
    torch.float32
    """

    _frozen: Mapping[str, Frozen] = {}  # by the parameter's name
    is_transposed = False
    """Whether weights in high precision are [E, K, N], as transformers' experts say of themselves.

    Numbers with scales are [E, N, K] in any case.
    """

    @torch.no_grad()
    def freeze(
        self,
        name: str,
        weight: Tensor | Parts,
        recipe: Recipe | None,
        dtype: torch.dtype | None = None,
        *,
        weights: str = "fp8",
    ) -> None:
        """Make a parameter frozen, or register one.

        Args:
            name: the parameter's; its scales become the parameter ``name_scale_inv``.
            weight: [E, N, K] in high precision, which is quantized; or numbers and scales, for FP8
                [E, N, K] float8_e4m3fn and [E, ceil(N / 128), ceil(K / 128)] float32, for MXFP4
                [E, N, K / 2] and [E, N, K / 32] uint8 (:class:`grouped_linear.ops.Mxfp4Weight`),
                contiguous. They are not copied. DTensors of these are sharded by experts.
            recipe: by which it is quantized.
            dtype: of the weight that these numbers stand for; that of a weight in high precision.
            weights: the key of a storage.

        Raises:
            RuntimeError: for a wrong shape, dtype or device; KeyError for the name of another
                attribute. The module is then as it was.
        """
        if isinstance(weight, Tensor):
            frozen = Frozen(weights, recipe, dtype or weight.dtype)
            parts = quantized(weight, frozen)
        else:
            frozen, parts = Frozen(weights, recipe, dtype or torch.bfloat16), weight
        _check_parts(frozen.storage, *map(local_part, parts))
        names = name, name + SCALE
        if taken := [n for n in names if hasattr(self, n) and n not in self._parameters]:
            raise KeyError(f"attribute {taken[0]!r} already exists")
        for part_name, part in zip(names, as_bytes(parts), strict=True):
            self.register_parameter(part_name, nn.Parameter(part, requires_grad=False))
        self._frozen = {**self._frozen, name: frozen}
        self._guard()

    def _guard(self, to: type[nn.Parameter] = FrozenBytes) -> None:
        """Make frozen weights' parameters ones that refuse numbers, or with ``to`` plain ones."""
        for name in self._frozen:
            for p in map(self._parameters.get, (name, name + SCALE)):
                if type(p) in (nn.Parameter, FrozenBytes):
                    p.__class__ = to  # type: ignore[union-attr]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register, as any assignment does: bytes that a loader assigns refuse numbers, too."""
        super().register_parameter(name, param)
        self._guard()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._guard()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KeepsFrozen":
        """Apply fn as nn.Module does; frozen bytes do not refuse its results."""
        self._guard(nn.Parameter)
        try:
            super()._apply(fn, recurse)
        finally:
            self._guard()
        return self

    def frozen_weight(self, name: str) -> QuantizedWeight | None:
        """Numbers and scales of a frozen weight, in the parameters' memory; None of another.

        A backward that reads the weight transposed makes that for itself: a copy that is kept would
        not follow when the bytes are written. RuntimeError if the parameters are no bytes, and
        under a parametrization.
        """
        if name not in self._frozen:
            return None
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise RuntimeError(
                f"{type(self).__name__}: torch.jit.trace records no frozen weight: use "
                "torch.export or torch.compile"
            )
        if name not in self._parameters:
            raise RuntimeError(
                f"{type(self).__name__}: {name} is frozen, and a parametrization, as PEFT's "
                "adapters are, or pruning would compute with its bytes: give layers "
                "lora=Lora(...), and models of transformers use_grouped_adapters(model)"
            )
        bits = self._parts(name)
        if bits[0].dtype != torch.uint8:  # substituted, as by functional_call
            raise RuntimeError(
                f"{type(self).__name__}: {name} is frozen in uint8, got "
                f"{dtype_name(bits[0].dtype)}: load_state_dict quantizes"
            )
        return QuantizedWeight(*as_numbers(self._frozen[name].storage, bits), None)

    def weight_shape(self, name: str) -> tuple[int, int, int]:
        """[E, N, K] of a weight, whatever its parameter holds."""
        E, N, entries = getattr(self, name).shape
        frozen = self._frozen.get(name)
        return E, N, entries if frozen is None else entries * frozen.storage.per_entry

    def dequantize(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A frozen weight's numbers times their scales, rounded once, in a plain tensor.

        Args:
            name: the parameter's.
            dtype: bfloat16, float16 or float32; that of the weight which was frozen by default.

        Returns:
            [E, N, K], or [E, K, N] where high precision is transposed; of a sharded weight a
            DTensor.

        Raises:
            ValueError: for a name that is no frozen weight's.
        """
        if name not in self._frozen:
            raise ValueError(
                f"{type(self).__name__}: dequantize reads frozen weights, and {name!r} is none: "
                f"read it directly; frozen here: {', '.join(self._frozen) or 'nothing'}"
            )
        own, frozen = self._parameters[name], self._frozen[name]
        w = frozen.storage.dequantize(*self._local_parts(name), dtype or frozen.dtype)
        return distributed_like(own, w.mT if self.is_transposed else w)

    @torch.no_grad()
    def squared_error(self, name: str, w: Any) -> Tensor:
        """The squared norms of a frozen weight's error and of ``w`` [E, N, K], which was frozen.

        It sums over the experts on this process, one at a time: a float32 copy has one expert.
        """
        (values, scale), frozen = self._local_parts(name), self._frozen[name]
        dequantize = frozen.storage.dequantize
        squares = torch.zeros(2, dtype=torch.float64, device=values.device)
        for e, w_NK in enumerate(local_part(w.detach())):
            exact = w_NK.float()
            error = dequantize(values[e : e + 1], scale[e : e + 1], torch.float32)[0].sub_(exact)
            squares += torch.stack([error.norm(), exact.norm()]).double().square()
        return squares

    @contextmanager
    def drawn(self, name: str, weight: Any) -> Iterator[Any]:
        """Yield the tensor to initialise: the weight, or a plain one that is then frozen there.

        So a frozen weight starts as the quantized numbers that a plain weight would have.
        """
        if name not in self._frozen:
            yield weight
            return
        frozen = self._frozen[name]
        w = torch.empty_like(weight, dtype=frozen.dtype)
        if frozen.storage.per_entry > 1:  # a DTensor, too: repeat keeps its experts' sharding
            w = w.repeat(1, 1, frozen.storage.per_entry)
        yield w
        self.overwrite_frozen(name, w)

    @torch.no_grad()
    def overwrite_frozen(self, name: str, w: Tensor) -> None:
        """Quantize w [E, N, K], a DTensor where the parameter is one, into the same memory."""
        frozen = self._frozen[name]
        for bits, new in zip(self._parts(name), as_bytes(quantized(w, frozen)), strict=True):
            bits.copy_(new)

    def _local_parts(self, name: str) -> Parts:
        """Numbers and scales of the experts on this process."""
        weight: Any = self.frozen_weight(name)
        return local_part(weight.values), local_part(weight.scale)

    def _parts(self, name: str) -> tuple[Any, Any]:
        return self._parameters[name], self._parameters[name + SCALE]  # 1 us each by getattr

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, p in self._parameters.items():
            key = prefix + name
            if type(p) is FrozenBytes and not keep_vars:
                destination[key] = Tensor.detach(p)  # a plain tensor, for those who write files
            elif key in destination:
                w, local = destination[key], local_part(destination[key])
                if isinstance(local, GroupedTensorWithMaster) and not isinstance(w, nn.Parameter):
                    destination[key] = distributed_like(w, local.for_state_dict(), w.shape)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        metadata, missing, error_msgs = args[0], args[2], args[4]
        scales, refused = [name + SCALE for name in self._frozen], set[str]()
        for name, own in self._parameters.items():
            key = prefix + name
            if own is None or not isinstance(state_dict.get(key), Tensor):
                continue
            if name in scales:  # taken with their numbers
                if not isinstance(state_dict.get(key.removesuffix(SCALE)), Tensor):
                    state_dict.pop(key)
                    error_msgs.append(f"{key}: scales come without their numbers.")
                continue
            try:
                self._take(name, own, key, state_dict)
            except (RuntimeError, ValueError) as error:
                error_msgs.append(f"{key}: {error}.")
                refused |= {key, key + SCALE}
                state_dict.pop(key)  # numbers without their scales are no weight
                state_dict.pop(key + SCALE, None)
                continue
            if metadata.get("assign_to_params_buffers"):
                state_dict[key] = as_master(own, state_dict[key])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        missing[:] = [key for key in missing if key not in refused]  # they are there, and unfit
        self._guard()

    def _take(self, name: str, own: Any, key: str, state_dict: dict[str, Any]) -> None:
        """Replace a weight in a state that is being loaded by what its parameter holds."""
        frozen, w, scale = self._frozen.get(name), state_dict[key], state_dict.get(key + SCALE)
        if frozen is None and w.dtype == own.dtype:
            return
        weights = _weights_of_state(w, scale)
        storage = STORAGES[(weights or "fp8") if frozen is None else frozen.weights]
        if weights is not None and storage is STORAGES[weights]:
            parts = _parts_of_state(w, scale, storage, key + SCALE)
            if frozen is not None:
                state_dict[key], state_dict[key + SCALE] = self._fitting(name, parts)
                return
            del state_dict[key + SCALE]
            dtype = own.dtype if own.dtype in ACTIVATIONS else torch.float32
            q, local_scale = map(local_part, parts)
            _check_parts(storage, q, local_scale)
            one = q.dim() == 2  # of one expert
            q, local_scale = (q[None], local_scale[None]) if one else (q, local_scale)
            plain = storage.dequantize(q, local_scale, dtype)
            plain = plain[0] if one else plain
            plain = plain.mT.contiguous() if self.is_transposed else plain
            state_dict[key] = distributed_like(w, plain)
        elif w.dtype.itemsize == 1 or (frozen is not None and not w.is_floating_point()):
            fits, got = dtype_name(storage.values), dtype_name(w.dtype)
            got += " without" if w.dtype == torch.uint8 and scale is None else ""
            if weights is not None and w.dtype == getattr(scale, "dtype", None):  # a layer's bytes
                fits = "MXFP4" if weights == "fp8" else "FP8"
                got = f"{weights.upper()}: load what dequantize(name) of its layer returns"
            raise ValueError(f"it must be in high precision, or {fits} with scales, got {got}")
        elif frozen is not None:
            # torch.distributed.checkpoint completes a whole state by the module's: own scales.
            if scale is not None:
                given, kept = local_part(scale), local_part(getattr(self, name + SCALE))
                if given.shape != kept.shape or given.data_ptr() != kept.data_ptr():
                    raise ValueError(
                        f"{dtype_name(w.dtype)} comes with scales, {key + SCALE}: leave them out, "
                        "or load the bytes as they were before a cast"
                    )
            if is_dtensor(w) != is_dtensor(own):
                raise ValueError("it is a DTensor where the parameter is none, or the other way")
            w = w.redistribute(own.device_mesh, own.placements) if is_dtensor(own) else w
            w = w.to(own.device) if not own.is_meta else w
            w = w.mT if self.is_transposed else w
            state_dict[key], state_dict[key + SCALE] = self._fitting(name, quantized(w, frozen))

    def _fitting(self, name: str, parts: Parts) -> Parts:
        """The bits of numbers and scales to be loaded; ValueError unless both fit.

        torch loads each parameter by itself, and would leave new numbers beside old scales.
        """
        own_parts, bits = self._parts(name), as_bytes(parts)
        for part_name, own, new in zip((name, name + SCALE), own_parts, bits, strict=True):
            if new.shape != own.shape:
                raise ValueError(f"{part_name} must be {list(own.shape)}, got {list(new.shape)}")
        if bits[0].is_meta != bits[1].is_meta:
            raise ValueError("of numbers and scales one is on the meta device and the other not")
        return bits


def frozen_of(module: Any) -> Mapping[str, Frozen]:
    """How weights of a module are frozen, by the parameter's name; empty of any other module."""
    # The attribute says nothing: others' modules have one, and wrappers return the inner module's.
    return module._frozen if isinstance(module, KeepsFrozen) else {}


def quantized(w: Any, frozen: Frozen) -> Parts:
    """Numbers and scales of a weight [E, N, K] in high precision; DTensors of a DTensor."""
    local = local_part(w.detach())
    local = local.to(local.dtype if local.dtype in ACTIVATIONS else torch.float32).contiguous()
    parts = frozen.storage.quantize(local, frozen.recipe)
    q, scale = (distributed_like(w, part) for part in parts)
    return q, scale


def _weights_of_state(w: Any, scale: Any) -> str | None:
    """How a weight in a state dict is kept, "fp8" or "mxfp4"; None in high precision."""
    if w.dtype == E4M3:
        return "fp8"
    if w.dtype == torch.uint8 and isinstance(scale, Tensor):
        return "fp8" if scale.dim() > w.dim() and scale.size(-1) > 1 else "mxfp4"
    if w.dtype == torch.int8 and getattr(scale, "dtype", None) == torch.float8_e8m0fnu:
        return "mxfp4"  # as DeepSeek-V4's files have it
    return None


def _parts_of_state(w: Any, scale: Any, storage: Storage, name: str) -> Parts:
    """Numbers and scales in a state dict, which are bytes or in a dtype that a file may have."""
    if not isinstance(scale, Tensor):
        raise ValueError(f"{dtype_name(w.dtype)} needs scales, {name}, which are missing")
    if w.dtype == scale.dtype == torch.uint8 and scale.dim() > w.dim():
        return as_numbers(storage, (w, scale))
    if storage.scale.is_floating_point:
        kind, fits = "float", scale.is_floating_point() and scale.dtype.itemsize > 1
    else:
        kind, fits = "uint8", scale.dtype == torch.uint8
    if not fits and scale.dtype != torch.float8_e8m0fnu:
        raise ValueError(
            f"{name} must be scales in {kind} or float8_e8m0fnu, got {dtype_name(scale.dtype)}"
        )
    return w.view(storage.values), scale.float() if kind == "float" else scale.view(torch.uint8)


def _check_parts(storage: Storage, q: Tensor, scale: Tensor) -> None:
    rules = Rules("frozen weight", numbers=q, scale=scale)
    rules.check(q.dim() in (2, 3), lambda: f"numbers must be 2-D or 3-D, got {q.dim()}-D")
    *lead, N, K = q.shape
    rules.dtype("numbers", storage.values)
    rules.dtype("scale", storage.scale)
    rules.device("scale", "numbers")
    shape = [*lead, ceil_div(N, storage.block[0]), ceil_div(K, storage.block[1])]
    rules.check(
        list(scale.shape) == shape, lambda: f"scale must be {shape}, got {list(scale.shape)}"
    )
