# SPDX-License-Identifier: Apache-2.0
"""Routers: experts chosen and weighted by topk_experts, and a product that passes its input on.

T tokens, H features, E experts, k chosen.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from grouped_linear import GroupedMLP, ops
from grouped_linear.nn.router import router_logits
from support import reference
from support.compare import assert_same_bits
from support.layers import call_of
from support.tensors import BF16, FP16, FP32
from support.tolerances import tolerance

T, H, E = 60, 32, 8
NORMALIZED: Any = {"score_function": "softmax", "normalize": True}


def leaves(dtype: torch.dtype, device: str = "cpu", tokens: int = T) -> list[Tensor]:
    shapes = (tokens, H), (E, H), (E,)
    return [torch.randn(s).to(device, dtype).requires_grad_() for s in shapes]


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return linear(x, weight, bias), x


def squares(logits: Tensor, x: Tensor) -> Tensor:
    """A function of both results, whose gradients differ from element to element."""
    return logits.float().pow(2).sum() + x.float().pow(3).sum()


# --- a router's product --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_two_uses(dtype: torch.dtype, compiled: bool, device: str) -> None:
    given = leaves(dtype, device)
    function = torch.compile(router_logits, fullgraph=True) if compiled else router_logits
    logits, x = function(*given)
    assert_same_bits(logits, linear(*given))
    assert_same_bits(x, given[0])
    actual = torch.autograd.grad(squares(logits, x), given)
    wide = [t.detach().double().requires_grad_() for t in given]
    logits_d, x_d = plain(*wide)
    d_logits = (2 * logits.detach().float()).to(dtype).double()
    d_x = (3 * x.detach().float() ** 2).to(dtype).double()
    expected = torch.autograd.grad([logits_d, x_d], wide, [d_logits, d_x])
    d = d_logits.abs()
    magnitudes = d @ wide[1].detach().abs() + d_x.abs(), d.mT @ wide[0].detach().abs(), d.sum(0)
    depths = E + 1, T, T
    for a, e, m, depth in zip(actual, expected, magnitudes, depths, strict=True):
        assert a.dtype == dtype
        assert ((a.double() - e).abs() <= tolerance(e, m, depth, dtype)).all()


def test_each_gradient_alone() -> None:
    """Beside a frozen router x is not kept."""
    for needed in (0, 1, 2):
        given = leaves(FP32)
        for i, t in enumerate(given):
            t.requires_grad_(i == needed)
        expected = torch.autograd.grad(squares(*plain(*given)), given[needed])
        logits, x = router_logits(*given)
        if needed == 0:
            node: Any = logits.grad_fn
            assert node.saved_tensors[0] is None
        actual = torch.autograd.grad(squares(logits, x), given[needed])
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_results_that_are_used_alone(dtype: torch.dtype) -> None:
    x, weight, _ = leaves(dtype)
    logits, passed = router_logits(x, weight)
    (dx,) = torch.autograd.grad(logits.sum(), x, retain_graph=True)
    torch.testing.assert_close(dx, torch.autograd.grad(linear(x, weight).sum(), x)[0])
    (dx,) = torch.autograd.grad(passed.sum(), x)
    assert (dx == 1).all()


def test_a_batch_of_sequences_under_autocast() -> None:
    given = leaves(FP32)[:2]
    x, weight = given[0].view(3, 20, H), given[1]
    with torch.autocast("cpu", BF16):
        logits, passed = router_logits(x, weight)
        assert_same_bits(logits, linear(x, weight))
    assert (logits.shape, passed.shape) == ((3, 20, E), (3, 20, H))
    assert logits.dtype == passed.dtype == BF16
    dx, dw = torch.autograd.grad(squares(logits, passed), given)
    assert dx.dtype == dw.dtype == FP32


def test_no_tokens_and_no_gradient() -> None:
    given = leaves(BF16, tokens=0)
    logits, x = router_logits(*given)
    weights, experts = ops.topk_experts(logits, 2, **NORMALIZED)
    assert weights.shape == experts.shape == (0, 2)
    for gradient in torch.autograd.grad(weights.sum() + x.sum(), given):
        assert not gradient.any()
    with torch.no_grad():
        logits, x = router_logits(*leaves(BF16))
        assert not logits.requires_grad
        assert not ops.topk_experts(logits, 2)[0].requires_grad


def test_second_derivatives_are_refused() -> None:
    given = leaves(FP32)
    logits, x = router_logits(*given)
    weights, _ = ops.topk_experts(logits, 2, **NORMALIZED)
    for y in (squares(logits, x), weights.square().sum()):
        (dx,) = torch.autograd.grad(y, given[0], create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            dx.sum().backward()


def test_an_x_without_gradient_gets_none() -> None:
    """Or the experts would compute it."""
    x, weight, bias = leaves(FP32)
    logits, passed = router_logits(x.detach(), weight, bias)
    assert logits.requires_grad
    assert not passed.requires_grad


def test_one_token_without_a_dimension() -> None:
    x, weight, bias = leaves(FP32)
    logits, passed = router_logits(x[0], weight, bias)
    torch.testing.assert_close(logits, linear(x[0], weight, bias))
    assert_same_bits(passed, x[0])
    weights, experts = ops.topk_experts(logits, 2, **NORMALIZED)
    of_one = ops.topk_experts(logits[None], 2, **NORMALIZED)
    assert_same_bits(weights, of_one[0][0])
    y = GroupedMLP(E, H, 16)(passed, weights, experts)
    assert y.shape == x[0].shape


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda x, w, b: (x, w.tolist()), "weight must be a tensor, got list"),
        (lambda x, w, b: (x, w[0]), "weight must be [E, H], and x has H = 32, got [32]"),
        (lambda x, w, b: (x, w.mT), "weight must be [E, H], and x has H = 32, got [32, 8]"),
        (lambda x, w, b: (x, w, b[:1]), "bias must be [8], got [1]"),
        (
            lambda x, w, b: (x.bfloat16(), w, b),
            "x is bfloat16, weight float32: cast one of them, or use torch.autocast",
        ),
    ],
)
def test_wrong_arguments(wrong: Any, sentence: str) -> None:
    with pytest.raises((TypeError, RuntimeError)) as raised:
        router_logits(*wrong(*leaves(FP32)))
    assert str(raised.value) == f"router_logits: {sentence}"


class Layer(nn.Module):
    """A router and its experts, in this package's ops or in torch's."""

    def __init__(self, routes: bool) -> None:
        super().__init__()
        self.routes = routes
        self.router = nn.Linear(H, E, bias=False)
        self.experts = GroupedMLP(E, H, 16)

    def forward(self, x: Tensor) -> Tensor:
        if self.routes:
            logits, x = router_logits(x, self.router.weight)
            weights, experts = ops.topk_experts(logits, 2, **NORMALIZED)
        else:
            scores, experts = self.router(x).softmax(-1).topk(2)
            weights = scores / scores.sum(-1, keepdim=True)
        y: Tensor = self.experts(x, weights, experts)
        return y


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_learns_alike(compiled: bool, device: str) -> None:
    torch.manual_seed(0)
    ours, theirs = Layer(True).to(device), Layer(False).to(device)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(T, H, device=device)
    found = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        run = call_of(layer, compiled)
        y = run(leaf)
        y.square().sum().backward()
        found.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


# --- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_special_logits(function: Any, normalize: bool, device: str) -> None:
    """What torch gives for the same chosen experts: NaN where it is NaN, 0 for a masked expert."""
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 100.0, -100.0, 1.0])
    logits = special[torch.randint(7, (400, 20))]
    logits[:100] = torch.where(logits[:100].isfinite(), logits[:100], -torch.inf)
    given = logits.to(device).requires_grad_()
    weights, experts = ops.topk_experts(given, 5, score_function=function, normalize=normalize)
    assert torch.equal(experts.cpu(), reference.topk_experts(logits, 5))
    wide = logits.double().requires_grad_()
    scores = reference.scores_of_experts(wide, function).gather(1, experts.cpu())
    expected = reference.weights_of_experts(scores, normalize, 1.0)
    torch.testing.assert_close(
        weights.double().cpu(), expected, equal_nan=True, rtol=1e-5, atol=1e-30
    )
    gradient, of_torch = (
        torch.autograd.grad(w.square().sum(), t)[0].double().cpu()
        for w, t in ((weights, given), (expected, wide))
    )
    finite = of_torch.isfinite().all(1) & logits.isfinite().all(1)
    torch.testing.assert_close(gradient[finite], of_torch[finite], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_experts_that_a_bias_chooses_far_below_the_largest(
    function: Any, normalize: bool, dtype: torch.dtype, device: str
) -> None:
    """The formula's gradient, of every expert, where its epsilon counts and where it does not."""
    below = torch.tensor([0.0, 10.0, 20.0, 30.0, 40.0, 46.0, 60.0, 80.0, 100.0]).repeat(20)
    logits = torch.randn(len(below), 40)
    logits[:, 5:] -= below[:, None]
    bias = torch.rand(40) + torch.where(torch.arange(40) < 5, 0.0, 2.0)
    logits, d = logits.to(dtype), torch.randn(len(below), 3)
    options = {"score_function": function, "normalize": normalize, "scaling_factor": 2.5}

    def gradient(device: str) -> tuple[Tensor, Tensor, Tensor]:
        given = logits.to(device).requires_grad_()
        weights, experts = ops.topk_experts(given, 3, bias.to(device), **options)
        (d_logits,) = torch.autograd.grad(weights, given, d.to(device))
        return weights.detach().cpu(), experts.cpu(), d_logits.cpu()

    weights, experts, d_logits = gradient(device)
    assert (experts >= 5).all()
    for a, b in zip((weights, experts, d_logits), gradient("cpu"), strict=True):
        assert_same_bits(a, b)
    wide = logits.double().requires_grad_()
    scores = reference.scores_of_experts(wide, function).gather(1, experts)
    expected = reference.weights_of_experts(scores, normalize, 2.5)
    (of_torch,) = torch.autograd.grad(expected, wide, d.double())
    # A score below 1e-36 is 0, and epsilon 1e-20.
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-15)
    largest = of_torch.abs().amax(1, keepdim=True) + 1e-10
    step = 2**-8 if dtype == BF16 else 1e-5
    torch.testing.assert_close(d_logits / largest, of_torch / largest, rtol=step, atol=1e-5)


def test_weights_of_masked_experts_alone(device: str) -> None:
    """A row of -inf has no softmax, as in torch."""
    logits = torch.full((2, 4), -torch.inf, device=device)
    weights, experts = ops.topk_experts(logits, 2, **NORMALIZED)
    assert weights.isnan().all()
    assert experts.tolist() == [[0, 1]] * 2


def test_a_bias_is_not_in_the_graph() -> None:
    """As in torch, where it chooses by topk's integers alone."""
    bias, seen = nn.Parameter(torch.randn(E)), list[Tensor]()
    bias.register_hook(seen.append)
    logits = torch.randn(T, E)
    assert not ops.topk_experts(logits, 2, bias, score_function="sigmoid")[0].requires_grad
    weights, _ = ops.topk_experts(logits.requires_grad_(), 2, bias, score_function="sigmoid")
    weights.sum().backward()
    assert bias.grad is None
    assert not seen


# --- routers of transformers ---------------------------------------------------------------------


def hugging_face_router(name: str) -> nn.Module:
    """A router of transformers with random parameters."""
    transformers = pytest.importorskip("transformers")
    library, router = {
        "Qwen3Moe": ("qwen3_moe", "Qwen3MoeTopKRouter"),
        "Mixtral": ("mixtral", "MixtralTopKRouter"),
        "DeepseekV3": ("deepseek_v3", "DeepseekV3TopkRouter"),
        "GptOss": ("gpt_oss", "GptOssTopKRouter"),
    }[name]
    sizes = {"hidden_size": H, "num_experts_per_tok": 3}
    if name == "Qwen3Moe":
        sizes |= {"num_experts": E, "norm_topk_prob": True}
    elif name == "DeepseekV3":
        sizes |= {"n_routed_experts": E, "n_group": 1, "topk_group": 1}
    else:
        sizes |= {"num_local_experts": E}
    config = getattr(transformers, f"{name}Config")(**sizes)
    module = __import__(f"transformers.models.{library}.modeling_{library}", fromlist=[router])
    made: nn.Module = getattr(module, router)(config)
    for t in (*made.parameters(), *made.buffers()):
        nn.init.normal_(t)
    return made


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "DeepseekV3", "GptOss"])
def test_a_router_of_transformers(name: str) -> None:
    """The experts that it chooses, its weights but for rounding, and its gradients."""
    router: Any = hugging_face_router(name)
    x = torch.randn(T, H)
    logits, expected, experts = router(x)
    scoring: Any = NORMALIZED
    if name == "DeepseekV3":
        bias, factor = router.e_score_correction_bias, router.routed_scaling_factor
        scoring = {"score_function": "sigmoid", "normalize": True, "expert_bias": bias}
        scoring["scaling_factor"] = factor
    weights, chosen = ops.topk_experts(logits, 3, **scoring)
    order, same = experts.argsort(1), chosen.argsort(1)  # DeepSeek's are in no order
    assert torch.equal(chosen.gather(1, same), experts.gather(1, order))
    torch.testing.assert_close(weights.gather(1, same), expected.gather(1, order))
    d = torch.randn(T, E)
    of_each = [(w * d.gather(1, e)).sum() for w, e in ((weights, chosen), (expected, experts))]
    gradients = [torch.autograd.grad(y, router.weight, retain_graph=True) for y in of_each]
    torch.testing.assert_close(*gradients)
