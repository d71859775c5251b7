# SPDX-License-Identifier: Apache-2.0
"""A router's logits as a function.

T tokens, H features of a token, E experts.
"""

from torch import Tensor
from torch.nn.functional import linear

from grouped_linear.autograd.routing import RouterLogitsFunction
from grouped_linear.meta_kernels.rules import dtype_name
from grouped_linear.nn.arguments import as_rows, autocast
from grouped_linear.nn.checks import check_device, check_tensor


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute ``linear(x, weight, bias)``, and return x for the experts, too. Differentiable.

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
        requires grad the returned x is a view, and autograd lets no operation change it in place.

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
    H = x_TH.size(1)
    if weight.dim() != 2 or weight.size(1) != H:
        raise RuntimeError(f"{op}: weight must be [E, H], and x has H = {H}, got {[*weight.shape]}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RuntimeError(f"{op}: bias must be {[weight.size(0)]}, got {[*bias.shape]}")
    for name, t in (("weight", weight), ("bias", bias)):
        check_device(op, name, t, x_TH)
        if t is not None and t.dtype != x_TH.dtype:
            raise RuntimeError(
                f"{op}: x is {dtype_name(x_TH.dtype)}, {name} {dtype_name(t.dtype)}: "
                "cast one of them, or use torch.autocast"
            )
    if x.requires_grad:
        logits_TE, x_TH = RouterLogitsFunction.apply(x_TH, weight, bias)
    else:  # the function would make x require grad, and the experts compute it
        logits_TE = linear(x_TH, weight, bias)
    if x.dim() == 2:
        return logits_TE, x_TH
    return logits_TE.reshape(*x.shape[:-1], weight.size(0)), x_TH.reshape(x.shape)
