# SPDX-License-Identifier: Apache-2.0
"""A step of Adam over a weight and its FP8 numbers: the op, and torch's fused optimizers.

E experts, K in_features, N out_features.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grouped_linear import ops
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from support.compare import assert_all_same_bits, assert_same_bits
from support.devices import needs_gpu
from support.groups import GROUPS
from support.samples import make
from support.tensors import BF16, FP16, FP32

E, N, K = 3, 272, 400
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@needs_gpu
@pytest.mark.parametrize("name", ["AdamW", "amsgrad", "tensor_lr", "Adam"])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_one_pass_has_the_bits_of_torch(
    dtype: torch.dtype, scaled: bool, name: str, op_calls: list[None]
) -> None:
    """With high-precision numbers: gradients of any size, moments that grow and vanish."""
    w = draw(9, dtype).cuda()
    p, plain = nn.Parameter(GroupedTensorWithMaster.quantize(w.clone())), nn.Parameter(w)
    optimizers = [optimizer_of(name, [one]) for one in (p, plain)]
    for step in range(6):
        grad = draw(step) * draw(step + 10).mul(6).exp()
        grad[:, ::3, ::5] = 0
        for one, optimizer in zip((p, plain), optimizers, strict=True):
            one.grad = grad.to(dtype).cuda()
            if scaled:
                optimizer.grad_scale = torch.tensor(1024.0, device="cuda")
                optimizer.found_inf = torch.tensor(float(step == 3), device="cuda")
            optimizer.step()
            if step == 4:  # a step that has no bias left to correct
                optimizer.state[one]["step"].fill_(1e6)
        assert_same_bits(p.master, plain.detach())
        for state in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if name == "amsgrad" else [])):
            assert_same_bits(optimizers[0].state[p][state], optimizers[1].state[plain][state])
        fresh = GroupedTensorWithMaster.quantize(plain.detach())
        assert_all_same_bits(p.parts, fresh.parts)
    assert len(op_calls) == (0 if name == "Adam" else 6)  # that torch decays the gradient


def test_unaligned_gradient_and_moments(device: str) -> None:
    """Views that begin anywhere in a larger buffer, as those of gradients in buckets."""
    sample = make("adam_weight_", GROUPS["unaligned"], BF16, amsgrad=True, grad_scale=2.0)
    expected = sample.results("cpu")
    sample = sample.on(device)
    for name in ("grad", *MOMENTS):
        t = sample[name]
        buffer = torch.zeros(t.numel() + 3, dtype=BF16, device=device)[3:]
        sample = sample.but(**{name: buffer.view(t.shape).copy_(t)})
    sample()
    for name, t in zip(sample.written, expected, strict=True):
        assert_same_bits(sample[name].cpu(), t)


# --- torch's optimizers --------------------------------------------------------------------------


@pytest.fixture
def op_calls(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each call of the op."""
    calls, op = [], ops.adam_weight_

    def counted(*args: Any, **kwargs: Any) -> None:
        calls.append(None)
        op(*args, **kwargs)

    monkeypatch.setattr(ops, "adam_weight_", counted)
    return calls


def draw(seed: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(E, N, K, generator=torch.Generator().manual_seed(seed)).to(dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "amsgrad": {"amsgrad": True, "maximize": True, "weight_decay": 0.1},
    "tensor_lr": {"lr": torch.tensor(3e-3)},
    "Adam": {"weight_decay": 0.1},
}


def optimizer_of(name: str, parameters: list[Any], **options: Any) -> torch.optim.Optimizer:
    kind = torch.optim.Adam if name == "Adam" else torch.optim.AdamW
    return kind(parameters, **{"lr": 1e-2, "fused": True, **OPTIONS[name], **options})


@needs_gpu
@pytest.mark.parametrize("name", ["AdamW", "amsgrad"])
def test_cuda_graph(name: str) -> None:
    """Replays take the steps that eager calls take: step and learning rate are on the device."""
    lr = torch.tensor(1e-2, device="cuda")
    ps = [nn.Parameter(GroupedTensorWithMaster.quantize(draw(0, BF16).cuda())) for _ in "ab"]
    for p in ps:
        p.grad = draw(1, BF16).cuda()
    captured, eager = (optimizer_of(name, [p], lr=lr, capturable=True) for p in ps)
    captured.step(), eager.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for step in range(4):
        lr.mul_(0.5)
        for p in ps:
            p.grad.copy_(draw(step, BF16))
        graph.replay(), eager.step()
        assert_all_same_bits((ps[0].master, *ps[0].parts), (ps[1].master, *ps[1].parts))
