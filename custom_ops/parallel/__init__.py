# SPDX-License-Identifier: Apache-2.0
"""Experts on several processes.

Import it by its name: ``import grouped_linear`` alone does not, because DTensor takes 0.5 s.
"""

from grouped_linear.nn.dispatcher import Dispatched, TokenDispatcher
from grouped_linear.parallel.dispatchers import AllGather, AllToAll, AllToAllV
from grouped_linear.parallel.expert_parallel import ExpertParallel

__all__ = ["AllGather", "AllToAll", "AllToAllV", "Dispatched", "ExpertParallel", "TokenDispatcher"]
