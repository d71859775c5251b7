# SPDX-License-Identifier: Apache-2.0
"""The interface by which a GroupedMLP whose experts are on several processes exchanges tokens.

T tokens of this process, S tokens that come to this process, C experts chosen for a token, H
features of a token.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grouped_linear.autograd.mlp import Arriving


class Dispatched(NamedTuple):
    """The tokens that this process received, as arguments of its experts."""

    x: Tensor
    """[S, H]."""
    top_k_weights: Tensor
    """[S, C]."""
    top_k_index: Tensor
    """[S, C] int32 or int64, numbers of this process's experts; any other means no expert."""
    max_rows: int | None = None
    """How many choices memory is allocated for; see :func:`grouped_linear.grouped_mlp`."""
    handle: Any = None
    """The facts that :meth:`TokenDispatcher.combine` needs."""


#: Tokens that are on their way; the choices of all that this process will receive, [S, C], and how
#: many rows they may be, both as in :class:`Dispatched`.
Started = tuple[Arriving, Tensor, int | None]


class TokenDispatcher(nn.Module):
    """Sends tokens to the processes that hold their experts, and sums what comes back.

    A subclass defines both methods, of torch operations or of an ``autograd.Function``, so that
    they have gradients. It is a module, so that its buffers move with the model.
    :class:`grouped_linear.parallel.AllGather` and :class:`grouped_linear.parallel.AllToAll` are
    two.

    Attributes:
        ranks: the processes that share the experts, as
            :class:`grouped_linear.parallel.ExpertParallel` sets them.
    """

    ranks: tuple[int, ...] = ()

    def reset(self) -> None:
        """Forget what was counted; a layer's ``reset_parameters`` calls it."""

    def _leave_meta(self, device: torch.device) -> None:
        """Count on a device from zero. Other buffers have values that nobody here knows."""

    def dispatch(self, x: Tensor, top_k_weights: Tensor, top_k_index: Tensor) -> Dispatched:
        """Send the tokens of this process, and receive those for its experts.

        Args:
            x: [T, H].
            top_k_weights: [T, C], of a floating dtype of 16 bits or more.
            top_k_index: [T, C] int32 or int64, numbers among the experts of all processes; another
                number is no expert.
        """
        raise NotImplementedError(f"{type(self).__name__} has no dispatch")

    def _start(self, x: Tensor, top_k_weights: Tensor, top_k_index: Tensor) -> Started | None:
        """Start to send tokens, for a layer that computes while they and their gradients travel.

        A layer whose dispatcher returns None calls :meth:`dispatch` and :meth:`combine`.
        """
        return None

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Send the outputs y [S, H] of this process's experts back, and sum them for each token.

        Args:
            y: for each received token the weighted sum of this process's experts.
            dispatched: what :meth:`dispatch` returned.

        Returns:
            [T, H], the sums over all processes.
        """
        raise NotImplementedError(f"{type(self).__name__} has no combine")
