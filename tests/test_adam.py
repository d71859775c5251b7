"""A step of Adam over a quantized weight: the op, and torch's fused optimizers that call it.

E experts, K in_features, N out_features.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs

from grouped_linear import (
    GroupedTensor,
    GroupedTensorWithMaster,
    ops,
)
from support.cases import cases
from support.compare import assert_same, assert_same_bits
from support.devices import devices, needs_gpu
from support.groups import GROUPS, Groups
from support.samples import make, variant_of
from support.tensors import BF16, FP16, FP32
from support.tolerances import ROUNDING

E, N, K = 3, 272, 400
DEVICES = pytest.mark.parametrize("device", devices("adam_weight_"))
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def assert_neighbours(q: Tensor, scale: Tensor, w: Tensor, *, nearest: bool) -> None:
    """Each number is one of the two e4m3 numbers beside w / scale, or the nearer one."""
    *_, size_N, size_K = w.shape
    blocks = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., :size_N, :size_K]
    exact = w / blocks.double()
    step = 2.0 ** (exact.abs().clamp(min=2.0**-6).log2().floor() - 3)  # 3 bits of mantissa
    # float32 rounds w, and what it is a sum of, by some units of 2^-24, which moves a tie, or a
    # number at a power of two
    error = (q.double() - exact).abs()
    rounding = 2.0**-18 * exact.abs() + 1e-6 / blocks.double()
    assert (error <= (0.5 if nearest else 1.0) * step + rounding).all()


@needs_gpu
@pytest.mark.parametrize(("op", "groups", "variant", "dtype", "device"), cases("adam_weight_"))
def test_devices_agree(
    op: str, groups: Groups, variant: str, dtype: torch.dtype, device: str
) -> None:
    """To the bit, moments too: gradients of any size, infinities among them."""
    sample = variant_of(op, groups, variant, dtype)
    if sample["master"] is not None:
        pytest.skip("a GPU's powf, which torch calls, has other bits than a CPU's")
    for _ in range(3):
        grad = torch.randn_like(sample["grad"], dtype=FP32)
        sample = sample.but(grad=(grad * torch.randn_like(grad).mul(9).exp()).to(dtype))
        sample["exp_avg_sq"].mul_(torch.rand_like(grad).to(dtype))
        sample["exp_avg_sq"][:, ::3, ::5] = 0
        sample["exp_avg_sq"][:, 1, ::7] = torch.inf
        for a, b in zip(sample.results("cpu"), sample.results(device), strict=True):
            finite = a.float().isfinite() if a.itemsize > 1 else torch.ones_like(a, dtype=bool)
            assert_same_bits(a[finite], b[finite])
            assert torch.equal(finite, b.float().isfinite() if b.itemsize > 1 else finite)


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
        for own, other in zip(p.parts, fresh.parts, strict=True):
            assert_same_bits(own, other)
    assert len(op_calls) == (0 if name == "Adam" else 6)  # that torch decays the gradient


@DEVICES
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


# --- stochastic rounding -------------------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize("power_of_two", [True, False])
def test_rounding_is_unbiased(power_of_two: bool, device: str) -> None:
    """Means over positions and steps are exact, and neighbours do not share their noise."""
    size, steps, large = 4096, 16, 2.0**20
    grad_8 = torch.tensor([3.3, -0.77, 1e-2, -3.1e-3, 2.0**-9 / 3, 100.1, -448.0, 0.0])
    grad = torch.zeros(1, size, 16)
    grad[..., :8] = grad_8
    w_8 = -grad_8.double() / (grad_8.abs().double() / large + 1)
    numbers = []
    for step in range(1, steps + 1):
        q, scale, _ = ops.quantize_weight(torch.zeros(1, size, 16, device=device))
        m, v = (torch.zeros(1, size, 16, device=device) for _ in range(2))
        count = torch.tensor(float(step), device=device)
        options = {"lr": large, "beta1": 0.0, "beta2": 0.0, "eps": large}
        options |= {"power_of_two_scales": power_of_two}  # w = 0 - lr * grad / (|grad| + eps)
        ops.adam_weight_(q, scale, None, None, grad.to(device), m, v, None, count, **options)
        numbers.append(q[0, :, :8].cpu().double())
    drawn = torch.stack(numbers)  # [steps, size, 8]
    exact = w_8 / scale[0, 0, 0].cpu().double()
    between = 2.0 ** (exact.abs().clamp(min=2.0**-6).log2().floor() - 3)
    # a coin's deviation is at most 0.5, and w is exact to some units of 2^-24
    error = (drawn.mean((0, 1)) - exact).abs() / between
    assert (error < 5 * 0.5 / (size * steps) ** 0.5 + 1e-5).all()
    up = (drawn > exact).double()[..., :6]  # none of these is an e4m3 number
    up = (up - up.mean((0, 1))) / up.std((0, 1))
    for a, b in ((up[1:], up[:-1]), (up[:, 1:], up[:, :-1]), (up[..., 1:], up[..., :-1])):
        assert abs((a * b).mean().item()) < 5 / a.numel() ** 0.5


@DEVICES
def test_copies_of_a_weight_stay_equal(device: str) -> None:
    """Rounding follows from the step, position and number, not from a random generator."""
    weights = [nn.Parameter(GroupedTensor.quantize(draw(0).to(device))) for _ in range(2)]
    optimizers = [torch.optim.AdamW([w], fused=True) for w in weights]
    for step in range(3):
        for w, optimizer in zip(weights, optimizers, strict=True):
            torch.rand(7, device=device)  # generators differ
            w.grad = draw(step).to(device)
            optimizer.step()
        assert_same(weights[0].detach(), weights[1].detach())


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


@DEVICES
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_steps_of_torch(
    dtype: torch.dtype, scaled: bool, name: str, device: str, op_calls: list[None]
) -> None:
    """Each step is that of torch's fused optimizer over the numbers in float32, then rounded."""
    w = GroupedTensor.quantize(draw(9, dtype).to(device), stochastic_rounding=False)
    p, plain = nn.Parameter(w), nn.Parameter(torch.ones(16, device=device, dtype=dtype))
    twin = nn.Parameter(w.dequantize(FP32))
    plain_twin = nn.Parameter(plain.detach().clone())
    optimizer, other = optimizer_of(name, [plain, p]), optimizer_of(name, [plain_twin])
    of_twin = optimizer_of(name, [twin])
    for each in (optimizer, other, of_twin) if scaled else ():
        each.grad_scale = torch.tensor(4.0, device=device)
        each.found_inf = torch.tensor(0.0, device=device)
    for seed in range(3):
        p.grad, plain.grad = draw(seed, dtype).to(device), torch.ones_like(plain)
        twin.grad, plain_twin.grad = p.grad.float().clone(), plain.grad.clone()
        optimizer.step()
        assert len(op_calls) == seed + 1
        of_twin.step(), other.step()
        assert_same_bits(plain, plain_twin)
        assert_same_bits(p.grad.float(), twin.grad.to(dtype).float())
        written = p.detach().clone()
        assert isinstance(written, GroupedTensor)
        for key in (key for key in MOMENTS if key in of_twin.state[twin]):
            mine, theirs = optimizer.state[p][key], of_twin.state[twin][key]
            assert mine.dtype == dtype
            assert type(mine) is Tensor
            torch.testing.assert_close(
                mine.float(), theirs, rtol=2 * ROUNDING[dtype] + 2.0**-20, atol=1e-6
            )
            theirs.copy_(mine)
        of_same_moments = twin.detach().cpu().double()
        assert_neighbours(written.q.cpu(), written.scale.cpu(), of_same_moments, nearest=True)
        with torch.no_grad():
            twin.copy_(p.detach())


@DEVICES
def test_found_inf_skips_the_step(device: str) -> None:
    p = nn.Parameter(GroupedTensor.quantize(draw(0).to(device)))
    before = p.detach().clone()
    optimizer = optimizer_of("AdamW", [p])
    optimizer.grad_scale = torch.tensor(4.0, device=device)
    optimizer.found_inf = torch.tensor(1.0, device=device)
    p.grad = torch.full((E, N, K), torch.inf, device=device)
    optimizer.step()
    assert_same(p.detach(), before)
    assert optimizer.state[p]["step"] == 0


@DEVICES
def test_one_expert_and_a_strided_gradient(device: str) -> None:
    w = GroupedTensor.quantize(draw(0).to(device))
    p, whole = nn.Parameter(w[1].clone()), nn.Parameter(w[1:2].clone())
    grad = draw(1).to(device)[1]
    p.grad, whole.grad = grad.t().contiguous().t(), grad[None].clone()
    optimizer_of("AdamW", [p, whole]).step()
    assert_same(p.detach(), whole.detach()[0])


def test_views_of_another_shape_take_the_slower_way(op_calls: list[None]) -> None:
    w = GroupedTensor.quantize(draw(0), stochastic_rounding=False)
    twin = w.clone()
    flat, p = nn.Parameter(w.view(-1)), nn.Parameter(twin)
    flat.grad, p.grad = draw(1).view(-1), draw(1)
    optimizer_of("AdamW", [flat]).step()
    assert not op_calls
    optimizer_of("AdamW", [p]).step()
    assert (w.q.float() != twin.q.float()).sum() < 10  # ties


@needs_gpu
@pytest.mark.parametrize("name", ["AdamW", "amsgrad"])
def test_cuda_graph(name: str) -> None:
    """Replays take the steps that eager calls take: step and learning rate are on the device."""
    lr = torch.tensor(1e-2, device="cuda")
    ps = [nn.Parameter(GroupedTensor.quantize(draw(0, BF16).cuda())) for _ in range(2)]
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
        assert_same(ps[0].detach(), ps[1].detach())


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["", "tensor_lr"])
def test_compiled_step(lr: float | Tensor) -> None:
    """One call of the op in a graph, and the bits of an eager one.

    torch.compile leaves a fused optimizer's step as it is; this is what the step calls.
    """

    @torch.no_grad()
    def step(w: Tensor, grad: Tensor, moments: list[Tensor], count: Tensor) -> None:
        count.add_(1)
        first, second, largest = ([t] for t in moments)
        torch._fused_adamw_(
            *([w], [grad], first, second, largest, [count]),
            lr=lr,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.1,
            eps=1e-6,
            amsgrad=True,
            maximize=False,
        )

    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    weights = [GroupedTensor.quantize(draw(0, BF16)) for _ in range(2)]
    states = [[torch.zeros(E, N, K, dtype=BF16) for _ in range(3)] for _ in range(2)]
    counts = [torch.zeros(()) for _ in range(2)]
    for seed in range(2):
        for i, update in enumerate((compiled, step)):
            update(weights[i], draw(seed, BF16), states[i], counts[i])
        assert_same(*weights)
        for mine, eager in zip(*states, strict=True):
            assert_same_bits(mine, eager)
    (graph,) = backend.fw_graphs
    assert str(graph.graph).count("grouped_linear.adam_weight_") == 1


# --- averages of weights -------------------------------------------------------------------------


EMA = {
    "lerp_": lambda t, to: torch._foreach_lerp_([t], [to], 0.001),
    "mul_.add_": lambda t, to: t.mul_(0.999).add_(to, alpha=0.001),
}


@pytest.mark.parametrize("update", EMA.values(), ids=EMA)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_moving_average(update: Any, dtype: torch.dtype) -> None:
    """Updates of decay 0.999 from 1 to 2, whose steps are below half of an e4m3's spacing."""
    torch.manual_seed(0)
    t = GroupedTensor.quantize(torch.ones(1, 128, 128, dtype=dtype))
    to = torch.full((1, 128, 128), 2.0, dtype=dtype)
    for _ in range(300):
        update(t, to)
    # an element deviates by less than the spacing of 0.125, sqrt(300 * 0.008 * 0.117) = 0.53
    # if no rounding were taken back; the mean over 2^14 by 2^-7 of that
    assert abs(t.dequantize(FP32).mean().item() - (2 - 0.999**300)) < 5 * 0.125 * 5 / 128
