"""Weights that are kept quantized."""
