"""Weights that are kept quantized: GroupedTensor, a layer's weight cache, checkpoint files."""

# Both register handlers of GroupedTensor.
from grouped_linear.quantized import adam as adam
from grouped_linear.quantized import dispatch as dispatch
