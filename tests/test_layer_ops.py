"""A layer's forward and backward as one op each: the bits of the ops inside.

T rows, E groups, K in_features, N out_features.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from grouped_linear import Float8BlockScaling, GroupedLinear, ops
from grouped_linear.nn import functional
from support.cases import cases, variant_of
from support.compare import assert_same_bits
from support.devices import devices
from support.groups import GROUPS, Groups
from support.layers import linear_of
from support.samples import Sample
from support.tensors import BF16, DTYPES, FP32


def scaling(sample: Sample) -> dict[str, Any]:
    return {name: sample.get(name) for name in ("amax_epsilon", "power_of_two_scales")}


def assert_same(actual: Tensor, expected: Tensor | None, used: int | None = None) -> None:
    """The same bits in the first `used` blocks; nothing where None is expected."""
    if expected is None:
        assert actual.numel() == 0
    else:
        assert_same_bits(actual[:used], expected[:used])


@pytest.mark.parametrize(("op", "groups", "variant", "device"), cases("block_scaled_linear"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward(op: str, groups: Groups, variant: str, dtype: torch.dtype, device: str) -> None:
    sample = variant_of(op, groups, variant, dtype).on(device)
    y, offs, x_t, scale_x_t, w_t, scale_w = sample()

    expected_offs = ops.splits_to_offsets(sample.get("m_splits"), groups.T)
    columnwise = sample.get("columnwise_x")
    x = ops.group_quantize(
        sample.get("x"),
        expected_offs,
        columnwise=columnwise,
        share_scales=sample.get("share_scales"),
        **scaling(sample),
    )
    w = ops.quantize_weight(
        sample.get("w"), columnwise=sample.get("columnwise_w"), **scaling(sample)
    )
    scales, bias = (x.scale, w.scale.mT), sample.get("bias")
    product = ops.grouped_scaled_mm(x.q, w.q.mT, *scales, offs, bias, dtype)
    used = sum(-(-rows // 128) for rows in groups.m_splits)
    assert_same(y, product)
    assert_same(offs, expected_offs)
    assert_same(x_t, x.q_t, used)
    assert_same(scale_x_t, x.scale_t, used)
    assert_same(w_t, w.q_t)
    assert_same(scale_w, w.scale)


@pytest.mark.parametrize("device", devices("block_scaled_linear"))
@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(BF16, FP32), (FP32, BF16)], ids=str)
def test_x_and_weight_of_two_dtypes(
    x_dtype: torch.dtype, w_dtype: torch.dtype, device: str
) -> None:
    """Of one dtype they are quantized together on a GPU, of two one after the other."""
    groups = GROUPS["unaligned"]
    x = torch.randn(groups.T, groups.K, device=device)
    w = torch.randn(groups.E, groups.N, groups.K, device=device)
    m_splits = torch.tensor(groups.m_splits, device=device)
    y, offs, *_ = ops.block_scaled_linear(x.to(x_dtype), w.to(w_dtype), m_splits)
    q_x = ops.group_quantize(x.to(x_dtype), offs)
    q_w = ops.quantize_weight(w.to(w_dtype))
    product = ops.grouped_scaled_mm(q_x.q, q_w.q.mT, q_x.scale, q_w.scale.mT, offs, None, x_dtype)
    assert_same_bits(y, product)


@pytest.mark.parametrize(("op", "groups", "variant", "device"), cases("block_scaled_linear_grad"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward(op: str, groups: Groups, variant: str, dtype: torch.dtype, device: str) -> None:
    sample = variant_of(op, groups, variant, dtype).on(device)
    dx, dw, db = sample()

    offs, x_t, w_t = sample.get("offs"), sample.get("x_t"), sample.get("w_t")
    wanted = {"rowwise": w_t is not None, "columnwise": x_t is not None}
    dy = ops.group_quantize(
        sample.get("dy"), offs, bias_grad=sample.get("bias_grad"), **wanted, **scaling(sample)
    )
    expected_dx = expected_dw = None
    if w_t is not None:
        scale_w = sample.get("scale_w")
        expected_dx = ops.grouped_scaled_mm(dy.q, w_t.mT, dy.scale, scale_w, offs, None, dtype)
    if x_t is not None:
        columns = dy.q_t, x_t, dy.scale_t, sample.get("scale_x_t"), offs
        expected_dw = ops.grouped_scaled_mm_wgrad(*columns, sample.get("out_dtype") or dtype)
    assert_same(dx, expected_dx)
    assert_same(dw, expected_dw)
    assert_same(db, dy.bias_grad)


@pytest.mark.parametrize("device", devices("block_scaled_linear"))
def test_an_eager_layer_gives_the_bits_of_separate_ops(device: str) -> None:
    """save_original_input takes the ops one by one."""
    groups = GROUPS["unaligned"]
    results = []
    for save_input in (False, True):
        torch.manual_seed(0)
        layer = linear_of(
            groups.E,
            groups.K,
            groups.N,
            recipe=Float8BlockScaling(),
            dtype=BF16,
            device=device,
            save_original_input=save_input,
        )
        x = torch.randn(groups.T, groups.K, device=device).to(BF16).requires_grad_()
        y = layer(x, torch.tensor(groups.m_splits, device=device))
        y.backward(torch.randn_like(y, dtype=FP32).to(BF16))
        results.append([y, x.grad, layer.weight.grad, layer.bias.grad])
    for one, several in zip(*results, strict=True):
        assert_same_bits(one, several)


@pytest.mark.parametrize("device", devices("block_scaled_linear"))
def test_what_is_not_asked_for_has_no_place_in_memory(device: str) -> None:
    """Scratch of 10 MiB, which torch maps on a GPU as they are: past them is no address."""
    if device == "cuda":
        torch.cuda.empty_cache()
    x, w = torch.ones(4096, 2048, device=device), torch.ones(1, 896, 2048, device=device)
    m_splits = torch.tensor([4096], device=device)
    scratch = x.numel() + 16 * 4096 * 4 + w.numel()
    assert scratch == 10 * 2**20
    y, *_ = ops.block_scaled_linear(x, w, m_splits, columnwise_x=False, columnwise_w=False)
    assert (y == 2048).all()


def test_one_op_or_several_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Dynamo traces the layer and breaks its graph at the gradient, which runs eagerly."""
    layer = GroupedLinear(3, 32, 48, recipe=Float8BlockScaling())
    x, m_splits = torch.randn(9, 32), torch.tensor([2, 0, 5])
    expected = layer(x, m_splits)

    class Eager:
        apply = torch._dynamo.disable(functional.GroupedLinearFunction.apply)

    monkeypatch.setattr(functional, "GroupedLinearFunction", Eager)
    assert_same_bits(torch.compile(layer, backend="eager")(x, m_splits), expected)
