# SPDX-License-Identifier: Apache-2.0
"""Modules that look like experts and have no known form, and why they are skipped."""

import inspect
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from grouped_linear.integrations.experts import experts_of
from grouped_linear.nn.from_modules import swiglu_names


def look_alikes(model: nn.Module) -> dict[str, str]:
    """Why modules that look like experts are skipped, by name, where this package computes none."""
    skipped: dict[str, str] = {}
    seen: list[str] = []  # prefixes of converted modules, and of those reported as a whole
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in seen):
            continue
        experts = experts_of(module)
        if experts is not None and (experts.computed_here or experts.library == "transformers"):
            seen.append(f"{name}.")
            continue
        why = _why_skipped(name, module)
        if why:
            seen.append(f"{name}.")
            skipped[name] = why
    return skipped


def _why_skipped(name: str, module: Any) -> str:
    """Why a module is skipped; empty if it does not look like experts."""
    cls = type(module)
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    called_experts = "expert" in f"{cls.__name__} {name.rsplit('.', 1)[-1]}".lower()
    no_interface = (
        f"{cls.__name__} does not go through transformers' experts interface: give the class a "
        "forward that calls grouped_mlp or grouped_linear"
    )
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and len(children) > 1:
        classes = {type(child) for child in children}
        if not called_experts or len(classes) > 1:
            return ""
        if cls.__module__.startswith("transformers."):
            return no_interface
        if swiglu_names(children[0]):
            return f"a {cls.__name__}, of which GroupedMLP.from_experts makes a layer"
        if classes == {nn.Linear}:
            return f"a {cls.__name__}, of which GroupedLinear.from_linears makes a layer"
        parameters = ", ".join(name for name, _ in children[0].named_parameters())
        return f"a {cls.__name__} of {type(children[0]).__name__} with {parameters}"
    held = dict(module.named_parameters(recurse=False))
    if not held and called_experts:
        held = _of_layers(module)
    if not held or cls.__module__.startswith("torch.nn"):
        return ""
    stacked = [p.size(0) for p in held.values() if p.dim() >= 3 and p.size(0) > 1]
    matrices = [p for p in held.values() if p.dim() >= 2]
    if not (called_experts and matrices) and (len(stacked) < 2 or len(set(stacked)) > 1):
        return ""
    if cls.__module__.startswith("transformers."):
        return no_interface
    _, *inputs = inspect.signature(cls.forward).parameters
    return f"no known form has parameters {', '.join(held)} and is called as ({', '.join(inputs)})"


def _of_layers(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of children that hold a tensor of all experts each."""
    return {
        f"{name}.{p_name}": p
        for name, child in module.named_children()
        if not isinstance(child, _ConvNd) and not [*child.children()]
        for p_name, p in child.named_parameters()
        if p.dim() >= 3 and p.size(0) > 1
    }
