"""What a layer does differently if its weight is a GroupedTensor.

`layer` and `op` are the names that error messages begin with.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grouped_linear.meta_kernels.rules import ACTIVATIONS
from grouped_linear.quantized import block_math
from grouped_linear.quantized.block_math import contiguous_stride
from grouped_linear.quantized.gathered import GatheredWeight
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.with_master import GroupedTensorWithMaster, keeps_beside_master
from grouped_linear.recipes import Float8BlockScaling, QuantizedWeight, Recipe

#: How a layer keeps its weights: plain (None), in high precision and FP8, or in FP8 alone.
Weights = Literal["both", "fp8"] | None
#: The tensors that have FP8 numbers already.
KEPT = GroupedTensor, GroupedTensorWithMaster, GatheredWeight


def is_dtensor(t: Any) -> bool:
    """Whether t is a DTensor, by its type, which Dynamo sees; importing DTensor takes 0.5 s."""
    if isinstance(t, KEPT):  # Dynamo of torch 2.11 has no class of one that it made
        return False
    if type(t) in (Tensor, nn.Parameter):  # by ==: it finds "is" false of what Parameter.to returns
        return False
    return hasattr(type(t), "to_local")


def local_part(t: Any) -> Any:
    """The part of a DTensor that this process has; another tensor, or None, as it is."""
    return t.to_local() if is_dtensor(t) else t


def is_quantized(w: Any) -> bool:
    """Whether a weight, or this process's part of it, is in FP8 alone."""
    local = local_part(w)
    return isinstance(local, GroupedTensor)


def check_weights_kept(
    owner: str,
    recipe: Recipe | None,
    weights: Any,
    stochastic_rounding: Any = None,
    cache_weights: bool = False,
    columnwise: Any = None,
    fuse_wgrad_accumulation: bool = False,
) -> None:
    """Raise ValueError for an option ``weights`` that is none, or that others exclude.

    ``stochastic_rounding`` and ``columnwise`` are of weights in FP8 alone; None for their defaults.
    """
    if weights not in (None, "both", "fp8"):
        raise ValueError(f"{owner}: weights must be None, 'both' or 'fp8', got {weights!r}")
    if weights == "fp8" and not isinstance(recipe, Float8BlockScaling):
        raise ValueError(
            f"{owner}: weights='fp8' needs the recipe Float8BlockScaling, got {recipe!r}"
        )
    if weights == "both" and (recipe is None or not keeps_beside_master(recipe)):
        raise ValueError(
            f"{owner}: weights='both' needs the recipe Float8BlockScaling, Float8CurrentScaling or "
            f"one with a weight format of your own, got {recipe!r}"
        )
    if weights is not None and cache_weights:
        raise ValueError(
            f"{owner}: cache_weights keeps what weights={weights!r} has already: choose one of them"
        )
    if weights == "fp8" and fuse_wgrad_accumulation:
        raise ValueError(
            f"{owner}: weights='fp8' is frozen and has no gradient to accumulate: "
            "weights='both' learns"
        )
    flags = {"stochastic_rounding": stochastic_rounding, "columnwise": columnwise}
    for name, flag in flags.items():
        if flag is not None and not isinstance(flag, bool):
            raise ValueError(f"{owner}: {name} must be None, True or False, got {flag!r}")
        if flag and weights != "fp8":
            raise ValueError(f"{owner}: {name} needs weights='fp8'")


def keep_weight(
    w: Tensor,
    weights: Weights,
    recipe: Recipe | None,
    stochastic_rounding: bool | None = None,
    columnwise: bool = True,
) -> Tensor:
    """A weight [E, N, K] as the option ``weights`` keeps it; w's memory is used where it can be."""
    if weights is None:
        return w
    if weights == "both":
        return GroupedTensorWithMaster.quantize(w, recipe)
    stochastic = stochastic_rounding is not False
    return GroupedTensor.quantize(w, recipe, columnwise=columnwise, stochastic_rounding=stochastic)


def stored_weight(op: str, w: Any, recipe: Recipe | None) -> QuantizedWeight | None:
    """The parts of a quantized weight that GEMMs read; None for a weight that a call quantizes.

    A call quantizes a weight with its master where the recipe's format is another than the
    weight's. ValueError for a recipe whose weights have scales of another kind than a weight that
    is FP8 alone, RuntimeError under torch.jit.trace.
    """
    if not isinstance(w, KEPT):
        return None
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise RuntimeError(
            f"{op}: torch.jit.trace records no quantized weight: use torch.export or torch.compile"
        )
    if isinstance(w, GroupedTensorWithMaster):
        # A view, as of a weight that is stored transposed, has no parts of its own.
        same = recipe is not None and recipe.weight == w.recipe.weight
        return w.quantized_weight() if same and w.is_whole else None
    if recipe is None or recipe.weight.scaling != w.recipe.weight.scaling:
        name = type(w.recipe).__name__
        raise ValueError(f"{op}: a quantized weight needs the recipe {name}, got {recipe!r}")
    return w.quantized_weight()


def quantized_as(own: Any, w: Any) -> Any:
    """A weight to be loaded into the parameter `own`, rounded to nearest if that is quantized.

    Copying it then moves bytes. ``copy_`` of plain numbers cannot tell a load from an optimizer's
    step, and rounds stochastically. `w` is quantized, in high precision, or a DTensor of either.
    """
    quantized, loaded = local_part(own), local_part(w)
    if not isinstance(quantized, GroupedTensor) or isinstance(loaded, GroupedTensor):
        return w
    if is_dtensor(own) != is_dtensor(w):  # copy_ reports it
        return w
    if is_dtensor(own):
        loaded = w.redistribute(own.device_mesh, own.placements).to_local()
    dtype = loaded.dtype if loaded.dtype in ACTIVATIONS else torch.float32
    loaded = (
        loaded.numbers(dtype)
        if isinstance(loaded, (GroupedTensor, GroupedTensorWithMaster))
        else loaded.to(dtype)
    )
    loaded = loaded.contiguous()
    experts = loaded.view(-1, *loaded.shape[-2:])
    t: Tensor = GroupedTensor.quantize(experts, quantized.recipe, columnwise=False)
    t = t if quantized.dim() == 3 else t[0]
    return distributed_like(own, t) if is_dtensor(own) else t


@contextmanager
def drawn(weight: Any) -> Iterator[Any]:
    """Yield the tensor to initialise: the weight, or a plain one that is then quantized into it.

    So a quantized weight starts as the quantized numbers that a plain weight would have.
    """
    if not is_quantized(weight):
        yield weight
        return
    numbers = torch.empty_like(weight)
    yield numbers
    weight.copy_(quantized_as(weight, numbers))


def convert_loaded(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Convert a state that is being loaded, in place, to what the module's own parameters are.

    For a quantized parameter, high precision is rounded to nearest. With ``assign=True``, which
    torch's ``metadata`` tells, a quantized weight is dequantized for a plain parameter, and takes
    the options of a quantized one with the bytes that it has; a parameter with its master takes
    a copy of the tensor as that. Without ``assign=True``, ``copy_`` does all this.
    """
    assign = metadata.get("assign_to_params_buffers")
    for name, own in module.named_parameters(recurse=False):
        w = state_dict.get(prefix + name)
        if not isinstance(w, Tensor) or w.shape != own.shape:  # load_state_dict reports it
            continue
        if not assign and not w.is_meta and not own.is_meta:
            w = w.to(own.device) if is_quantized(own) else w
        w = quantized_as(own, w)
        if assign and isinstance(own, GroupedTensorWithMaster):
            w = w.numbers(w.dtype) if isinstance(w, (GroupedTensor, GroupedTensorWithMaster)) else w
            if w.dtype in ACTIVATIONS:  # a copy: a write through the loaded tensor would not show
                w = own.of(w.clone(memory_format=torch.contiguous_format))
        elif assign and isinstance(w, (GroupedTensor, GroupedTensorWithMaster)):
            if isinstance(own, GroupedTensor):
                q_t = w.q_t if w.q_t is not None or own.q_t is None else block_math.transposed(w.q)
                w = GroupedTensor(w.q, w.scale, None if own.q_t is None else q_t, own.metadata)
            else:
                w = w.dequantize()
        state_dict[prefix + name] = w


def distributed_like(like: Any, local: Tensor) -> Any:
    """A DTensor of this process's part, sharded by experts as `like` is."""
    return type(like).from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape[:1] + local.shape[1:],
        stride=contiguous_stride(like.shape[:1] + local.shape[1:]),
    )
