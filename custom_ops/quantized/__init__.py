"""Weights that are kept quantized: GroupedTensor, a layer's weight cache, checkpoint files."""

# These register what torch's operations do to GroupedTensor and GroupedTensorWithMaster.
from grouped_linear.quantized import collectives as collectives
from grouped_linear.quantized import dispatch as dispatch
from grouped_linear.quantized import fused_adam as fused_adam
from grouped_linear.quantized import master_dispatch as master_dispatch
