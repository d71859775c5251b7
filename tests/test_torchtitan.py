# SPDX-License-Identifier: Apache-2.0
"""torchtitan's released models with their experts converted, beside the models as they are.

T rows, E experts, H features of a token, F features of an expert.
"""

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grouped_linear import Float8BlockScaling, Format, Recipe, convert
from grouped_linear.contrib import watch
from support.compare import assert_same_bits
from support.processes import PROCESSES, Checks, on_cpu
from support.tensors import BF16, DTYPES

pytest.importorskip(
    "torchtitan", reason="torchtitan is not installed: make torchtitan runs this where it is"
)

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from support.titan import SPMD, deepseek, prepare, sum_in_force

T, E, H, F = 50, 4, 32, 48
COUNTS = [16, 0, 32, 2]
FUSED = "grouped SwiGLU, w13"
FORMS = {"grouped SwiGLU": GroupedExperts, "grouped SwiGLU of GPT-OSS": GptOssGroupedExperts}


def experts_of(form: str, F: int = F) -> nn.Module:
    if form == FUSED:
        pytest.importorskip("triton", reason="torchtitan's fused SwiGLU imports triton")
        from torchtitan.overrides import fused_swiglu

        if not torch._C._dispatch_has_kernel_for_dispatch_key("torchtitan::silu_and_mul", "CPU"):
            library = torch.library.Library("torchtitan", "IMPL")
            library.impl("silu_and_mul", silu_and_mul, "CPU")
            KEPT.append(library)
        cls = fused_swiglu.FusedGroupedExperts
    else:
        cls = FORMS[form]
    experts = cls.Config(dim=H, hidden_dim=F, num_experts=E).build()
    for p in experts.parameters():
        nn.init.normal_(p, std=p.size(-1) ** -0.5)
    return experts


KEPT: list[Any] = []


def silu_and_mul(gate: Tensor, up: Tensor, offsets: Tensor | None = None) -> Tensor:
    """What torchtitan's Triton kernel computes, which is for GPUs only."""
    return nn.functional.silu(gate.float()).mul(up.float()).to(gate.dtype)


def run(experts: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    experts.zero_grad()
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    y = experts(x, torch.tensor(COUNTS))
    (y.float().square().sum()).backward()
    return {"y": y, "dx": x.grad, **{n: p.grad for n, p in experts.named_parameters()}}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_experts(form: str, dtype: torch.dtype) -> None:
    """torchtitan computes in bf16 in any case, converted experts in the dtype of x."""
    experts = experts_of(form)
    expected = run(experts, dtype)
    [converted] = convert(experts).converted
    assert (converted.form, converted.num_experts) == (form, E)
    for name, result in run(experts, dtype).items():
        difference = (result.float() - expected[name].float()).norm()
        assert difference < 2.0**-6 * expected[name].float().norm(), name


def test_fused_experts() -> None:
    """Their forward alone: the gradient of torchtitan's activation is a Triton kernel, too."""
    experts, x = experts_of(FUSED), torch.randn(T, H, dtype=BF16)
    with torch.no_grad():
        expected = experts(x, torch.tensor(COUNTS)).float()
    saved = experts.state_dict()
    assert [c.form for c in convert(experts).converted] == [FUSED]
    y = experts(x, torch.tensor(COUNTS))
    assert (y.float() - expected).norm() < 2.0**-6 * expected.norm()
    y.float().square().sum().backward()
    assert experts.w13.grad.abs().sum() > 0
    assert saved.keys() == {"w1_EFD", "w2_EDF", "w3_EFD"}  # checkpoints are as before
    for name, saved_again in experts.state_dict().items():
        assert_same_bits(saved_again, saved[name])
    kept = experts_of(FUSED)
    with pytest.raises(ValueError, match=r"w13 is \[4, 48, 2, 32\], and weights='fp8' keeps"):
        convert(kept, weights="fp8")


def test_weights_in_fp8() -> None:
    """Of a model that has values: torchtitan would draw some into the bytes."""
    experts, x = experts_of("grouped SwiGLU"), torch.randn(T, H, dtype=BF16)
    frozen, on_meta = copy.deepcopy(experts), copy.deepcopy(experts).to("meta")
    convert(experts, Float8BlockScaling())
    convert(frozen, weights="fp8")
    counts = torch.tensor(COUNTS)
    assert_same_bits(frozen(x, counts), experts(x, counts))
    for recipe in (Float8BlockScaling(), None):  # learns in four bits, as it is served
        learns, served = (experts_of("grouped SwiGLU of GPT-OSS", 64) for _ in range(2))
        served.load_state_dict(learns.state_dict())
        qat = Float8BlockScaling(qat="mxfp4") if recipe else Recipe(weight=Format(qat="mxfp4"))
        convert(learns, qat)
        convert(served, recipe, weights="mxfp4")
        assert_same_bits(learns(x, counts), served(x, counts))
    with pytest.raises(ValueError, match="convert when it is loaded, or with weights='both'"):
        convert(on_meta, weights="fp8")


def test_another_limit_is_read_when_it_is_called() -> None:
    experts = experts_of("grouped SwiGLU of GPT-OSS")
    convert(experts)
    before = run(experts, BF16)["y"]
    experts.swiglu_limit = 0.1
    assert not torch.equal(run(experts, BF16)["y"], before)


# --- two processes -------------------------------------------------------------------------------


def built(parallelism: ParallelismConfig, how: dict[str, Any] | None) -> nn.Module:
    """A model of torchtitan's as its Trainer makes it: meta, parallelize, memory, values."""
    spec = deepseek(2, how)
    training = TrainingConfig(mixed_precision_param="float32")
    config = SimpleNamespace(parallelism=parallelism, training=training)
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    dims = ParallelDims.from_config(parallelism, PROCESSES)
    dims.build_mesh()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    sum_in_force(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def step(model: nn.Module) -> dict[str, Tensor]:
    tokens = torch.randint(2048, (2, 32), generator=torch.Generator().manual_seed(2))
    y = model(tokens, positions=torch.arange(32).expand(2, 32), attention_masks=None)
    y = y.full_tensor() if isinstance(y, DTensor) else y
    y.float().square().mean().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    local = {n: g.to_local() if isinstance(g, DTensor) else g for n, g in gradients.items()}
    return {"y": y.detach(), **local}


def check_model(parallel: dict[str, int], how: dict[str, Any], rank: int, directory: Path) -> None:
    prepare("cpu")
    parallelism = ParallelismConfig(spmd_backend=SPMD, **parallel)
    plain = built(parallelism, None)
    expected = step(plain)
    with pytest.raises(ValueError, match="inner_experts: parameters are sharded already: convert"):
        convert(plain)
    model = built(parallelism, how)
    assert not any(p.is_meta for p in model.parameters())
    seen = watch(model)  # after fully_shard, as of a Trainer's model
    actual = step(model)
    [load] = seen.read().loads
    assert len(load.tokens) == 8 // parallel.get("expert_parallel_degree", 1)
    assert all(load.tokens)
    assert actual.keys() == expected.keys()
    for name, result in actual.items():
        difference = (result.float() - expected[name].float()).norm()
        tolerance = 0.25 if how.get("recipe") else 2.0**-6
        assert difference <= tolerance * expected[name].float().norm(), name


FSDP = {"data_parallel_shard_degree": 2}
EP = {"expert_parallel_degree": 2}
CHECKS: Checks = {
    "fsdp": partial(check_model, FSDP, {}),
    "fsdp_block": partial(check_model, FSDP, {"recipe": Float8BlockScaling()}),
    "expert_parallel": partial(check_model, {**FSDP, **EP}, {}),
    "tensor_parallel": partial(
        check_model, {"data_parallel_shard_degree": 1, "tensor_parallel_degree": 2}, {}
    ),
}

test_two_processes = on_cpu(CHECKS)
