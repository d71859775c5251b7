# SPDX-License-Identifier: Apache-2.0
"""One CUDA graph, replayed with other group sizes: the numbers of the same calls without a graph.

T rows, E groups, K in_features, N out_features.
"""

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from grouped_linear import ops
from grouped_linear.selftest.check import differing

T, E, K, N = 500, 5, 144, 288
SPLITS = ((0, 130, 3, 257, 64), (211, 0, 1, 0, 288))


def step(x_TK: Tensor, dy_TN: Tensor, w_ENK: Tensor, m_splits_E: Tensor) -> list[Tensor]:
    """A layer forward and backward in FP8, and in 16 bits. The rows of groups alone."""
    y, offs, x_t, scale_x_t, w_t, scale_w = ops.block_scaled_linear(x_TK, w_ENK, m_splits_E)
    grads = ops.block_scaled_linear_grad(dy_TN, offs, x_t, scale_x_t, w_t, scale_w, bias_grad=True)
    plain = ops.grouped_mm(x_TK, w_ENK.mT, offs), ops.grouped_mm_wgrad(dy_TN, x_TK, offs)
    return [t for t in tree_leaves([y, tuple(grads), ops.swiglu(y, offs), plain]) if t is not None]


def wrong_replays() -> list[str]:
    """A sentence for each output of a replay that differs."""
    x, dy, w = (torch.randn(*s).bfloat16().cuda() for s in ((T, K), (T, N), (E, N, K)))
    m_splits = torch.tensor(SPLITS[0], device="cuda")
    step(x, dy, w, m_splits)  # loads and sets up, which is no part of a graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, dy, w, m_splits)
    wrong = []
    for sizes in (*SPLITS[::-1], SPLITS[1]):
        m_splits.copy_(torch.tensor(sizes))
        expected = [t.cpu() for t in step(x, dy, w, m_splits)]
        for t in captured:
            t.zero_()
        graph.replay()
        for i, (t, right) in enumerate(zip(captured, expected, strict=True)):
            if said := differing(t.cpu(), right):
                wrong.append(f"output {i}, groups of {', '.join(map(str, sizes))} rows: {said}")
    return wrong
