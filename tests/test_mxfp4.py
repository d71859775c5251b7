# SPDX-License-Identifier: Apache-2.0
"""MXFP4 beside what it stands for: every code, every scale, and other numbers quantized.

T rows, E groups, K in_features, N out_features.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from grouped_linear import (
    Float8BlockScaling,
    GroupedLinear,
    GroupedMLP,
    Lora,
    MXFP8BlockScaling,
    Recipe,
    ops,
)
from support import reference
from support.compare import assert_same_bits, relative_error
from support.devices import needs_gpu
from support.experts import Expert
from support.layers import call_of
from support.processes import one_process
from support.tensors import BF16, DTYPES

MXFP4 = ["quantize_mxfp4", "dequantize_mxfp4", "grouped_mm_mxfp4"]


def every_code_and_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """q [256, 16, 16] and scale [256, 16, 1]: each pair of codes beside each byte."""
    q = torch.arange(256).to(torch.uint8).view(1, 16, 16).repeat(256, 1, 1)
    return q, torch.arange(256).to(torch.uint8).view(256, 1, 1).repeat(1, 16, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_beside_every_scale(device: str, dtype: torch.dtype) -> None:
    q, scale = every_code_and_scale()
    w = ops.dequantize_mxfp4(q.to(device), scale.to(device), dtype).cpu()
    expected = reference.dequantize_mxfp4(q, scale)
    known = ~expected.isnan()  # of a NaN the sign and the payload are unspecified
    assert torch.equal(w.isnan(), ~known)
    assert_same_bits(w[known], expected.float().to(dtype)[known])
    if dtype != torch.float16:  # exact up to the dtype's largest number
        held = expected.abs() <= torch.finfo(dtype).max
        assert torch.equal(w.double()[held], expected[held])


@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("rows", [64, 16])  # of each group: a GPU has another kernel for few
def test_products_of_every_code_beside_every_scale(
    device: str, rows: int, transpose_b: bool
) -> None:
    """A product with one 1 a row is the number in BF16, where no other of its sum is infinite."""
    q, scale = every_code_and_scale()
    q, scale = q.repeat(1, 1, 9), scale.repeat(1, 1, 9)  # that kernel has a stage of 8, and a rest
    w = reference.dequantize_mxfp4(q, scale).float().to(BF16)
    reduced = w.size(2) if transpose_b else w.size(1)
    of_rows = torch.arange(rows) * 17 % reduced
    ones = torch.eye(reduced, dtype=BF16)[of_rows]
    y = ops.grouped_mm_mxfp4(
        ones.repeat(256, 1).to(device),
        q.to(device),
        scale.to(device),
        torch.arange(rows, 256 * rows + 1, rows, dtype=torch.int32, device=device),
        out_dtype=torch.float32,
        transpose_b=transpose_b,
    ).cpu()
    numbers = (w.mT if transpose_b else w)[:, of_rows].float()
    held = w.isfinite().all(2 if transpose_b else 1)[:, None].expand_as(numbers)
    y = y.view(numbers.shape)
    assert torch.equal(y[held], numbers[held])
    assert y[~held].isnan().any()


@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("sizes", [(3, 0, 1, 12), (130, 0, 77, 200)], ids=["few", "many"])
def test_bits_of_the_weight_in_bf16(device: str, sizes: tuple[int, ...], transpose_b: bool) -> None:
    """But on Hopper, whose kernels for MXFP4 compute the transpose of the result."""
    portable = device == "cpu" or os.environ.get("GROUPED_LINEAR_PORTABLE") == "1"
    if not portable and torch.cuda.get_device_capability() == (9, 0):
        pytest.skip("needs the portable kernels (GROUPED_LINEAR_PORTABLE=1)")
    N, K = 272, 544
    q, scale = ops.quantize_mxfp4(torch.randn(len(sizes), N, K, device=device))
    w = ops.dequantize_mxfp4(q, scale)
    a = torch.randn(sum(sizes), K if transpose_b else N, dtype=BF16, device=device)
    offs = torch.tensor(sizes, device=device).cumsum(0).int()
    y = ops.grouped_mm_mxfp4(a, q, scale, offs, transpose_b=transpose_b)
    assert_same_bits(y, ops.grouped_mm(a, w.mT if transpose_b else w, offs))


# Rows of each group in a few and in many, out_features, and the rank of a second product. A GPU has
# a kernel of its own for few rows a group of 16 bits, on average; beside FP8 it decodes a weight
# for however many rows.
FEW_AND_MANY = {
    "16_bits": ([1, 0, 8, 9, 33, 0, 0, 0], [65, 64, 72, 73, 97, 64, 64, 64], 48, 32),
    "fp8": ([300, 0, 257, 95], [1100, 0, 900, 95], 208, 80),
}


@needs_gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("low", [False, True], ids=["", "low_rank"])
@pytest.mark.parametrize("of", FEW_AND_MANY)
def test_few_rows_have_the_bits_of_many(of: str, low: bool, device: str) -> None:
    few, many = map(torch.tensor, FEW_AND_MANY[of][:2])
    (N, r), K, total = FEW_AND_MANY[of][2:], 2880, int(many.sum())
    rows = torch.cat([e + torch.arange(n) for e, n in zip(many.cumsum(0) - many, few, strict=True)])
    q, scale = ops.quantize_mxfp4(torch.randn(len(few), N, K, device=device))
    if of == "fp8":
        scale -= torch.arange(N, device=device)[:, None].remainder(40).to(torch.uint8)
    a, a_low = (torch.randn(total, k, dtype=BF16, device=device) for k in (K, r))
    b_low = torch.randn(len(few), r, N, dtype=BF16, device=device)

    def multiply(sizes: Tensor, rows: Tensor) -> Tensor:
        options: Any = {"a_low": a_low[rows], "b_low": b_low} if low else {}
        offs = sizes.cumsum(0).int().to(device)
        if of == "16_bits":
            options["out_dtype"] = torch.float32
            return ops.grouped_mm_mxfp4(a[rows], q, scale, offs, **options)
        x = ops.group_quantize(a[rows], offs)
        return ops.grouped_mm_mxfp4(x.q, q, scale, offs, scale_a=x.scale, **options)

    rows = rows.to(device)
    assert_same_bits(multiply(few, rows), multiply(many, torch.arange(total, device=device))[rows])


@pytest.mark.parametrize("transpose_b", [True, False])
def test_e4m3_of_every_code_and_distance(device: str, transpose_b: bool) -> None:
    """A product with one 1 a row shows the e4m3 numbers: scales 0 to 20 below the largest."""
    N, K = 128, 128
    q = torch.arange(256).to(torch.uint8).repeat(N * K // 512).view(1, N, K // 2)
    scale = (100 - torch.arange(N).view(1, N, 1) % 21).expand(1, N, 4).to(torch.uint8).contiguous()
    ones = torch.eye(128).to(torch.float8_e4m3fn)
    w = ops.grouped_mm_mxfp4(
        ones.to(device),
        q.to(device),
        scale.to(device),
        torch.tensor([128], dtype=torch.int32, device=device),
        scale_a=torch.ones(1, 128, device=device),
        out_dtype=torch.float32,
        transpose_b=transpose_b,
    ).cpu()
    expected = reference.mxfp4_in_e4m3(q, scale)[0]
    assert torch.equal(w.double().T if transpose_b else w.double(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_the_format_are_kept(device: str, dtype: torch.dtype) -> None:
    q = torch.randint(256, (3, 32, 48), dtype=torch.uint8, device=device)
    scale = torch.randint(120, 125, (3, 32, 3), dtype=torch.uint8, device=device)
    w = ops.dequantize_mxfp4(q, scale, dtype)
    assert torch.equal(ops.dequantize_mxfp4(*ops.quantize_mxfp4(w), dtype), w)


def test_error_of_normal_numbers(device: str) -> None:
    """11.2% of the norm, as the docstring says: a scale without saturation has 11.5%."""
    w = torch.randn(1, 512, 512, device=device)
    error = ops.dequantize_mxfp4(*ops.quantize_mxfp4(w), torch.float32) - w
    assert 0.110 < error.norm() / w.norm() < 0.114


def test_nan_and_infinity_make_a_block_nan(device: str) -> None:
    w = torch.ones(1, 16, 64, dtype=BF16, device=device)
    w[0, 0, 3], w[0, 1, 40] = torch.nan, torch.inf
    numbers = ops.dequantize_mxfp4(*ops.quantize_mxfp4(w))
    assert numbers[0, 0, :32].isnan().all()
    assert numbers[0, 1, 32:].isnan().all()
    assert numbers.isnan().sum() == 64


# --- layers --------------------------------------------------------------------------------------

E, H, F, T = 4, 160, 96, 50
RECIPES: list[Recipe | None] = [None, Float8BlockScaling(), MXFP8BlockScaling()]
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)


class Linear(GroupedLinear):
    """Called as :class:`MLP` is: the groups are those of the first choices."""

    def __init__(self, **options: Any) -> None:
        super().__init__(E, H, F, **options)

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        first = scores.argmax(dim=-1).sort().values
        return super().forward(x, (first[:, None] == torch.arange(E, device=x.device)).sum(dim=0))


class MLP(GroupedMLP):
    def __init__(self, bias: bool = False, **options: Any) -> None:
        super().__init__(E, H, F, bias=bias, **options)

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, *scores.topk(2))


EVERY_KIND = pytest.mark.parametrize("kind", [Linear, MLP])


def make_layer(kind: Any, *, weights: str | None = "mxfp4", **options: Any) -> Any:
    torch.manual_seed(0)
    layer = kind(**({"dtype": BF16, "bias": True, "lora": Lora(16)} | options), weights=weights)
    for name, p in layer.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(p, std=0.1)
    return layer


def with_its_numbers(layer: Any, recipe: Recipe | None, device: str, dtype: Any = BF16) -> Any:
    """A layer that has the numbers of a frozen one in high precision."""
    plain = make_layer(type(layer), weights=None, recipe=recipe, device=device, dtype=dtype)
    own = layer.state_dict()
    state = {n: layer.dequantize(n, dtype) if n in layer._frozen else t for n, t in own.items()}
    plain.load_state_dict({n: t for n, t in state.items() if not n.endswith("_scale_inv")})
    return plain


def inputs(device: str, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, H, generator=generator).to(device, dtype).requires_grad_()
    return x, torch.rand(T, E, generator=generator).to(device)


def call(layer: Any, x: Tensor, scores: Tensor) -> dict[str, Tensor]:
    learns = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    y = layer(x, scores)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
    grads = torch.autograd.grad(y, (x, *learns.values()), dy)
    return {"y": y.detach()} | dict(zip(("x", *learns), grads, strict=True))


@EVERY_KIND
@EVERY_RECIPE
def test_layers_compute_with_the_numbers(device: str, kind: Any, recipe: Any) -> None:
    """What a layer gives that has the numbers in bf16, but for the order of sums."""
    frozen = make_layer(kind, recipe=recipe, device=device)
    assert [n for n, p in frozen.named_parameters() if p.requires_grad] == [
        n for n, _ in frozen.named_parameters() if "lora" in n
    ]
    results = call(frozen, *inputs(device))
    for name, t in call(with_its_numbers(frozen, recipe, device), *inputs(device)).items():
        error = relative_error(results[name], t)
        assert error < 0.01, f"{name} is off by {error:.1e}"  # two or three roundings to bf16


def compiled(layer: Any) -> Any:
    return call_of(layer, compiled=True)


def exported(layer: Any) -> nn.Module:
    return torch.export.export(layer, inputs(next(layer.parameters()).device.type)).module()


class Checkpointed(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        return checkpoint(self.layer, x, scores, use_reentrant=False)


@pytest.mark.parametrize("way", [compiled, exported, Checkpointed, DistributedDataParallel])
@EVERY_KIND
@EVERY_RECIPE
def test_wrapped_layers_have_the_bits_of_plain_ones(
    device: str, kind: Any, recipe: Any, way: Any
) -> None:
    layer = make_layer(kind, recipe=recipe, device=device)
    expected = call(layer, *inputs(device))
    with one_process("nccl" if device == "cuda" else "gloo"):
        x, scores = inputs(device)
        y = way(layer)(x, scores)
        if way is not exported:  # which is for inference
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y))
    assert_same_bits(y.detach(), expected["y"])
    if way is not exported:
        learns = {name: p.grad for name, p in layer.named_parameters() if p.requires_grad}
        for name, grad in {"x": x.grad, **learns}.items():
            assert_same_bits(grad, expected[name])


@EVERY_KIND
def test_float32_and_autocast(kind: Any) -> None:
    layer = make_layer(kind, dtype=torch.float32)
    plain = with_its_numbers(layer, None, "cpu", torch.float32)
    for name, t in call(layer, *inputs("cpu", torch.float32)).items():
        expected = call(plain, *inputs("cpu", torch.float32))[name]
        assert torch.allclose(t, expected, atol=1e-5, rtol=1e-4)
    with torch.autocast("cpu", BF16):
        assert layer(*inputs("cpu", torch.float32)).dtype == BF16


@EVERY_KIND
def test_state_dicts(kind: Any, tmp_path: Path) -> None:
    """The bytes; codes in int8 and scales in E8M0, as files have them; or high precision."""
    layer = make_layer(kind)
    state = layer.state_dict()
    save_file(state, tmp_path / "model.safetensors")
    other = make_layer(kind, device="meta").to_empty(device="cpu")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert all(torch.equal(t, state[n]) for n, t in other.state_dict().items())
    e8m0 = torch.float8_e8m0fnu
    in_e8m0 = {
        n: t.view(e8m0).squeeze(-1) if n.endswith("_scale_inv") else t for n, t in state.items()
    }
    in_int8 = {n: t.view(torch.int8) if n in layer._frozen else t for n, t in in_e8m0.items()}
    for as_in_files in (in_e8m0, in_int8):
        for p in other.parameters():
            p.detach().zero_()
        other.load_state_dict(as_in_files)
        assert all(torch.equal(t, state[n]) for n, t in other.state_dict().items())
    plain = with_its_numbers(layer, None, "cpu")
    other.load_state_dict(plain.state_dict(), strict=False)
    for name in layer._frozen:
        assert torch.equal(other.dequantize(name), layer.dequantize(name))
    name = next(iter(layer._frozen))
    for sentence, changed in {
        "or uint8 with scales, got uint8 without": {
            k: t for k, t in state.items() if k != f"{name}_scale_inv"
        },
        "must be scales in uint8 or float8_e8m0fnu, got float32": state
        | {f"{name}_scale_inv": state[f"{name}_scale_inv"].float()},
        "or uint8 with scales, got float8_e4m3fn": state
        | {name: plain.state_dict()[name].to(torch.float8_e4m3fn)},
    }.items():
        with pytest.raises(RuntimeError, match=sentence):
            other.load_state_dict(changed, strict=False)
    learner = with_its_numbers(layer, None, "cpu")
    for each in (state, in_int8):
        for p in learner.parameters():
            p.data.zero_()
        learner.load_state_dict(each)
        for n in layer._frozen:
            assert torch.equal(learner.get_parameter(n), layer.dequantize(n))


def test_from_experts_that_are_trained() -> None:
    experts = nn.ModuleList(Expert(H, F, dtype=BF16) for _ in range(E))
    layer = GroupedMLP.from_experts(experts, weights="mxfp4")
    down: Any = experts[1].get_submodule("w2")
    q, scale = ops.quantize_mxfp4(down.weight.detach()[None])
    assert torch.equal(layer.down_proj[1:2], q)
    assert torch.equal(layer.dequantize("down_proj")[1:2], ops.dequantize_mxfp4(q, scale))
