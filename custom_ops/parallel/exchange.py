"""Send rows to the processes that need them, and sum what these return: each other's gradient.

D processes of a group, T tokens of each, S slots for tokens that come to one, C experts chosen for
a token, H features, n 128-blocks of them.

Every shape is static, and the host learns no size. Collectives move bytes only. A process adds a
token's D rows itself, in the order of processes, in float32, and rounds once. So equal inputs give
equal bits on any network, which a reduce-scatter in 16 bits does not promise.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import _functional_collectives  # noqa: F401  registers the collectives
from torch.nn.functional import pad

from grouped_linear import ops
from grouped_linear.autograd.once_differentiable import strictly_once_differentiable
from grouped_linear.meta_kernels.rules import E4M3, SCALE_ROW_MULTIPLE
from grouped_linear.parallel.symmetric_memory import all_to_all_v

_c10d: Any = torch.ops._c10d_functional


class Group(NamedTuple):
    """The processes that exchange rows: a process group by its name, which graphs can hold."""

    name: str
    size: int
    """D."""
    rank: int
    """Of this process in the group."""


class Exchange(NamedTuple):
    """Which rows go where, with as many slots for each process."""

    slot: Tensor
    """[T, D], for each token the slot of its row among those that come back from each process.

    Where a process does not get the token, an empty slot, whose row is zero.
    """
    token: Tensor | None = None
    """[S], the token in each slot that is sent; None where every token goes to every process."""
    empty: Tensor | None = None
    """[S] bool, whether a slot that is sent has no token; its `token` is any."""

    def send(self, rows: Tensor, group: Group, empty: int | None = None) -> Tensor:
        """Start to send rows [T, I]; wait before the result [S, I] is read.

        An empty slot gets the number `empty`, or any number without it.
        """
        if self.token is not None:
            rows = rows[self.token]
            if empty is not None and self.empty is not None:
                rows = rows.masked_fill(self.empty[:, None], empty)
            return self.send_back(rows, group)
        return _c10d.all_gather_into_tensor(rows.contiguous(), group.size, group.name)

    def send_back(self, rows: Tensor, group: Group) -> Tensor:
        """Start to send each process its S / D rows of [S, ...]."""
        sizes = [rows.size(0) // group.size] * group.size
        return _c10d.all_to_all_single(rows.contiguous(), sizes, sizes, group.name)

    def wait(self, started: Tensor) -> Tensor:
        """Let the current stream wait for a collective."""
        return _c10d.wait_tensor(started)


class VariableExchange(NamedTuple):
    """Which rows go where, without empty slots between others."""

    slot: Tensor
    """[T, D], as in :class:`Exchange`; N, where a row is zero, for an empty one."""
    token: Tensor
    """[N], the token in each slot that may be sent, sorted by process."""
    sent: Tensor
    """[D] int64, how many of them go to each process."""
    came: Tensor
    """[D] int64, how many came from each."""
    empty: Tensor
    """[S] bool, whether nothing came in a slot."""

    def send(self, rows: Tensor, group: Group, empty: int | None = None) -> Tensor:
        """Send rows [T, I], and return [S, I]. An empty slot has the number `empty`, or zero."""
        came: Tensor = all_to_all_v(rows[self.token], self.sent, self.empty.size(0), group.name)
        return came if empty is None else came.masked_fill(self.empty[:, None], empty)

    def send_back(self, rows: Tensor, group: Group) -> Tensor:
        """Send each process the rows of [S, ...] that came from it; one more row is zero."""
        return all_to_all_v(rows, self.came, self.token.size(0) + 1, group.name)

    def wait(self, there: Tensor) -> Tensor:
        """Do nothing: the exchange runs on the current stream."""
        return there


def exchange_counts(sent_D: Tensor, group: Group) -> Tensor:
    """Send each process a number, and return the numbers of all."""
    ones = [1] * group.size
    return _c10d.wait_tensor(_c10d.all_to_all_single(sent_D, ones, ones, group.name))


def _exchange_of(tensors: tuple[Any, ...]) -> Exchange | VariableExchange:
    """An Exchange or a VariableExchange, from its fields."""
    return Exchange(*tensors) if len(tensors) == 3 else VariableExchange(*tensors)


def _quantize(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of e4m3 [T, H] and scales [T, n]: powers of two, so that 16 bits hold each product."""
    # Explicit: Dynamo makes an input of a float default, and loses it in a backward (2.13).
    q, scale, *_ = ops.group_quantize(x_TH, _one_group(x_TH), amax_epsilon=0.0)
    assert q is not None
    assert scale is not None
    return q.view(torch.uint8), scale[:, : x_TH.size(0)].t().contiguous()


def _dequantize(q_SH: Tensor, scale_Sn: Tensor, dtype: torch.dtype) -> Tensor:
    scale = pad(scale_Sn.t(), (0, -q_SH.size(0) % SCALE_ROW_MULTIPLE)).contiguous()
    return ops.group_dequantize(q_SH.view(E4M3), scale, _one_group(q_SH), dtype)


def _one_group(rows: Tensor) -> Tensor:
    """The ends of one group of all rows."""
    return torch.full((1,), rows.size(0), dtype=torch.int32, device=rows.device)


def _spread_rows(
    x_TH: Tensor,
    numbers_TI: Tensor | None,
    exchange: Exchange | VariableExchange,
    group: Group,
    fp8: bool,
) -> tuple[Tensor, Tensor | None]:
    """Send rows, in FP8 or as they are, with int32 numbers beside them: -1 in an empty slot."""
    sent, scales, n = x_TH, None, 0
    if fp8:
        sent, scale_Tn = _quantize(x_TH)
        scales, n = scale_Tn.view(torch.int32), scale_Tn.size(1)
    parts = [t for t in (scales, numbers_TI) if t is not None]
    came = exchange.send(sent, group)
    if not parts:
        return exchange.wait(came), None
    beside = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    beside = exchange.wait(exchange.send(beside, group, empty=-1))
    came = exchange.wait(came)
    if fp8:
        scale_Sn = beside[:, :n].contiguous().view(torch.float32)
        came = _dequantize(came, scale_Sn, x_TH.dtype)
    return came, beside[:, n:]


def _collect(y_SH: Tensor, exchange: Exchange | VariableExchange, group: Group) -> Tensor:
    """Send rows back and sum each token's."""
    return ops.gather_sum(exchange.wait(exchange.send_back(y_SH, group)), exchange.slot)


class SpreadFunction(torch.autograd.Function):
    """Send tokens, their routing weights and experts to the processes that hold the experts."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        fp8: bool,
        x_TH: Tensor,
        weight_TC: Tensor,
        expert_TC: Tensor,
        *tensors: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return x [S, H], weights [S, C] in float32 and experts [S, C] in int32.

        With ``fp8`` x goes in FP8. ``tensors`` are the fields of an Exchange or a VariableExchange.
        """
        exchange = _exchange_of(tensors)
        ctx.group, ctx.weight_dtype = group, weight_TC.dtype
        ctx.save_for_backward(*exchange)
        C = weight_TC.size(1)
        numbers_TI = torch.cat([weight_TC.float().view(torch.int32), expert_TC], dim=1)
        x_SH, numbers_SI = _spread_rows(x_TH, numbers_TI, exchange, group, fp8)
        assert numbers_SI is not None
        weight_SC, expert_SC = numbers_SI.split(C, dim=1)
        return x_SH, weight_SC.contiguous().view(torch.float32), expert_SC.contiguous()

    @staticmethod
    @strictly_once_differentiable
    def backward(ctx: Any, dx_SH: Tensor, d_weight_SC: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """Sum what each process adds to the gradients of a token."""
        exchange, group = _exchange_of(ctx.saved_tensors), ctx.group
        need_x, need_weight = ctx.needs_input_grad[2:4]
        d_weight_TC = None
        if need_weight:  # one process has the gradient of a choice, the others have zero
            d_weight_SC = exchange.send_back(d_weight_SC, group)
        dx_TH = _collect(dx_SH, exchange, group) if need_x else None
        if need_weight:
            d_weight_TC = exchange.wait(d_weight_SC)[exchange.slot].sum(1).to(ctx.weight_dtype)
        return None, None, dx_TH, d_weight_TC, *(None,) * (1 + len(exchange))


class CollectFunction(torch.autograd.Function):
    """Send the experts' outputs back to the processes that sent the tokens, and sum them."""

    @staticmethod
    def forward(ctx: Any, group: Group, fp8: bool, y_SH: Tensor, *tensors: Any) -> Tensor:
        """Return [T, H], of outputs that are zero where no token came.

        With ``fp8`` the gradient goes in FP8, as x did. ``tensors`` are an exchange's fields.
        """
        ctx.group, ctx.fp8 = group, fp8
        ctx.save_for_backward(*tensors)
        return _collect(y_SH, _exchange_of(tensors), group)

    @staticmethod
    @strictly_once_differentiable
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor | None, ...]:
        """Send each process the gradient of the tokens that it had."""
        exchange = _exchange_of(ctx.saved_tensors)
        dy_SH, _ = _spread_rows(dy_TH, None, exchange, ctx.group, ctx.fp8)
        return None, None, dy_SH, *(None,) * len(exchange)
