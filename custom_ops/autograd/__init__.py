# SPDX-License-Identifier: Apache-2.0
"""Gradients: of ops, of the layers, of routing.

A layer's :class:`torch.autograd.Function` receives one :class:`projection.Projection` a weight,
which makes operands in its recipe's formats, and the GEMMs that read them.
"""

from grouped_linear.autograd import registration as registration
