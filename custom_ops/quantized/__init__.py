# SPDX-License-Identifier: Apache-2.0
"""Weights that are kept quantized: frozen, beside their master, or in a layer's cache."""

# These register what torch's operations do to GroupedTensorWithMaster.
from grouped_linear.quantized import fused_adam as fused_adam
from grouped_linear.quantized import master_dispatch as master_dispatch
