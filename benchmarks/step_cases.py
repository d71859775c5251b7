# SPDX-License-Identifier: Apache-2.0
"""The steps that benchmarks.compiled_vs_eager runs, and the ways to run them.

T tokens or rows, E groups, K in_features, N out_features, D width.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.alternatives import LoopedLinear, TorchGroupedLinear
from benchmarks.hugging_face import HUGGING_FACE_CASES, HuggingFaceCase
from benchmarks.moe_model import VOCABULARY, Experts, LanguageModel, MixtureOfExperts, ModelSize
from benchmarks.shapes import (
    CPU_SHAPES,
    LAUNCH_BOUND,
    MODEL_SHAPES,
    Shape,
    group_sizes,
    is_decode,
    is_low_rank,
)
from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedLinear,
    GroupedMLP,
    MXFP8BlockScaling,
    Recipe,
)
from grouped_linear.quantized.keep import Weights

RECIPES: dict[str, Recipe | None] = {
    "block": Float8BlockScaling(),
    "own": Float8BlockScaling(share_x_scales=False),
    "bf16_wgrad": Float8BlockScaling(wgrad=torch.bfloat16),
    "requantized": Float8BlockScaling(requantize_weights=True),
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "mxfp8": MXFP8BlockScaling(),
}
# torch.compile's mode, and whether the whole step is then captured in one CUDA graph.
MODES: dict[str, tuple[str | None, bool]] = {
    "eager": (None, False),
    "compiled": ("default", False),
    "graphs": ("reduce-overhead", False),
    "one graph": ("default", True),
    "eager graph": (None, True),
}
IMPLEMENTATIONS = ("torch", "ours", "loop")
CACHED = ", cached weight"
UNEVEN = "skew"  # what layers are run on if nothing else is said: see shapes.py
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Candidate:
    """One way to run a case. precision: "bf16", a name in RECIPES, or that and CACHED."""

    implementation: str
    precision: str
    mode: str
    gate_up_in_fp8: bool = False

    def __str__(self) -> str:
        saved = ", gate_up saved in FP8" if self.gate_up_in_fp8 else ""
        return f"{self.implementation} {self.precision}{saved}, {self.mode}"

    @property
    def recipe(self) -> Recipe:
        return RECIPES.get(self.precision.removesuffix(CACHED))

    @property
    def weights(self) -> Weights:
        """How the layer keeps its weights: no call quantizes those of ``CACHED``."""
        return "both" if self.precision.endswith(CACHED) else None


BASELINE = Candidate("torch", "bf16", "compiled")


def linear_of(candidate: Candidate) -> Callable[[int, int, int], nn.Module]:
    if candidate.implementation == "torch":
        return TorchGroupedLinear
    if candidate.implementation == "loop":
        return LoopedLinear
    options: dict[str, Any] = {"bias": False, "recipe": candidate.recipe}
    return partial(GroupedLinear, weights=candidate.weights, **options)


def experts_of(candidate: Candidate) -> Callable[[ModelSize], nn.Module]:
    """Ours is GroupedMLP, everything fused; the others are put together from their layer."""
    if candidate.implementation != "ours":
        return partial(Experts, linear=linear_of(candidate))

    def ours(size: ModelSize) -> nn.Module:
        sizes = size.experts, size.width, size.expert_width
        return GroupedMLP(
            *sizes,
            recipe=candidate.recipe,
            weights=candidate.weights,
            save_gate_up_in_fp8=candidate.gate_up_in_fp8,
        )

    return ours


@dataclass(frozen=True)
class LayerCase:
    """One layer, its rows sorted by expert.

    A case's module is run on its inputs; gradients flow from the first `roots` of its outputs, none
    where these are 0; `vary` changes the group sizes in place, to others each step.
    """

    shape: Shape
    splits: str = UNEVEN
    kind = "layer"
    roots = 1

    @property
    def name(self) -> str:
        return self.shape.name if self.splits == UNEVEN else f"{self.shape.name}_{self.splits}"

    @property
    def sizes(self) -> list[int]:
        return group_sizes(self.shape, self.splits)

    @property
    def tokens(self) -> int:
        return sum(self.sizes)

    def module(self, candidate: Candidate) -> nn.Module:
        return linear_of(candidate)(self.shape.E, self.shape.K, self.shape.N)

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        x_TK = torch.randn(self.tokens, self.shape.K, dtype=BF16, device=device)
        return x_TK.requires_grad_(), torch.tensor(self.sizes, device=device)

    def vary(self, inputs: tuple[Tensor, ...], step: int) -> None:
        sizes = self.sizes[step:] + self.sizes[:step]
        sizes[:2] = 0, sizes[0] + sizes[1]
        inputs[1].copy_(torch.tensor(sizes))


@dataclass(frozen=True)
class BlockCase:
    """A whole expert layer: route, gather, gate_up, SwiGLU, down, combine."""

    name: str
    tokens: int
    size: ModelSize
    kind = "block"
    roots = 2  # the output and the load-balancing loss

    def module(self, candidate: Candidate) -> nn.Module:
        return MixtureOfExperts(self.size, experts_of(candidate))

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        x_1TD = torch.randn(1, self.tokens, self.size.width, dtype=BF16, device=device)
        return (x_1TD.requires_grad_(),)

    def vary(self, inputs: tuple[Tensor, ...], step: int) -> None:
        inputs[0].normal_()


@dataclass(frozen=True)
class ModelCase:
    """The demo's transformer: float32 parameters under autocast, as it is trained."""

    name: str
    batch: int
    size: ModelSize
    kind = "model"
    roots = 1  # what training minimises; the entropy beside it is detached

    @property
    def tokens(self) -> int:
        return self.batch * self.size.context

    def module(self, candidate: Candidate) -> nn.Module:
        return LanguageModel(self.size, experts_of(candidate), BF16)

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        shape = (self.batch, self.size.context + 1)
        return (torch.randint(VOCABULARY, shape, device=device),)

    def vary(self, inputs: tuple[Tensor, ...], step: int) -> None:
        inputs[0].random_(VOCABULARY)


Case = LayerCase | BlockCase | ModelCase | HuggingFaceCase


def block(
    name: str, tokens: int, experts: int, width: int, expert_width: int, chosen: int
) -> BlockCase:
    size = ModelSize(1, width, 1, 1, experts, chosen, expert_width)
    return BlockCase(name, tokens, size)


GPU_CASES: tuple[Case, ...] = (
    LayerCase(LAUNCH_BOUND),
    LayerCase(LAUNCH_BOUND, "even"),
    block("dsv3_like", 4096, experts=32, width=7168, expert_width=2048, chosen=8),
    block("qwen3_30b_like", 8192, experts=128, width=2048, expert_width=768, chosen=8),
    block("mixtral_like", 8192, experts=8, width=4096, expert_width=14336, chosen=2),
    ModelCase("transformer", 8, ModelSize(2, 2048, 16, 1024, 64, 4, 1024)),
    *(LayerCase(s) for s in MODEL_SHAPES if not is_decode(s) and not is_low_rank(s)),
)
CPU_CASES: tuple[Case, ...] = (
    *(LayerCase(shape) for shape in CPU_SHAPES),
    block("cpu_block", 512, experts=8, width=256, expert_width=256, chosen=2),
    ModelCase("cpu_transformer", 4, ModelSize(2, 128, 4, 64, 8, 2, 128)),
)
QUICK = ("tiny", "dsv3_ep8_up", "dsv3_ep32_up", "qwen3_30b_up", "cpu_up")


def chosen_cases(names: list[str] | None, device: torch.device, quick: bool) -> list[Case]:
    """The named cases; without names those of the device, or blocks, model and a few layers."""
    if names:
        by_name = {case.name: case for case in GPU_CASES + CPU_CASES + HUGGING_FACE_CASES}
        unknown = [name for name in names if name not in by_name]
        if unknown:
            raise SystemExit(f"no case {unknown[0]}; there are {', '.join(by_name)}")
        return [by_name[name] for name in names]
    cases = CPU_CASES if device.type == "cpu" else GPU_CASES
    return [case for case in cases if not quick or case.kind != "layer" or case.name in QUICK]


def candidates_for(
    implementations: Iterable[str],
    recipes: Sequence[str],
    modes: Iterable[str],
    cached: bool = False,
) -> list[Candidate]:
    """All that are asked for, the baseline first where it is one of them."""
    of_ours = [*recipes, *(recipe + CACHED for recipe in recipes if cached)]
    candidates = [
        Candidate(implementation, precision, mode)
        for implementation in IMPLEMENTATIONS
        if implementation in implementations
        for precision in ("bf16", *(of_ours if implementation == "ours" else ()))
        for mode in modes
    ]
    return sorted(candidates, key=lambda candidate: candidate != BASELINE)
