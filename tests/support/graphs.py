# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: options that make torch.compile's strict, and the graph of a step."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

# Inductor's options for a reduce-overhead mode that raises instead of falling back in silence.
STRICT_GRAPHS = {
    "triton.cudagraph_or_error": True,
    "graph_partition": False,  # which splits in silence what one graph cannot hold
    "fx_graph_cache": False,
}
Result = TypeVar("Result")


def captured(
    step: Callable[[], Result], warm_ups: int = 1, **options: Any
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The graph of a step and what the step returned, which each replay writes again.

    The step runs before it is captured: a capture wants what it uses to be there.
    """
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, **options):
        result = step()
    return graph, result
