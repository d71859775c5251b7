# SPDX-License-Identifier: Apache-2.0
"""Options that make CUDA graphs strict."""

# Inductor's options for a reduce-overhead mode that raises instead of falling back in silence.
STRICT_GRAPHS = {
    "triton.cudagraph_or_error": True,
    "graph_partition": False,  # which splits in silence what one graph cannot hold
    "fx_graph_cache": False,
}
