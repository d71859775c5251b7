"""Weights that are kept quantized: GroupedTensor, a layer's weight cache, checkpoint files."""

from grouped_linear.quantized import dispatch as dispatch  # registers the handlers of GroupedTensor
