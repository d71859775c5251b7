# SPDX-License-Identifier: Apache-2.0
"""Two processes hand over a model that FSDP2 shards: what one process with all of it hands over."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from grouped_linear import Float8BlockScaling, convert
from support.compare import assert_same_tensors
from support.four_bits import learns_in_mxfp4
from support.hugging_face import IDS, tiny
from support.processes import PROCESSES, Checks, device, on_cpu, on_gpus
from support.tensors import BF16
from support.versions import skipping_for_old_transformers

with skipping_for_old_transformers():
    from grouped_linear.integrations.checkpoints.tensors import CheckpointTensors

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "layer_types": None,
}
FORMS: dict[str, tuple[Any, Any]] = {
    "16 bits": (None, None),
    "FP8 in each call": (Float8BlockScaling(), None),
    "both": (Float8BlockScaling(), "both"),
    "fp8": (Float8BlockScaling(), "fp8"),
    "mxfp4": (None, "mxfp4"),
    "learns": (learns_in_mxfp4(), None),
    "learns, both": (learns_in_mxfp4(fp8=True), "both"),
}


class Gathers(TorchDispatchMode):
    """Counts the elements that each collective gives."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "all_gather" in func._schema.name:
            self.sizes.append(made.nbytes if isinstance(made, Tensor) else 0)
        return made


def model_of(family: str, form: str, **options: Any) -> Any:
    torch.manual_seed(0)
    recipe, weights = FORMS[form]
    model = tiny(family, **SIZES | options).to(device(), BF16)
    convert(model, recipe, weights=weights)
    return model


def shard(model: Any, **options: Any) -> None:
    mesh = init_device_mesh(device().type, (PROCESSES,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, **options)


def check_casts(form: str, rank: int, directory: Path) -> None:
    """Weights in float32 are what FSDP2 casts them to before training multiplies them."""
    torch.manual_seed(0)
    model = tiny("qwen3_moe", **SIZES, num_experts=4).to(device())
    whole = copy.deepcopy(model).to(BF16)
    recipe, weights = FORMS[form]
    for one in (model, whole):
        convert(one, recipe, weights=weights)
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    handed, expected = dict(CheckpointTensors(model)), dict(CheckpointTensors(whole))
    experts = [name for name in expected if ".experts." in name]
    assert_same_tensors({n: handed[n] for n in experts}, {n: expected[n] for n in experts})


def check_split(form: str, rank: int, directory: Path) -> None:
    """What learns is gathered first; bytes and their scales stay together, or it is refused."""
    whole = model_of("qwen3_moe", form, num_experts=4)
    model = copy.deepcopy(whole)
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    shard(model, mp_policy=policy, shard_placement_fn=lambda p: Shard(1) if p.dim() > 2 else None)
    if form != "mxfp4":
        assert_same_tensors(dict(CheckpointTensors(model)), dict(CheckpointTensors(whole)))
        return
    torch.testing.assert_close(
        model(IDS.to(device())).logits, whole(IDS.to(device())).logits, rtol=0, atol=0
    )
    for layer in model.model.layers:
        layer.reshard()
    experts, said = model.model.layers[0].mlp.experts, r"\(Shard\(dim=1\),\): shard it by experts"
    for call in (lambda: dict(CheckpointTensors(model)), lambda: experts.dequantize("down_proj")):
        with pytest.raises(ValueError, match=f"is split inside of each expert, {said}"):
            call()
    with pytest.raises(RuntimeError, match=f"is split inside of each expert, {said}"):
        model.load_state_dict(model.state_dict())


def check_without_experts(form: str, rank: int, directory: Path) -> None:
    """A process that has none takes part."""
    one_expert = {"num_experts": 1, "num_experts_per_tok": 1}
    whole = model_of("qwen3_moe", form, **one_expert)
    model = copy.deepcopy(whole)
    shard(model)
    assert_same_tensors(dict(CheckpointTensors(model)), dict(CheckpointTensors(whole)))


def check_form(family: str, form: str, rank: int, directory: Path) -> None:
    """Before and after a step; nothing is sent for names, dtypes and shapes."""
    experts = {"gpt_oss": "num_local_experts", "qwen3_moe": "num_experts"}[family]
    # FSDP2 takes as many experts on each process alone for weights in both precisions.
    count = 4 if "both" in form else 5
    whole = model_of(family, form, tie_word_embeddings=True, **{experts: count})
    model = copy.deepcopy(whole)
    shard(model)
    source, expected = CheckpointTensors(model), CheckpointTensors(whole)
    assert source.quantization_config == expected.quantization_config
    for step in range(2):
        if step:
            for one in (whole, model):
                learn = [p for p in one.parameters() if p.requires_grad]
                optimizer = torch.optim.SGD(learn, lr=0.1)
                one(IDS.to(device()), labels=IDS.to(device())).loss.backward()
                optimizer.step()
        with Gathers() as gathers:
            announced = source.metadata()
        assert not gathers.sizes
        assert announced == expected.metadata()
        pairs = [*source]
        assert [(n, t.dtype, tuple(t.shape)) for n, t in pairs] == [tuple(m) for m in announced]
        compare(dict(pairs), dict(expected), exact=step == 0)
    with Gathers() as gathers:
        pairs = iter(source)
        first = next(pairs)[0]
        begun = len(gathers.sizes)
        rest = [name for name, _ in pairs]
    assert [first, *rest] == [meta.name for meta in announced]
    assert 0 < begun < len(gathers.sizes) / 2  # a layer at a time


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor], exact: bool) -> None:
    if exact:
        assert_same_tensors(actual, expected)
        return
    # Gradients are averaged over processes, which rounds: a few codes are neighbours.
    for name, t in actual.items():
        other = expected[name]
        if t.dtype.itemsize == 1:
            same = (t.view(torch.uint8) == other.view(torch.uint8)).float().mean()
            assert same > 0.97, name
        else:
            torch.testing.assert_close(t, other, rtol=2e-2, atol=1e-2)


CHECKS: Checks = {
    f"{family}, {form}": partial(check_form, family, form)
    for family in ("qwen3_moe", "gpt_oss")
    for form in FORMS
    if family == "qwen3_moe" or form in ("16 bits", "mxfp4", "learns", "learns, both")
}
CHECKS |= {
    f"casts, {form}": partial(check_casts, form)
    for form in ("FP8 in each call", "both", "learns", "learns, both")
}
CHECKS |= {
    f"split, {form}": partial(check_split, form)
    for form in ("FP8 in each call", "both", "mxfp4", "learns")
}
CHECKS |= {
    f"without experts, {form}": partial(check_without_experts, form)
    for form in ("FP8 in each call", "mxfp4", "learns")
}

test_two_processes, test_two_gpus = on_cpu(CHECKS), on_gpus(CHECKS)
