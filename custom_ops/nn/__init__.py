"""Layers, and what they compute as functions."""
