# SPDX-License-Identifier: Apache-2.0
"""Tools on the public names: what FP8 does to a model, and the experts that it chose."""

from grouped_linear.contrib.batch_invariance import check_batch_invariant
from grouped_linear.contrib.compare import Comparison, Difference, compare
from grouped_linear.contrib.fake_quantize import fake_quantize
from grouped_linear.contrib.routing_replay import (
    Recording,
    pad_routing,
    record_routing,
    replay_routing,
)
from grouped_linear.contrib.watch import Load, OperandStatistics, Statistics, Watch, watch

__all__ = [
    "Comparison",
    "Difference",
    "Load",
    "OperandStatistics",
    "Recording",
    "Statistics",
    "Watch",
    "check_batch_invariant",
    "compare",
    "fake_quantize",
    "pad_routing",
    "record_routing",
    "replay_routing",
    "watch",
]
