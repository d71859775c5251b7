# SPDX-License-Identifier: Apache-2.0
"""How a layer keeps its weights: the option, its checks, what GEMMs read and state dicts have.

In a state dict a weight with its master is in high precision. One that is frozen, ``name``, is
there as the bytes of its numbers, and as ``name_scale_inv``, those of its scales. `owner` and `op`
are the names that error messages begin with.
"""

import weakref
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from grouped_linear.meta_kernels.rules import ACTIVATIONS
from grouped_linear.quantized.gathered import GatheredWeight
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import Float8BlockScaling, Recipe
from grouped_linear.recipes.quantize_weight import QuantizedWeight
from grouped_linear.recipes.recipe import UNQUANTIZED

#: How a layer keeps its weights: plain (None), in high precision and FP8, or frozen in few bits.
Weights = Literal["both", "fp8", "mxfp4"] | None
#: The recipes that each way to keep weights needs, as errors name them.
NEEDS = {
    "both": "the recipe Float8BlockScaling, Float8CurrentScaling or one whose weight format is a "
    "function or Format(qat='mxfp4')",
    "fp8": "the recipe Float8BlockScaling",
    "mxfp4": "no recipe, Float8BlockScaling or MXFP8BlockScaling",
}
SCALE = "_scale_inv"
#: The tensors that have FP8 numbers already.
KEPT = GroupedTensorWithMaster, GatheredWeight


def is_dtensor(t: Any) -> bool:
    """Whether t is a DTensor, by its type, which Dynamo sees; importing DTensor takes 0.5 s."""
    if isinstance(t, KEPT):  # Dynamo of torch 2.11 has no class of a tensor it made
        return False
    if type(t) in (Tensor, nn.Parameter):  # by ==: it finds "is" false of what Parameter.to returns
        return False
    return hasattr(type(t), "to_local")


def local_part(t: Any) -> Any:
    """The part of a DTensor that this process has; another tensor, or None, as it is."""
    return t.to_local() if is_dtensor(t) else t


def recipe_for(recipe: Recipe | None, weights: Weights) -> Recipe | None:
    """The recipe for ``weights``: Float8BlockScaling if they need one and none is given."""
    return Float8BlockScaling() if recipe is None and weights in ("both", "fp8") else recipe


def check_weights_kept(
    owner: str,
    recipe: Recipe | None,
    weights: Any,
    cache_weights: bool = False,
    fuse_wgrad_accumulation: bool = False,
) -> None:
    """Raise ValueError for an unknown option ``weights``, or one that other options exclude."""
    if weights not in (None, *NEEDS):
        raise ValueError(
            f"{owner}: weights must be None, 'both', 'fp8' or 'mxfp4', got {weights!r}"
        )
    if weights in ("fp8", "mxfp4") and recipe is not None and recipe.weight.qat is not None:
        raise ValueError(
            f"{owner}: weights={weights!r} is frozen, so nothing learns in MXFP4: leave qat out of "
            "the recipe, or load the weights in high precision (dequantize=True)"
        )
    can = weights in (None, "mxfp4") if recipe is None else recipe.keeps_weights_as(weights)
    if weights is not None and not can:
        raise ValueError(f"{owner}: weights={weights!r} needs {NEEDS[weights]}, got {recipe!r}")
    if weights is not None and cache_weights:
        raise ValueError(
            f"{owner}: cache_weights keeps what weights={weights!r} has already: choose one of them"
        )
    if weights in ("fp8", "mxfp4") and fuse_wgrad_accumulation:
        raise ValueError(
            f"{owner}: weights={weights!r} is frozen and has no gradient: leave "
            "fuse_wgrad_accumulation out"
        )


def keep_weight(w: Tensor, weights: Weights, recipe: Recipe | None) -> Tensor:
    """A weight that learns as the option keeps it, None or "both"; w's memory is used."""
    return GroupedTensorWithMaster.quantize(w, recipe) if weights == "both" else w


def stored_weight(op: str, w: Any, recipe: Recipe) -> QuantizedWeight | None:
    """The parts of a quantized weight that GEMMs read; None for a weight that a call quantizes.

    A call quantizes a weight with its master where the recipe's format is another than the
    weight's. ValueError for a recipe whose weights are of another kind than a weight that FSDP2
    gathered in few bits, RuntimeError under torch.jit.trace.
    """
    if not isinstance(w, KEPT):
        return None
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise RuntimeError(
            f"{op}: torch.jit.trace records no quantized weight: use torch.export or torch.compile"
        )
    if isinstance(w, GroupedTensorWithMaster):
        # A view, as of a weight that is stored transposed, has no parts of its own.
        same = recipe.weight.compared == w.format_options
        return w.parts_if_whole() if same else None
    if (recipe.weight.scaling, recipe.weight.qat) != w.kind:
        got = None if recipe is UNQUANTIZED else recipe
        raise ValueError(
            f"{op}: a weight that FSDP2 gathers under {w.recipe!r} needs such a recipe, got "
            f"{got!r}: convert with weights='both' again before it is sharded"
        )
    return w.quantized_weight()


def is_by_experts(w: Any) -> bool:
    """Whether a DTensor [E, ...] has whole experts on each process.

    The placements of FSDP2 beside expert parallelism are no ``Shard``, but have a dimension, too.
    """
    return all(getattr(p, "dim", 0) == 0 for p in w.placements)


def distributed_like(like: Any, local: Tensor, shape: torch.Size | None = None) -> Any:
    """A DTensor of a process's part, sharded as `like`; the part where `like` is no DTensor.

    Its shape is that of whole experts, if it is not given. ValueError if these are split.
    """
    if not is_dtensor(like):
        return local
    if shape is None and not is_by_experts(like):
        raise ValueError(
            f"a weight in few bits is split inside of each expert, {like.placements}: shard it by "
            "experts, dimension 0"
        )
    shape = like.shape[:1] + local.shape[1:] if shape is None else shape
    return type(like).from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def as_master(own: Any, w: Tensor) -> Tensor:
    """The parameter for ``assign=True``: in place of a master a copy with FP8 numbers of its own.

    A write through the loaded tensor itself would not show. Layers that share a master on the meta
    device share the copy of one tensor.
    """
    master, local = local_part(own), local_part(w)
    if not isinstance(master, GroupedTensorWithMaster) or local.shape != master.shape:
        return w
    given: Any = None
    if master.is_meta and not (local.is_meta or local.is_inference()):
        numbers = local.numbers if isinstance(local, GroupedTensorWithMaster) else local
        storage = StorageWeakRef(numbers.untyped_storage())
        given = storage, numbers._version, numbers.storage_offset(), numbers.stride(), local.dtype
        shared = master.taken[1]() if master.taken is not None else None
        if shared is not None and master.taken[0] == given:
            return shared
    plain = local.dequantize() if isinstance(local, GroupedTensorWithMaster) else local
    dtype = plain.dtype if plain.dtype in ACTIVATIONS else master.dtype
    kept = master.of(plain.to(dtype, copy=True, memory_format=torch.contiguous_format))
    made = nn.Parameter(distributed_like(w, kept, w.shape), own.requires_grad)
    if given is not None:
        master.taken = given, weakref.ref(made)  # whoever keeps the meta parameter keeps no memory
    return made
