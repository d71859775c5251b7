# SPDX-License-Identifier: Apache-2.0
"""torchtitan's experts before and after convert: stand-ins, and where it is installed its own.

T rows, E experts, H features of a token, F features of an expert.
"""

import io
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from grouped_linear import DelayedScaling, Float8BlockScaling, Format, GroupedMLP, Recipe, convert
from grouped_linear.integrations.convert import ConvertedExperts
from support.compare import assert_all_same_bits, assert_same_bits, assert_same_tensors
from support.errors import sentence
from support.experts import FusedGroupedExperts, GptOssGroupedExperts, GroupedExperts
from support.processes import PROCESSES, Checks, on_cpu
from support.recipes import MORE_RECIPES
from support.tensors import BF16, DTYPES, FP32

T, E, H, F = 50, 4, 32, 48


class Sorted(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.tensor([16.0, 0.0, 32.0, 2.0], device=x.device)  # as histc gives them
        return self.experts(x, counts)


MODELS: dict[str, tuple[Callable[[], nn.Module], ConvertedExperts]] = {
    kind: (
        lambda experts=experts: Sorted(experts()),
        ConvertedExperts("1.experts", form, E, size, "float32", 4 * 3 * E * F * H),
    )
    for kind, experts, form, size in (
        ("grouped", GroupedExperts, "grouped SwiGLU", 3 * E * F * H),
        ("fused", FusedGroupedExperts, "grouped SwiGLU, w13", 3 * E * F * H),
        (
            "gpt_oss",
            GptOssGroupedExperts,
            "grouped SwiGLU of GPT-OSS",
            3 * E * F * H + E * (2 * F + H),
        ),
    )
}
EVERY_MODEL = pytest.mark.parametrize("kind", MODELS)


def run(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output and all gradients."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients}


def check_near(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, e in expected.items():
        assert (actual[name].double() - e.double()).norm() < tolerance * e.double().norm(), name


def model_of(kind: str, device: str, dtype: torch.dtype = FP32) -> nn.Module:
    return nn.Sequential(nn.Linear(H, H), MODELS[kind][0]()).to(device, dtype)


@EVERY_MODEL
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients(kind: str, dtype: torch.dtype, device: str) -> None:
    model, x = model_of(kind, device, dtype), torch.randn(T, H, device=device, dtype=dtype)
    expected = run(model, x)
    before = torch.get_rng_state()
    [done] = convert(model).converted
    as_float32 = done.nbytes * 4 // dtype.itemsize
    assert done._replace(weights="float32", nbytes=as_float32) == MODELS[kind][1]
    assert done.weights == str(dtype).removeprefix("torch.")
    assert torch.equal(torch.get_rng_state(), before)
    check_near(run(model, x), expected, 2.0**-6)  # grouped_mm's experts round to bf16


@EVERY_MODEL
@pytest.mark.parametrize("recipe", MORE_RECIPES.values(), ids=MORE_RECIPES)
def test_recipes(kind: str, recipe: Recipe | None, device: str) -> None:
    """See test_mlp.py for the tolerance."""
    model, x = model_of(kind, device, BF16), torch.randn(T, H, device=device, dtype=BF16)
    expected = run(model, x)
    convert(model, recipe)
    check_near(run(model, x), expected, 0.25)


@pytest.mark.parametrize("experts", [GroupedExperts, GptOssGroupedExperts])
@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
def test_frozen_weights(weights: Any, experts: Any) -> None:
    """Those with biases, too: in FP8 the bits of weights that each call quantizes."""
    model, x = Sorted(experts(F=64)), torch.randn(T, H)
    plain = deepcopy(model)
    convert(model, Float8BlockScaling(), weights=weights)
    with torch.no_grad():
        for name in model.experts._frozen if weights == "mxfp4" else ():
            plain.experts.get_parameter(name).copy_(model.experts.dequantize(name))
    convert(plain, Float8BlockScaling())
    actual, expected = run(model, x), run(plain, x)
    learn = [name for name, g in actual.items() if g is not None]
    assert {"y", "dx"} <= {*learn}
    for name in learn:
        if weights == "fp8":
            assert_same_bits(actual[name], expected[name])
        else:  # of plain weights FP8 has 3 bits and one scale of 128 x 128
            check_near({"": actual[name]}, {"": expected[name]}, 0.1)


def test_gate_up_saved_in_fp8() -> None:
    assert sentence(lambda: convert(model_of("grouped", "cpu"), save_gate_up_in_fp8=True)) == (
        "convert: 1.experts: save_gate_up_in_fp8 is an option of Hugging Face experts"
    )


@EVERY_MODEL
def test_compiled_copied_and_saved(kind: str) -> None:
    model, x = model_of(kind, "cpu"), torch.randn(T, H)
    convert(model, Float8BlockScaling())
    expected = run(model, x)
    copied = deepcopy(model)
    model[1].load_state_dict(copied[1].state_dict())
    compiled = torch.compile(copied, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), expected["y"])
    assert_same_tensors(run(copied, x), expected)


@EVERY_MODEL
@pytest.mark.parametrize(
    "recipe", [Float8BlockScaling(), DelayedScaling()], ids=["block", "delayed"]
)
def test_pickled(kind: str, recipe: Recipe | None) -> None:
    model, x = model_of(kind, "cpu"), torch.randn(T, H)
    name = convert(model, recipe).converted[0].name
    expected, file = run(model, x), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded.get_submodule(name)) is type(model.get_submodule(name))
    assert type(deepcopy(model).get_submodule(name)) is type(model.get_submodule(name))
    assert_same_tensors(run(loaded, x), expected)


def test_copied_as_a_subclass() -> None:
    """As FSDP2 makes one."""
    experts = GroupedExperts()
    convert(experts)
    experts.__class__ = type("Sharded", (type(experts),), {})
    assert type(deepcopy(experts)) is type(experts)


@EVERY_MODEL
def test_called_by_names(kind: str) -> None:
    converted: Any = MODELS[kind][0]().experts
    x, counts = torch.randn(T, H), torch.tensor([16, 0, 32, 2])
    convert(converted)
    assert_same_bits(converted(x_RD=x, num_tokens_per_expert_E=counts), converted(x, counts))


@EVERY_MODEL
def test_on_the_meta_device(kind: str) -> None:
    """As torchtitan does: make, convert, give memory, load."""
    whole, x = model_of(kind, "cpu"), torch.randn(T, H)
    convert(whole)
    before = torch.get_rng_state()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(H, H), MODELS[kind][0]())
        assert convert(model).converted == (MODELS[kind][1],)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu").load_state_dict(whole.state_dict())
    assert_same_tensors(run(model, x), run(whole, x))


def test_first_scales_are_not_lost_on_the_meta_device() -> None:
    assert sentence(lambda: convert(model_of("grouped", "meta"), DelayedScaling())) == (
        "convert: 1.experts: the first scales of DelayedScaling would be lost on the meta device: "
        "convert when parameters have values"
    )


def test_what_torchtitan_has_parallelized() -> None:
    """Its forward, which sends tokens to other processes, is in the place of the experts'."""
    model: Any = model_of("grouped", "cpu")
    model[1].experts._parallelized = True
    assert sentence(lambda: convert(model)) == (
        "convert: 1.experts: torchtitan has parallelized it already: convert before"
    )


def test_what_is_converted_is_left_alone() -> None:
    model = nn.Sequential(model_of("grouped", "cpu"), model_of("grouped", "cpu"))
    convert(model[0], DelayedScaling())
    first = type(model[0][1].experts)
    assert [c.name for c in convert(model).converted] == ["1.1.experts"]
    assert type(model[0][1].experts) is first
    expected = "convert: experts of Sequential are converted already"
    assert sentence(lambda: convert(model, Float8BlockScaling())) == expected


class Quantized(GroupedExperts):
    """As torchtitan's MXFP8 converter makes a class."""

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return super()._grouped_mm(A=A, B_t=B_t, offs=offs)


class Ordered(GroupedExperts):
    """Another forward than torchtitan's may multiply in another order."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        return super().forward(x_RD, num_tokens_per_expert_E)


MISTAKES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "our layers": (
        lambda: nn.Sequential(GroupedMLP(2, H, F)),
        "convert: Sequential has no experts of a form that is known: its layers are this "
        "package's, which take recipe= when they are made",
    ),
    "quantized": (
        Quantized,
        "convert: Quantized: its GEMMs are those of Quantized: leave out torchtitan's converters "
        "that quantize experts",
    ),
    "another forward": (
        Ordered,
        "convert: Ordered has no experts of a form that is known, and these look like experts: "
        "(the model) (no known form has parameters w1_EFD, w3_EFD, w2_EDF and is called as (x_RD, "
        "num_tokens_per_expert_E))",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str) -> None:
    make, expected = MISTAKES[mistake]
    assert sentence(lambda: convert(make())) == expected


@pytest.mark.parametrize("recipe", [None, DelayedScaling()], ids=["none", "delayed"])
def test_a_forward_left_half_way(recipe: Recipe | None) -> None:
    """As a recompute stops once it has what it needs; the next forward counts from 0."""
    model, x = Sorted(GroupedExperts()), torch.randn(T, H)
    convert(model, recipe)
    expected = run(model, x)
    experts: Any = model.experts
    seam, done = experts._grouped_mm, []

    def stop(**operands: Tensor) -> Tensor:
        if done:
            raise KeyboardInterrupt
        done.append(1)
        return seam(**operands)

    experts._grouped_mm = stop
    with pytest.raises(KeyboardInterrupt):
        model(x)
    del experts._grouped_mm
    assert_same_tensors(run(model, x), expected)


@pytest.mark.parametrize("name", ["forward", "_grouped_mm"])
def test_a_method_that_would_hide_the_new_one(name: str) -> None:
    model, x = Sorted(GroupedExperts()), torch.randn(T, H)
    setattr(model.experts, name, getattr(model.experts, name))
    expected = model(x)
    assert sentence(lambda: convert(model)) == (
        f"convert: experts has a {name} of its own, which would hide the new one: delete it, or "
        "convert a model without it"
    )
    assert_same_bits(model(x), expected)
    delattr(model.experts, name)
    convert(model)


def test_a_recipe_that_makes_no_state() -> None:
    """Nothing is written before it is refused."""
    delayed = Format(torch.float8_e4m3fn, scaling="delayed")
    model = Sorted(GroupedExperts())
    refused = sentence(lambda: convert(model, Recipe(delayed, delayed, delayed)))
    assert "only the recipe DelayedScaling says how the scales" in refused
    assert type(model.experts) is GroupedExperts


def test_converted_in_inference_mode() -> None:
    model = Sorted(GroupedExperts())
    with torch.inference_mode():
        convert(model, weights="both")
    model(torch.randn(T, H)).sum().backward()
    assert model.experts.w2_EDF.grad is not None


# --- two processes -------------------------------------------------------------------------------

COUNTS = [16, 0, 32, 2]


def step(experts: Callable[..., Tensor], x: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = experts(x, torch.tensor(counts))
    y.square().sum().backward()
    return y.detach(), x.grad


def distribute(experts: nn.Module, mesh: DeviceMesh, dims: dict[str, int]) -> None:
    """As torchtitan's expert and tensor parallelism do."""
    for name, dim in dims.items():
        whole = experts.get_parameter(name).detach()
        sharded = distribute_tensor(whole, mesh, [Shard(dim)])
        experts.register_parameter(name, nn.Parameter(sharded))


def check_gradients(sharded: nn.Module, whole: nn.Module, rank: int, dims: dict[str, int]) -> None:
    for name, dim in dims.items():
        gradient = sharded.get_parameter(name).grad
        assert isinstance(gradient, DTensor)
        expected = whole.get_parameter(name).grad.chunk(PROCESSES, dim)[rank]
        assert_same_bits(gradient.to_local(), expected)


def both_processes() -> DeviceMesh:
    return init_device_mesh("cpu", (PROCESSES,))


def check_expert_parallel(recipe: Recipe | None, rank: int, directory: Path) -> None:
    plain, dims = GroupedExperts(), {"w1_EFD": 0, "w2_EDF": 0, "w3_EFD": 0}
    x = torch.randn(sum(COUNTS), H)
    expected, _ = step(plain, x, COUNTS)
    whole, sharded = deepcopy(plain), deepcopy(plain)
    for experts in (whole, sharded):
        convert(experts, recipe)
    distribute(sharded, both_processes(), dims)
    y, dx = step(whole, x, COUNTS)
    assert (y - expected).norm() < (2.0**-6 if recipe is None else 0.25) * expected.norm()
    own, rows = COUNTS[2 * rank :][:2], slice(16 * rank, 16 + 34 * rank)
    for call in (sharded, torch.compile(sharded, fullgraph=True, backend="aot_eager")):
        sharded.zero_grad()
        own_y, own_dx = step(call, x[rows], own)
        assert_same_bits(own_y, y[rows])
        assert_same_bits(own_dx, dx[rows])
        check_gradients(sharded, whole, rank, dims)


def check_tensor_parallel(rank: int, directory: Path) -> None:
    """Each process has half of the features inside an expert; outputs add up, rounded to bf16."""
    whole = GroupedExperts(F=64)
    convert(whole)
    sharded, x = deepcopy(whole), torch.randn(sum(COUNTS), H)
    distribute(sharded, both_processes(), {"w1_EFD": 1, "w2_EDF": 2, "w3_EFD": 1})
    y = sharded(x, torch.tensor(COUNTS)).detach()
    dist.all_reduce(y)
    expected = whole(x, torch.tensor(COUNTS)).detach()
    assert (y - expected).norm() < 2.0**-7 * expected.norm()


def check_tensor_parallel_biases(rank: int, directory: Path) -> None:
    """What is added once is added once, and each copy of the last bias has all of its gradient."""
    whole, counts = GptOssGroupedExperts(F=64), torch.tensor(COUNTS)
    convert(whole)
    sharded, x = deepcopy(whole), torch.randn(sum(COUNTS), H)
    dims = {"mlp1_weight_EGD": 1, "mlp1_bias_EG": 1, "mlp2_weight_EDF": 2}
    distribute(sharded, both_processes(), dims)
    y = sharded(x, counts)
    total = y.detach().clone()
    dist.all_reduce(total)
    expected = whole(x, counts)
    assert torch.allclose(total, expected, atol=1e-5)
    for result in (y, expected):
        result.sum().backward()
    assert torch.allclose(sharded.mlp2_bias_ED.grad, whole.mlp2_bias_ED.grad)


def check_fully_sharded(options: dict[str, bool], rank: int, directory: Path) -> None:
    """Converted and sharded before there are values, as torchtitan does it."""
    recipe, dims = Float8BlockScaling(), {"w1_EFD": 0, "w2_EDF": 0, "w3_EFD": 0}
    whole, x = GroupedExperts(), torch.randn(sum(COUNTS), H)
    convert(whole, recipe, **options)
    with torch.device("meta"):
        sharded = GroupedExperts()
    convert(sharded, recipe, **options)
    fully_shard(sharded, mesh=both_processes())
    sharded.to_empty(device="cpu")
    for name in dims:
        shard = whole.get_parameter(name).detach().chunk(PROCESSES)[rank]
        sharded.get_parameter(name).detach().to_local().copy_(shard)
    assert_all_same_bits(step(sharded, x, COUNTS), step(whole, x, COUNTS))
    check_gradients(sharded, whole, rank, dims)


def check_already_sharded(rank: int, directory: Path) -> None:
    late = fully_shard(nn.Sequential(GroupedExperts()), mesh=both_processes())
    with pytest.raises(ValueError, match="parameters are sharded already: convert before"):
        convert(late)


def check_replicated(rank: int, directory: Path) -> None:
    """DistributedDataParallel goes on with the parameters that it was made with."""
    model = DistributedDataParallel(Sorted(GroupedExperts()))
    assert sentence(lambda: convert(model, weights="both")) == (
        "convert: DistributedDataParallel holds the parameters that weights='both' replaces: "
        "convert before it is made"
    )
    with pytest.warns(UserWarning, match="3 parameters were replaced and something still holds"):
        convert(model.module, weights="both")
    [converted] = convert(DistributedDataParallel(Sorted(GroupedExperts()))).converted
    assert converted.form == "grouped SwiGLU"


def check_delayed_scaling(rank: int, directory: Path) -> None:
    experts = GroupedExperts()
    convert(experts, DelayedScaling())
    distribute(experts, both_processes(), {"w1_EFD": 0, "w2_EDF": 0, "w3_EFD": 0})
    sentence = (
        "GroupedGroupedExperts: DelayedScaling holds scales of 4 experts, 2 are on this process: "
        "shard in another way or take another recipe"
    )
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        experts(torch.randn(3, H), torch.tensor([1, 2]))


def check_weights_in_fp8(rank: int, directory: Path) -> None:
    """Bytes of whole experts are sharded as any parameters are, by FSDP2 or by hand."""
    whole, x = GroupedExperts(), torch.randn(3, H)
    convert(whole, Float8BlockScaling(), weights="fp8")
    counts = [0, 0, 1, 2] if rank else [1, 2, 0, 0]
    expected = whole(x, torch.tensor(counts))
    sharded = fully_shard(deepcopy(whole), mesh=both_processes())
    assert_same_bits(sharded(x, torch.tensor(counts)), expected)
    spread = deepcopy(whole)
    for name, p in whole.named_parameters():
        part = distribute_tensor(p.detach(), both_processes(), [Shard(0)])
        spread.register_parameter(name, nn.Parameter(part, requires_grad=False))
    assert_same_bits(spread(x, torch.tensor([1, 2])), expected)
    with pytest.raises(RuntimeError, match="can require gradients"):  # torchtitan's parallelism
        distribute(deepcopy(whole), both_processes(), {"w1_EFD": 0})


CHECKS: Checks = {
    "weights_in_fp8": check_weights_in_fp8,
    "expert_parallel": partial(check_expert_parallel, None),
    "expert_parallel_block": partial(check_expert_parallel, Float8BlockScaling()),
    "tensor_parallel": check_tensor_parallel,
    "tensor_parallel_biases": check_tensor_parallel_biases,
    "fully_sharded": partial(check_fully_sharded, {}),
    "already_sharded": check_already_sharded,
    "replicated": check_replicated,
    "delayed_scaling": check_delayed_scaling,
}

test_two_processes = on_cpu(CHECKS)
