# SPDX-License-Identifier: Apache-2.0
"""Ops without a gradient say so where one is asked for, and nowhere else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from grouped_linear import ops
from grouped_linear.ops.gradients import WITHOUT_GRADIENT
from support.compare import assert_all_same_bits, bits
from support.errors import GROUPS_3
from support.op_info import Sample
from support.ops import OPS
from support.samples import make, specified
from support.tensors import FP32

DIFFERENTIABLE = {"grouped_mm", "topk_experts"}
OF_INTEGERS = {"splits_to_offsets", "sort_by_expert"}
OF_INTEGERS |= {"quantize_mxfp4", "dequantize_mxfp4"}


def with_a_leaf(op: str) -> tuple[Sample, Tensor]:
    """A sample of which one argument, none that is written, requires a gradient."""
    sample = make(op, GROUPS_3, FP32)
    for name, value in sample.arguments.items():
        t = value[0] if isinstance(value, list) else value
        if name not in sample.written and isinstance(t, Tensor) and t.is_floating_point():
            leaf = t.clone().requires_grad_()
            return sample.but(**{name: [leaf, *value[1:]] if t is not value else leaf}), leaf
    raise AssertionError(op)


def wrapper(sample: Sample) -> Callable[[], Any]:
    return lambda: getattr(ops, sample.op)(**sample.arguments)


def test_each_op_is_of_one_kind() -> None:
    assert {*WITHOUT_GRADIENT, *DIFFERENTIABLE, *OF_INTEGERS} == set(OPS)
    assert len(WITHOUT_GRADIENT) + len(DIFFERENTIABLE) + len(OF_INTEGERS) == len(OPS)


@pytest.mark.parametrize("op", sorted({*WITHOUT_GRADIENT} - {"update_scales_"}))
def test_an_op_without_a_gradient_refuses_one(op: str) -> None:
    sample, leaf = with_a_leaf(op)
    call = wrapper(sample)
    refused = pytest.raises(RuntimeError, match=rf"^{op}: not differentiable: .*torch.no_grad\(\)$")
    if not sample.schema.returns:  # what it writes has no history
        before = [bits(t).clone() for n in sample.written for t in tree_leaves(sample[n])]
        with refused:
            call()
        after = [bits(t) for n in sample.written for t in tree_leaves(sample[n])]
        assert all(torch.equal(*both) for both in zip(before, after, strict=True))
    else:
        results = [t for t in tree_leaves(call()) if isinstance(t, Tensor)]
        outputs = [t for t in results if t.requires_grad]
        assert outputs
        with torch.no_grad():
            expected = [t for t in tree_leaves(call()) if isinstance(t, Tensor)]
        assert_all_same_bits(specified(sample, results), specified(sample, expected))
        for t in outputs:  # together with what has a gradient, and alone
            with refused:
                (t.float().sum() + leaf.float().sum()).backward()
            with refused:
                torch.autograd.grad(t.float().sum(), leaf)
        assert leaf.grad is None
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not any(t.requires_grad for t in tree_leaves(call()) if isinstance(t, Tensor))


@pytest.mark.parametrize("op", sorted(OF_INTEGERS))
def test_integers_have_no_gradient(op: str) -> None:
    for t in tree_leaves(wrapper(make(op, GROUPS_3, FP32))()):
        assert not t.requires_grad
        assert op == "dequantize_mxfp4" or not t.is_floating_point()  # which takes integers


@pytest.mark.parametrize("op", ["swiglu", *sorted(DIFFERENTIABLE)])
def test_tangents_are_refused(op: str) -> None:
    sample, leaf = with_a_leaf(op)
    (name,) = (n for n, value in sample.arguments.items() if value is leaf)
    primal = leaf.detach()
    refused = pytest.raises(NotImplementedError, match=rf"^{op}: forward-mode")
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        dual = torch.autograd.forward_ad.make_dual(primal, primal)
        with refused:
            wrapper(sample.but(**{name: dual}))()
        wrapper(sample.but(**{name: primal}))()
    with refused:
        torch.func.jvp(lambda t: wrapper(sample.but(**{name: t}))(), (primal,), (primal,))


def test_a_compiled_graph_refuses_when_it_is_made() -> None:
    """It has its backward before any is asked for."""
    sample = make("swiglu", GROUPS_3, FP32)
    gate_up, offs = sample["gate_up"].nan_to_num(), sample["offs"]
    compiled = torch.compile(lambda x: ops.swiglu(x, offs) + x[:, ::2], fullgraph=True)
    leaf = gate_up.clone().requires_grad_()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"use grouped_mlp, or SwiGLU.forward"):
        compiled(leaf)
    for transform in (torch.func.grad, torch.func.grad_and_value):
        transformed = transform(lambda x: ops.swiglu(x, offs).sum())
        with pytest.raises(RuntimeError, match=r"^swiglu: not differentiable: use grouped_mlp"):
            transformed(gate_up)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="swiglu: not differentiable"):
            torch.compile(transformed, fullgraph=True)(gate_up)
    expected = ops.swiglu(gate_up, offs) + gate_up[:, ::2]
    with torch.no_grad():
        assert torch.equal(compiled(leaf), expected)
