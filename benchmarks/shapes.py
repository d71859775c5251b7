# SPDX-License-Identifier: Apache-2.0
"""The matrix shapes and group sizes that benchmarks run on.

E groups, m mean rows a group, N out_features, K in_features. "up" is an expert's first product,
gate and up projections side by side (N = 2 * intermediate size), "down" its second.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Shape(NamedTuple):
    name: str
    E: int
    m: int
    N: int
    K: int


# Published model dimensions; m follows from tokens a rank * experts a token * ranks / experts.
MODEL_SHAPES = (
    # DeepSeek-V3: hidden 7168, intermediate 2048, 8 of 256 experts, 4096 tokens a rank;
    # experts spread over 8, 32 and 64 ranks
    Shape("dsv3_ep8_up", E=32, m=1024, N=4096, K=7168),
    Shape("dsv3_ep8_down", E=32, m=1024, N=7168, K=2048),
    Shape("dsv3_ep32_up", E=8, m=4096, N=4096, K=7168),
    Shape("dsv3_ep32_down", E=8, m=4096, N=7168, K=2048),
    Shape("dsv3_ep64_up", E=4, m=8192, N=4096, K=7168),
    Shape("dsv3_ep64_down", E=4, m=8192, N=7168, K=2048),
    # Kimi K2: DeepSeek-V3's sizes, 8 of 384 experts over 8 ranks
    Shape("kimi_k2_ep8_up", E=48, m=683, N=4096, K=7168),
    # Qwen3-30B-A3B: hidden 2048, intermediate 768, 8 of 128 experts on one rank, 8192 tokens
    Shape("qwen3_30b_up", E=128, m=512, N=1536, K=2048),
    Shape("qwen3_30b_down", E=128, m=512, N=2048, K=768),
    # Qwen3-235B-A22B: hidden 4096, intermediate 1536, 8 of 128 experts over 8 ranks
    Shape("qwen3_235b_up", E=16, m=2048, N=3072, K=4096),
    Shape("qwen3_235b_down", E=16, m=2048, N=4096, K=1536),
    # Mixtral 8x7B: hidden 4096, intermediate 14336, 2 of 8 experts on one rank, 16384 tokens
    Shape("mixtral_up", E=8, m=4096, N=28672, K=4096),
    Shape("mixtral_down", E=8, m=4096, N=4096, K=14336),
    # gpt-oss-20b: hidden and intermediate 2880, 4 of 32 experts on one rank, 8192 tokens
    Shape("gptoss_up", E=32, m=1024, N=5760, K=2880),
    Shape("gptoss_down", E=32, m=1024, N=2880, K=2880),
    # DeepSeek-V3 at inference: bound by the bytes of the weights, so left out of means
    Shape("dsv3_decode_up", E=32, m=20, N=4096, K=7168),
    Shape("dsv3_decode_up_1", E=32, m=1, N=4096, K=7168),
    Shape("dsv3_decode_up_4", E=32, m=4, N=4096, K=7168),
    Shape("qwen3_30b_decode_up_1", E=128, m=1, N=1536, K=2048),
    Shape("qwen3_30b_decode_down_1", E=128, m=1, N=2048, K=768),
    # Low-rank factors of qwen3_30b_up: x A^T, and that times B^T; bound by the bytes of the rows
    Shape("qwen3_30b_rank_16_a", E=128, m=512, N=16, K=2048),
    Shape("qwen3_30b_rank_16_b", E=128, m=512, N=2048, K=16),
    Shape("qwen3_30b_rank_64_a", E=128, m=512, N=64, K=2048),
)

# One of each kind: many bytes, many groups, short K, partial 128-blocks, decode.
QUICK_SHAPES = (
    "dsv3_ep32_up",
    "dsv3_ep8_down",
    "qwen3_30b_down",
    "gptoss_down",
    "dsv3_decode_up",
)

# So little work that what launching it costs decides.
LAUNCH_BOUND = Shape("tiny", E=8, m=128, N=1024, K=1024)

# Sizes that two CPU cores multiply in milliseconds.
CPU_SHAPES = (
    Shape("cpu_up", E=8, m=128, N=1024, K=512),
    Shape("cpu_many_groups", E=64, m=16, N=256, K=256),
    Shape("cpu_partial_blocks", E=8, m=256, N=1440, K=736),
    Shape("cpu_many_rows", E=8, m=512, N=512, K=2048),
)

# Outputs of 32 MiB, which the C library maps anew unless its heap happens to have room. For
# bench_group_quantize alone: products and compiled layers of it take long.
CPU_PAST_CACHES = Shape("cpu_past_caches", E=8, m=1024, N=256, K=4096)


def chosen_shapes(names: list[str] | None, device: torch.device, quick: bool) -> list[Shape]:
    """The named shapes; without names those of the device, or a few telling ones of them."""
    if names:
        named = (*MODEL_SHAPES, LAUNCH_BOUND, *CPU_SHAPES, CPU_PAST_CACHES)
        by_name = {shape.name: shape for shape in named}
        unknown = [name for name in names if name not in by_name]
        if unknown:
            raise SystemExit(f"no shape {unknown[0]}; there are {', '.join(by_name)}")
        return [by_name[name] for name in names]
    if device.type == "cpu":
        return list(CPU_SHAPES[:2] if quick else CPU_SHAPES)
    return [shape for shape in MODEL_SHAPES if not quick or shape.name in QUICK_SHAPES]


def _even(E: int, m: int) -> list[int]:
    return [m] * E


def _skew(E: int, m: int) -> list[int]:
    """From 0.37 to 1.63 of the mean, in scattered order."""
    return [max(1, int(m * (0.37 + 1.26 * ((i * 7919) % E) / max(1, E - 1)))) for i in range(E)]


def _zipf(E: int, m: int) -> list[int]:
    """Proportional to 1, 1/2, 1/3, ... in scattered order; group 0 takes what rounding left."""
    weights = [1 / (1 + (i * 7919) % E) for i in range(E)]
    sizes = [int(E * m * weight / sum(weights)) for weight in weights]
    sizes[0] += E * m - sum(sizes)
    return sizes


def _one(E: int, m: int) -> list[int]:
    return [E * m if i == E // 2 else 0 for i in range(E)]


SPLITS: dict[str, Callable[[int, int], list[int]]] = {
    "even": _even,
    "skew": _skew,
    "zipf": _zipf,
    "one": _one,
}


def group_sizes(shape: Shape, splits: str) -> list[int]:
    """Rows of each group; their sum is T, which only "skew" lets differ from E * m."""
    return SPLITS[splits](shape.E, shape.m)


def is_decode(shape: Shape) -> bool:
    """Whether so few rows meet each weight that its bytes, not products, take the time."""
    return shape.m < 64 and shape in MODEL_SHAPES


def is_low_rank(shape: Shape) -> bool:
    """Whether a side is so narrow that the rows' bytes, not products, take the time."""
    return min(shape.N, shape.K) <= 64
