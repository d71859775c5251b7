"""Weights that are kept quantized: GroupedTensor, a layer's weight cache, checkpoint files."""

# All three register handlers of GroupedTensor.
from grouped_linear.quantized import adam as adam
from grouped_linear.quantized import collectives as collectives
from grouped_linear.quantized import dispatch as dispatch
