# SPDX-License-Identifier: Apache-2.0
"""Weights that are kept quantized: frozen, beside their master, or in a layer's cache."""

# It registers what fused optimizers do to a GroupedTensorWithMaster.
from grouped_linear.quantized import fused_adam as fused_adam
