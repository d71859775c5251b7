"""How long do a layer's forward and backward take, eager and compiled, in bf16 and FP8?

T rows, E groups, K in_features, N out_features.

A step is the forward and the backward of one layer, with the gradients of input and weight. The
first row of every case is what torch has today: an autograd graph of
torch.nn.functional.grouped_mm, eager. FP8 quantizes input, weight and output gradient in the step.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks import timing
from benchmarks.shapes import MODEL_SHAPES, SPLITS, Shape, chosen_shapes, group_sizes, is_decode
from grouped_linear import Float8BlockScaling, GroupedLinear
from grouped_linear.recipes import Recipe

RECIPES: dict[str, Recipe] = {"bf16": None, "fp8 block": Float8BlockScaling()}
CLOSE = 0.06  # relative distance (Frobenius) of input gradients; e4m3 keeps 4 bits of each operand


class TorchGroupedLinear(nn.Module):
    """The same layer through torch's own grouped_mm."""

    def __init__(self, weight_ENK: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_ENK)

    def forward(self, x_TK: Tensor, m_splits_E: Tensor) -> Tensor:
        offs_E = m_splits_E.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x_TK, self.weight.transpose(1, 2), offs=offs_E)


class Step:
    """Forward and backward of a layer. mode: torch.compile's, or None for eager."""

    def __init__(
        self, layer: nn.Module, mode: str | None, x_TK: Tensor, m_splits_E: Tensor, dy_TN: Tensor
    ) -> None:
        self.layer = layer if mode is None else torch.compile(layer, fullgraph=True, mode=mode)
        self.x_TK = x_TK.clone().requires_grad_()
        self.m_splits_E, self.dy_TN = m_splits_E, dy_TN
        self.leaves = [self.x_TK, *layer.parameters()]

    def __call__(self) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        for leaf in self.leaves:
            leaf.grad = None
        self.layer(self.x_TK, self.m_splits_E).backward(self.dy_TN)
        assert self.x_TK.grad is not None
        return self.x_TK.grad


def candidates_for(shape: Shape, sizes: list[int], report: timing.Report) -> dict[str, timing.Call]:
    """Torch's layer where it runs, then ours in each recipe; all give the same gradient."""
    device, T = report.device, sum(sizes)
    modes: dict[str, str | None] = {"eager": None, "compiled": "default"}
    if device.type == "cuda":
        modes["compiled, CUDA graphs"] = "reduce-overhead"

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.bfloat16, device=device)

    data = randn(T, shape.K), torch.tensor(sizes, device=device), randn(T, shape.N)
    w_ENK = randn(shape.E, shape.N, shape.K)
    plain: dict[str, timing.Call] = {}
    ours: dict[str, timing.Call] = {}
    for name, mode in modes.items():
        step = Step(TorchGroupedLinear(w_ENK.clone()), mode, *data)
        plain[f"torch F.grouped_mm bf16, {name}"] = step
    for (dtype, recipe), (name, mode) in itertools.product(RECIPES.items(), modes.items()):
        layer = GroupedLinear(
            shape.E,
            shape.K,
            shape.N,
            bias=False,
            dtype=torch.bfloat16,
            device=device,
            recipe=recipe,
        )
        with torch.no_grad():
            layer.weight.copy_(w_ENK)
        ours[f"ours {dtype}, {name}"] = Step(layer, mode, *data)
    candidates = timing.supported(plain, report) | ours
    expected = candidates["ours bf16, eager"]().clone()
    for name, call in candidates.items():
        distance = float(
            torch.linalg.vector_norm(call() - expected) / torch.linalg.vector_norm(expected)
        )
        if not distance < CLOSE:
            raise SystemExit(f"{name}: its input gradient is {distance:.3g} from the others'")
    return candidates


def probe(device: torch.device) -> None:
    """Run one step of each recipe, or raise the sentence that says why not."""
    for recipe in RECIPES.values():
        layer = GroupedLinear(1, 16, 16, bias=False, device=device, recipe=recipe)
        m_splits_E = torch.ones(1, dtype=torch.int32, device=device)
        layer(torch.ones(1, 16, device=device), m_splits_E).sum().backward()


def main() -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", help="names in benchmarks/shapes.py")
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=["skew"])
    args = parser.parse_args()
    device = timing.device_for(args.device, probe)
    report = timing.Report(
        "bench_layer",
        "How long do a layer's forward and backward take, eager and compiled, in bf16 and FP8?",
        "TFLOP/s",
        device,
        args.rounds,
    )
    report.note("FP8 times include quantizing input, weight and output gradient")
    cases = list(itertools.product(chosen_shapes(args.shapes, device, args.quick), args.splits))
    for shape, splits in tqdm(cases, desc="shapes x splits", disable=None):
        torch._dynamo.reset()
        sizes = group_sizes(shape, splits)
        candidates = candidates_for(shape, sizes, report)
        timings = timing.time_paired(candidates, device, report.rounds, capture=False)
        T, N, K = sum(sizes), shape.N, shape.K
        case = {"shape": shape.name, "E": shape.E, "T": T, "N": N, "K": K, "splits": splits}
        report.add(case, timings, 6.0 * T * N * K)
    decode = {shape.name for shape in MODEL_SHAPES if is_decode(shape)}
    report.finish(
        not args.no_write,
        mean_by=("splits",),
        in_mean=lambda case: case["shape"] not in decode,
        merge=args.merge,
    )


if __name__ == "__main__":
    main()
