"""Gradients: of ops, of the layers, of routing.

A layer's :class:`torch.autograd.Function` receives one :class:`context.LinearContext` a weight and
asks its recipe for operands; ``gemm`` multiplies them.
"""

from grouped_linear.autograd import registration

__all__ = ["registration"]
