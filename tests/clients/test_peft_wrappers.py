# SPDX-License-Identifier: Apache-2.0
"""The modules inside of PEFT's wrappers, by their names in the plain model."""

import pytest

from grouped_linear.integrations.wrappers import named_unwrapped
from support.hugging_face import tiny

peft = pytest.importorskip("peft")

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
        {"target_modules": ["q_proj"], "modules_to_save": ["gate", "experts"]},
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight", *EXPERTS]},
    ],
    ids=["experts", "modules_to_save", "router"],
)
def test_pefts_wrappers(options: dict[str, list[str]]) -> None:
    model = tiny("mixtral")
    before = {name: type(module) for name, module in model.named_modules()}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
    for name, module in named_unwrapped(adapted):
        assert type(module) is before.pop(name)
    assert not before
