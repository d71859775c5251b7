"""Traced graphs as text, and options that make CUDA graphs strict."""

import re
import textwrap

import torch
from torch._dynamo.testing import normalize_gm

# Inductor's options for a reduce-overhead mode that raises instead of falling back in silence.
STRICT_GRAPHS = {
    "triton.cudagraph_or_error": True,
    "graph_partition": False,  # which splits in silence what one graph cannot hold
    "fx_graph_cache": False,
}


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
