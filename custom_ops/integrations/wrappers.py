# SPDX-License-Identifier: Apache-2.0
"""Modules that other libraries put around a module and that call it: the module inside of them."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

#: By a wrapper's class, or a base of it, the submodule that it calls. Names, so that nothing is
#: imported for them. FSDP2 is none: it changes a module's class and leaves the module where it is.
WRAPPERS = {
    "OptimizedModule": "_orig_mod",  # torch.compile
    "ActivationWrapper": "_checkpoint_wrapped_module",  # checkpoint_wrapper, offload_wrapper
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "PeftModel": "base_model",
    "BaseTuner": "model",  # PEFT's LoraModel and others
    "BaseTunerLayer": "base_layer",  # PEFT's layers and its ParamWrapper
}


def _wrapped(module: nn.Module) -> nn.Module | None:
    """The module that a wrapper calls; None of any other module."""
    children = module._modules
    for cls in type(module).__mro__:
        child = children.get(WRAPPERS.get(cls.__name__, ""))
        if child is not None:
            return child
    copies = children.get("modules_to_save")  # of PEFT's ModulesToSaveWrapper, by adapter
    if copies is None or "original_module" not in children:
        return None
    active = getattr(module, "active_adapters", [])
    if isinstance(copies, nn.ModuleDict) and not getattr(module, "disable_adapters", False):
        for adapter in active:
            if adapter in copies:
                return copies[adapter]
    return children["original_module"]


def adapted(model: nn.Module) -> set[nn.Module]:
    """The modules of a model that PEFT's layers are around, which may add adapters to them."""
    return {
        unwrapped(module)
        for module in model.modules()
        if any(cls.__name__ == "BaseTunerLayer" for cls in type(module).__mro__)
    }


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that computes: that inside of all wrappers, or the module itself.

    It is the active one of the copies that PEFT's ``modules_to_save`` makes.
    """
    while (inside := _wrapped(module)) is not None:
        module = inside
    return module


def sizes_before_fsdp(model: nn.Module) -> dict[tuple[nn.Module, str], torch.Size]:
    """The sizes on this process, when FSDP2 has gathered them, of the parameters that it shards.

    A DTensor does not show which dimensions of its mesh FSDP2 gathers: of experts that are spread
    it looks the same. torch has no public name for this.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes half a second
    found = {}
    for module in model.modules():
        if fsdp is None or not isinstance(module, fsdp.FSDPModule):
            continue
        try:
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.13
            for group in [state._fsdp_param_group] if groups is None else groups:
                for p in () if group is None else group.fsdp_params:
                    found[p._module_info.module, p._module_info.param_name] = p._orig_size
        except AttributeError as error:
            raise RuntimeError(
                f"watch: FSDP2 of torch {torch.__version__} keeps sizes of parameters under names "
                f"that are not known here ({error}): watch the model before fully_shard"
            ) from None
    return found


def named_unwrapped(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As ``named_modules``, of the model without wrappers: each name is that of the plain model."""
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        module = unwrapped(module)
        if module in seen:
            return
        seen.add(module)
        yield name, module
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)

    return walk("", model)
