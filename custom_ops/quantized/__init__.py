# SPDX-License-Identifier: Apache-2.0
"""Weights that are kept quantized: frozen, beside their master, or in a layer's cache."""
