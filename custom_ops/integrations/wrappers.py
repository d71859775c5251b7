# SPDX-License-Identifier: Apache-2.0
"""Modules that other libraries put around a module and that call it: the module inside of them."""

from collections.abc import Iterator

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


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that computes: that inside of all wrappers, or the module itself.

    It is the active one of the copies that PEFT's ``modules_to_save`` makes.
    """
    while (inside := _wrapped(module)) is not None:
        module = inside
    return module


def plain_name(name: str) -> str:
    """A tensor's name in a state dict, as the model has it that torch.compile has not wrapped."""
    return name.replace(WRAPPERS["OptimizedModule"] + ".", "")


def named_unwrapped(
    model: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """As ``named_modules``, of the model without wrappers: each name is that of the plain model."""
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        module = unwrapped(module)
        if module in seen:
            return
        if remove_duplicate:
            seen.add(module)
        yield name, module
        for child_name, child in module._modules.items():
            if child is not None:
                yield from walk(f"{name}.{child_name}" if name else child_name, child)

    return walk("", model)
