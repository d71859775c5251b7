# SPDX-License-Identifier: Apache-2.0
"""torchtitan's type checking of distributed programs (``debug.spmd_typechecking``), if installed.

The checker has to be told what an autograd Function does. The layers' Functions are local: a
result differs between processes where an input does. Those of ``grouped_linear.parallel``
communicate, and are left out.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from grouped_linear.autograd.linear import GroupedLinearFunction
from grouped_linear.autograd.mlp import GroupedMLPFunction
from grouped_linear.autograd.routing import CombineFunction, GatherFunction
from grouped_linear.te.deferred import DeferredWgrad

LOCAL_FUNCTIONS = (
    GroupedLinearFunction,
    GroupedMLPFunction,
    GatherFunction,
    CombineFunction,
    DeferredWgrad,
)


if find_spec("spmd_types") is not None:
    spmd_types: Any = import_module("spmd_types")
    for function in LOCAL_FUNCTIONS:
        spmd_types.register_local_autograd_function(function)
