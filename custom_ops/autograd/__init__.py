"""Gradients: of ops, of layers, of routing."""
