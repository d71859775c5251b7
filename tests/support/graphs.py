"""Traced graphs of a layer as text, and options that make CUDA graphs strict.

T rows, E groups, K in_features, N out_features.
"""

import re
import textwrap

import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs, normalize_gm

from grouped_linear import GroupedLinear, Recipe

# Inductor's options for a reduce-overhead mode that raises instead of falling back in silence.
STRICT_GRAPHS = {
    "triton.cudagraph_or_error": True,
    "graph_partition": False,  # which splits in silence what one graph cannot hold
    "fx_graph_cache": False,
}

T, E, K, N = 40, 3, 32, 48


def readable(graph: torch.fx.GraphModule) -> str:
    """A graph's code, one statement per line, without the statements that free dead values."""
    code = normalize_gm(graph.print_readable(print_output=False))
    code = re.sub(r";  [\w =]*None", "", code)
    code = re.sub(r"\[[\d, ]+\]", lambda shape: shape[0].replace(" ", ""), code)
    code = code.replace("torch.ops.", "").replace(".default(", "(")
    return "\n".join(
        textwrap.fill(line.strip(), 96, subsequent_indent="    ", break_long_words=False)
        for line in code.splitlines()
        if line.strip() and not line.startswith("class ")
    )


def graphs(recipe: Recipe | None, training: bool) -> str:
    """The AOT graphs of one layer, forward and backward."""
    backend = AotEagerAndRecordGraphs()
    layer = GroupedLinear(E, K, N, recipe=recipe)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x = torch.randn(T, K, requires_grad=training)
    with torch.set_grad_enabled(training):
        y = compiled(x, torch.tensor([10, 20, 10]))
    if training:
        y.sum().backward()
    recorded = backend.fw_graphs + backend.bw_graphs
    assert len(recorded) == 1 + training
    return "\n\n".join(map(readable, recorded))
