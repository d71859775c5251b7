# SPDX-License-Identifier: Apache-2.0
"""Grouped (mixture-of-experts) linear layers in FP8 and BF16 as torch.compile custom ops.

>>> import torch
>>> from grouped_linear import Float8BlockScaling, GroupedLinear
>>> layer = GroupedLinear(4, in_features=64, out_features=32, recipe=Float8BlockScaling())
>>> x, m_splits = torch.randn(10, 64), torch.tensor([3, 0, 5, 2])
>>> layer(x, m_splits).shape
torch.Size([10, 32])

Examples in docstrings assume that ``torch`` and the public names of their module and of this
package are imported.
"""

if __name__ != "grouped_linear":
    raise ImportError(
        f"import grouped_linear, not {__name__}: its ops can be registered only once, by that name"
    )

from importlib.metadata import version

from grouped_linear import loading as loading  # first: it registers the ops  # isort: skip
from grouped_linear import meta_kernels as meta_kernels  # their fakes  # isort: skip
from grouped_linear import ops  # isort: skip
from grouped_linear import te as te
from grouped_linear.integrations.convert import convert
from grouped_linear.nn.functional import grouped_linear
from grouped_linear.nn.functional_mlp import grouped_mlp, grouped_mlp_sorted
from grouped_linear.nn.linear import GroupedLinear
from grouped_linear.nn.lora import Lora
from grouped_linear.nn.mlp import GroupedMLP
from grouped_linear.ops import SwiGLU
from grouped_linear.ops.activation import Activation, GeGLU, SquaredReLU
from grouped_linear.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    Recipe,
    update_scales,
)

__version__ = version("grouped_linear")
__all__ = [
    "Activation",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "GeGLU",
    "GroupedLinear",
    "GroupedMLP",
    "Lora",
    "MXFP8BlockScaling",
    "Recipe",
    "SquaredReLU",
    "SwiGLU",
    "convert",
    "grouped_linear",
    "grouped_mlp",
    "grouped_mlp_sorted",
    "ops",
    "te",
    "update_scales",
]


def __dir__() -> list[str]:
    """The public names, without the modules that define them."""
    return sorted((*__all__, "__version__"))
