"""Quantized parameters in state dicts: plain tensors, as other checkpoints have them.

A parameter with its master is there under its own name, in high precision. One that is FP8 alone,
``name``, is there as ``name``, its e4m3 numbers, and ``name_scale_inv``, its float32 scales.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear.meta_kernels.rules import ACTIVATIONS, E4M3, dtype_name
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import convert_loaded, distributed_like, is_dtensor, local_part
from grouped_linear.quantized.with_master import GroupedTensorWithMaster

SCALE = "_scale_inv"


def scales_of(w: Any) -> Tensor | None:
    """The scales of a quantized weight, of this process's part if it is sharded; else None."""
    w = local_part(w)
    return w.scale if isinstance(w, GroupedTensor) else None


def split_quantized(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace the module's own quantized parameters in its state dict by their two parts.

    The parts share memory with the parameter, as every tensor of a state dict does. Parameters
    themselves, of ``keep_vars=True``, stay.
    """
    for name in module._parameters:
        w: Any = state_dict.get(prefix + name)
        if isinstance(w, nn.Parameter):
            continue
        if isinstance(w, GroupedTensorWithMaster):
            state_dict[prefix + name] = w.for_state_dict()
        elif isinstance(w, GroupedTensor) and w.shape == w.q.shape:
            state_dict[prefix + name], state_dict[prefix + name + SCALE] = w.q, w.scale
        elif is_dtensor(w):
            local = w.to_local()
            if isinstance(local, GroupedTensorWithMaster):
                state_dict[prefix + name] = distributed_like(w, local.for_state_dict())
            elif isinstance(local, GroupedTensor):
                state_dict[prefix + name] = sent_as_bytes(distributed_like(w, local.q))
                state_dict[prefix + name + SCALE] = distributed_like(w, local.scale)


def join_quantized(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]
) -> None:
    """Replace the two parts of quantized weights in a state dict by one quantized tensor.

    Parts that do not fit are removed, and `error_msgs` gets a sentence.
    """
    own_keys = [k for k in state_dict if k.startswith(prefix) and "." not in k[len(prefix) :]]
    for key in own_keys:
        q = state_dict.get(key)
        if not isinstance(q, Tensor) or q.dtype != E4M3:
            continue
        scale = state_dict.pop(key + SCALE, None)
        if not isinstance(scale, Tensor):
            error_msgs.append(
                f"{key} is {dtype_name(E4M3)}, and there is no {key}{SCALE}, which "
                "broadcast_from_rank0 of torch.distributed.checkpoint leaves out."
            )
            del state_dict[key]  # e4m3 numbers without scales are no weight
            continue
        try:
            own = module._parameters.get(key.removeprefix(prefix))
            state_dict[key] = _joined(own, module, q, scale)
        except (RuntimeError, ValueError) as error:
            error_msgs.append(f"{key}: {error}.")
            del state_dict[key]


class SavesQuantized(nn.Module):
    """A module that saves and loads its quantized parameters by their parts.

    A base of :class:`grouped_linear.GroupedMLP`, and of converted classes beside their own. Such a
    class has a property ``name_scale_inv`` for each parameter, as :func:`scale_properties` makes.
    """

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        split_quantized(self, destination, prefix)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        join_quantized(self, state_dict, prefix, args[4])  # args[4] takes error messages
        convert_loaded(self, state_dict, prefix, args[0])  # args[0] is the local metadata
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def scale_properties(names: Iterable[str]) -> dict[str, Any]:
    """``name_scale_inv`` of each parameter: its scales where it is quantized, or None.

    torch.distributed.checkpoint looks up the keys of a state dict as attributes of the module.
    """

    def of(name: str) -> property:
        def scale_inv(self: nn.Module) -> Tensor | None:
            return scales_of(self._parameters.get(name))

        return property(scale_inv, doc=f"The scales of a quantized {name}, or None.")

    return {name + SCALE: of(name) for name in names}


def _joined(own: Tensor | None, module: nn.Module, q: Any, scale: Any) -> Any:
    like = local_part(next(module.parameters(recurse=False)) if own is None else own)
    options = {"dtype": like.dtype, "columnwise": False}
    if isinstance(like, GroupedTensor):
        options["recipe"] = like.recipe
        options["stochastic_rounding"] = like.stochastic_rounding
    if is_dtensor(q):
        if not is_dtensor(scale):  # set_model_state_dict distributes parameters alone
            scale = _part_of_whole(q, scale)
        return distributed_like(q, _quantized(q.to_local(), scale.to_local(), options))
    return _quantized(q, scale, options)


def _part_of_whole(like: Any, whole: Tensor) -> Any:
    """A DTensor of this process's part of a tensor that each process has; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor  # `like` has imported it

    whole = whole.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _quantized(q: Tensor, scale: Tensor, options: dict[str, Any]) -> GroupedTensor:
    # Some checkpoints have scales in BF16. They convert to float32 exactly.
    return GroupedTensor.from_parts(q.contiguous(), scale.float().contiguous(), **options)


def for_state_dict(w: Any) -> Any:
    """A tensor of a state dict; a weight with its master as one that can be saved anywhere."""
    local = local_part(w)
    if isinstance(w, nn.Parameter) or not isinstance(local, GroupedTensorWithMaster):
        return w
    plain = local.for_state_dict()
    return distributed_like(w, plain) if is_dtensor(w) else plain


def as_master(own: Any, w: Tensor) -> Tensor:
    """What ``assign=True`` puts in a parameter's place: for a master, a copy kept as that is.

    A write through the loaded tensor itself would not show.
    """
    if not isinstance(own, GroupedTensorWithMaster) or w.shape != own.shape:
        return w
    w = w.numbers(w.dtype) if isinstance(w, GroupedTensor) else w
    return own.of(w.clone(memory_format=torch.contiguous_format)) if w.dtype in ACTIVATIONS else w


def sent_as_bytes(q: Any) -> Any:
    """A DTensor of e4m3 numbers whose parts are gathered as bytes on CPUs."""
    if not is_dtensor(q) or q.device.type != "cpu":
        return q
    dtensor: Any = type(q)
    cls = _class_sent_as_bytes(dtensor)
    return cls(q.to_local(), q._spec, requires_grad=False)


@cache
def _class_sent_as_bytes(dtensor: Any) -> Any:
    """A subclass of DTensor, which is not imported here: that takes 0.5 s."""

    class Float8DTensor(dtensor):  # type: ignore[misc]
        """Collectives on CPUs know no float8."""

        def redistribute(
            self, device_mesh: Any = None, placements: Any = None, **options: Any
        ) -> Any:
            sent = _viewed(self, dtensor, torch.uint8)
            return _viewed(sent.redistribute(device_mesh, placements, **options), dtensor, E4M3)

        def full_tensor(self, **options: Any) -> Tensor:
            whole: Tensor = _viewed(self, dtensor, torch.uint8).full_tensor(**options)
            return whole.view(E4M3)

    return Float8DTensor


def _viewed(t: Any, dtensor: Any, dtype: torch.dtype) -> Any:
    """A DTensor of the same bytes."""
    return dtensor.from_local(
        t.to_local().view(dtype),
        t.device_mesh,
        t.placements,
        run_check=False,
        shape=t.shape,
        stride=t.stride(),
    )
