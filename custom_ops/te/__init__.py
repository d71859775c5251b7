"""The layer with the arguments that programs for TransformerEngine and Megatron pass.

:class:`grouped_linear.te.GroupedLinear` is :class:`grouped_linear.GroupedLinear` with
TransformerEngine's arguments, in its order.
"""

from grouped_linear.te.linear import GroupedLinear, RngStateTracker

__all__ = ["GroupedLinear", "RngStateTracker"]
