# SPDX-License-Identifier: Apache-2.0
""":class:`grouped_linear.GroupedLinear` with the arguments of TransformerEngine, in its order."""

from grouped_linear.te.linear import GroupedLinear

__all__ = ["GroupedLinear"]
