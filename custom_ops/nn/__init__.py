# SPDX-License-Identifier: Apache-2.0
"""Layers, and what they compute as functions."""
