# SPDX-License-Identifier: Apache-2.0
"""See what FP8 does to a model: statistics of its layers, and layers beside BF16."""

from grouped_linear.debugging.compare import Comparison, Difference, compare
from grouped_linear.debugging.statistics import Load, OperandStatistics, Statistics
from grouped_linear.debugging.watch import Watch, watch
from grouped_linear.recipes.fake_quantize import fake_quantize

__all__ = [
    "Comparison",
    "Difference",
    "Load",
    "OperandStatistics",
    "Statistics",
    "Watch",
    "compare",
    "fake_quantize",
    "watch",
]
