# SPDX-License-Identifier: Apache-2.0
"""Wrappers of torch and PEFT around modules: the module inside, and its name in the plain model."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from grouped_linear.integrations.wrappers import named_unwrapped, unwrapped


class ModulesToSaveWrapper(nn.Module):
    """PEFT's attributes of that class; tests/clients has the class."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": deepcopy(module)})
        self.active_adapters = ["default"]
        self.disable_adapters = False


def plain() -> nn.Module:
    return nn.ModuleDict({"router": nn.Linear(2, 2), "experts": nn.Sequential(nn.Linear(2, 2))})


def test_names_are_those_of_the_plain_model() -> None:
    model = plain()
    model["router"] = ModulesToSaveWrapper(model["router"])
    model["experts"] = checkpoint_wrapper(torch.compile(model["experts"]))
    model = torch.compile(nn.DataParallel(model))
    found = dict(named_unwrapped(model))
    assert list(found) == [name for name, _ in plain().named_modules()]
    assert [type(module) for module in found.values()] == [type(m) for m in plain().modules()]


@pytest.mark.parametrize("disabled", [False, True])
def test_the_copy_that_is_active(disabled: bool) -> None:
    wrapper = ModulesToSaveWrapper(nn.Linear(2, 2))
    wrapper.disable_adapters = disabled
    expected = wrapper.original_module if disabled else wrapper.modules_to_save["default"]
    assert unwrapped(checkpoint_wrapper(wrapper)) is expected
    wrapper.active_adapters = ["another"]
    assert unwrapped(wrapper) is wrapper.original_module


def test_a_module_that_is_none() -> None:
    class Reduced(nn.Module):  # the names of attributes alone say nothing
        def __init__(self) -> None:
            super().__init__()
            self.module, self.base_layer, self.model = (nn.Linear(2, 2) for _ in range(3))

    module = Reduced()
    assert unwrapped(module) is module
    assert len(list(named_unwrapped(module))) == 4


def test_a_shared_module_is_named_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, checkpoint_wrapper(shared))
    assert [name for name, _ in named_unwrapped(model)] == ["", "0"]
