# SPDX-License-Identifier: Apache-2.0
"""A router's logits as a function.

T tokens, H features of a token, E experts.
"""

from torch import Tensor
from torch.nn.functional import linear

from grouped_linear.autograd.router import RouterLogitsFunction
from grouped_linear.nn.arguments import as_rows, autocast
from grouped_linear.nn.checks import check_router, check_tensor


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``linear(x, weight, bias)`` and x, which goes on to the experts. Differentiable.

    A token has two gradients, through the router and through the experts. Where experts take the x
    that is returned here, the backward computes the first and adds the second in one GEMM, rounded
    once (:func:`grouped_linear.ops.addmm`), and autograd adds nothing. Under torch.autocast both
    results have its dtype.

    Args:
        x: [..., H] of any floating dtype.
        weight: [E, H] of x's dtype.
        bias: [E] of x's dtype, or None.

    Returns:
        logits [..., E], as :func:`grouped_linear.ops.topk_experts` takes them, and x. Where x
        requires grad it is a view, which autograd lets no operation change in place.

    Raises:
        RuntimeError: for a wrong shape, dtype or device.
        TypeError: for an argument that is no tensor, or a DTensor.

    >>> import torch
    >>> from grouped_linear import GroupedMLP, ops
    >>> router, mlp = torch.nn.Linear(64, 8, bias=False), GroupedMLP(8, 64, 128)
    >>> logits, x = router_logits(torch.randn(10, 64), router.weight)
    >>> scoring = dict(score_function="softmax", normalize=True)
    >>> mlp(x, *ops.topk_experts(logits, 2, **scoring)).shape
    torch.Size([10, 64])
    """
    op = "router_logits"
    check_tensor(op, "weight", weight)
    if bias is not None:
        check_tensor(op, "bias", bias)
    x_TH, dtype = as_rows(op, x)
    if dtype is not None:
        weight = autocast(weight, dtype)
        bias = None if bias is None else autocast(bias, dtype)
    check_router(op, x_TH, weight, bias)
    if x.requires_grad:
        logits_TE, x_TH = RouterLogitsFunction.apply(x_TH, weight, bias)
    else:  # the function would make x require grad, and the experts compute it
        logits_TE = linear(x_TH, weight, bias)
    if x.dim() == 2:
        return logits_TE, x_TH
    return logits_TE.reshape(*x.shape[:-1], weight.size(0)), x_TH.reshape(x.shape)
