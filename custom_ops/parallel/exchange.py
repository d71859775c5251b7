# SPDX-License-Identifier: Apache-2.0
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
from grouped_linear.autograd.saved import save, saved
from grouped_linear.meta_kernels.rules import BLOCK, E4M3, SCALE_ROW_MULTIPLE, ceil_div
from grouped_linear.parallel.symmetric_memory import all_to_all_v

_c10d: Any = torch.ops._c10d_functional


class Group(NamedTuple):
    """The processes that exchange rows: a process group by its name, which graphs can hold."""

    name: str
    size: int  # D
    rank: int  # of this process in the group


class Exchange(NamedTuple):
    """Which rows go where, with as many slots for each process."""

    slot: Tensor  # [T, D], where a token's row comes back from each process; else an empty slot
    token: Tensor | None = None  # [S], the token in each slot; None: every process gets them all
    empty: Tensor | None = None  # [S] bool, whether a slot has no token; its `token` is any

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

    slot: Tensor  # [T, D], as in Exchange; N for an empty slot, whose row is zero
    token: Tensor  # [N], the token in each slot that may be sent, sorted by process
    sent: Tensor  # [D] int64, how many of them go to each process
    came: Tensor  # [D] int64, how many came from each
    empty: Tensor  # [S] bool, whether nothing came in a slot

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


def _one_group(rows: Tensor) -> Tensor:
    return torch.full((1,), rows.size(0), dtype=torch.int32, device=rows.device)


#: Rows on their way, [S, H] or their bytes in e4m3, and the numbers beside them, if there are any:
#: [S, n + I] int32, scales in FP8 and then numbers.
InFlight = tuple[Tensor, Tensor | None]


class Transport(NamedTuple):
    """How the tokens of one call travel: to the processes that hold their experts, and back.

    Each way is started, and finished where its rows are read: the current stream waits only there.
    """

    group: Group
    fp8: bool  # whether rows go in FP8; they come back in 16 bits
    exchange: Any  # Exchange, VariableExchange; None in a Function's context, which saves it

    def start_dispatch(self, x_TH: Tensor, numbers_TI: Tensor | None = None) -> InFlight:
        """Send each process the rows of x that it needs, and int32 numbers beside them.

        The numbers go first: they are few, and say where the rows belong.
        """
        exchange, sent, parts = self.exchange, x_TH, []
        if self.fp8:
            # Scales are powers of two, so that 16 bits hold each product. The option is explicit:
            # Dynamo makes an input of a float default, and loses it in a backward (2.13).
            q, scale, *_ = ops.group_quantize(x_TH, _one_group(x_TH), amax_epsilon=0.0)
            assert q is not None
            assert scale is not None
            sent = q.view(torch.uint8)
            parts.append(scale[:, : x_TH.size(0)].t().contiguous().view(torch.int32))
        if numbers_TI is not None:
            parts.append(numbers_TI)
        beside = None
        if parts:
            beside = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            beside = exchange.send(beside, self.group, empty=-1)
        return exchange.send(sent, self.group), beside

    def receive(self, sent: InFlight) -> tuple[Tensor, Any]:
        """Wait for the numbers beside the rows."""
        rows, beside = sent
        return rows, None if beside is None else self.exchange.wait(beside)

    def numbers(self, received: tuple[Tensor, Any]) -> Tensor:
        """The numbers that came beside the rows: -1 in an empty slot."""
        rows, beside = received
        numbers: Tensor = beside[:, self._num_scales(rows) :]
        return numbers

    def finish_dispatch(self, received: tuple[Tensor, Any], dtype: torch.dtype) -> Tensor:
        """Wait for the rows: [S, H] in x's dtype."""
        rows, beside = received
        came: Tensor = self.exchange.wait(rows)
        if not self.fp8:
            return came
        scale_Sn = beside[:, : self._num_scales(rows)].contiguous().view(torch.float32)
        scale = pad(scale_Sn.t(), (0, -came.size(0) % SCALE_ROW_MULTIPLE)).contiguous()
        return ops.group_dequantize(came.view(E4M3), scale, _one_group(came), dtype)

    def _num_scales(self, rows: Tensor) -> int:
        return ceil_div(rows.size(1), BLOCK) if self.fp8 else 0

    def start_combine(self, y_SH: Tensor) -> Tensor:
        """Send rows back to the processes from which their tokens came."""
        return self.exchange.send_back(y_SH, self.group)

    def finish_combine(self, sent: Tensor) -> Tensor:
        """Sum each token's rows, which the processes of its experts sent."""
        return ops.gather_sum(self.exchange.wait(sent), self.exchange.slot)

    def finish_weights(self, sent: Tensor) -> Tensor:
        """The same in float32, of the routing weights' gradient [S, C]."""
        came: Tensor = self.exchange.wait(sent)
        # One process has the gradient of a choice, the others have zero.
        return came[self.exchange.slot].sum(1)


def numbers_of(weight_TC: Tensor, expert_TC: Tensor) -> Tensor:
    """[T, 2 C] int32: what tells a process about its tokens, bits of weights and experts."""
    return torch.cat([weight_TC.float().view(torch.int32), expert_TC], dim=1)


def weights_and_experts(numbers_SI: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [S, C] in float32 and experts [S, C] in int32, from such numbers."""
    weight_SC, expert_SC = numbers_SI.chunk(2, dim=1)
    return weight_SC.contiguous().view(torch.float32), expert_SC.contiguous()


class SpreadFunction(torch.autograd.Function):
    """Send tokens, their routing weights and experts to the processes that hold the experts."""

    @staticmethod
    def forward(
        ctx: Any, transport: Transport, x_TH: Tensor, weight_TC: Tensor, expert_TC: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return x [S, H], weights [S, C] in float32 and experts [S, C] in int32."""
        ctx.transport, ctx.weight_dtype = transport._replace(exchange=None), weight_TC.dtype
        save(ctx, (transport.exchange,))
        sent = transport.start_dispatch(x_TH, numbers_of(weight_TC, expert_TC))
        received = transport.receive(sent)
        numbers_SI = transport.numbers(received)
        came = transport.finish_dispatch(received, x_TH.dtype), *weights_and_experts(numbers_SI)
        needs = ctx.needs_input_grad[1:]  # or experts would compute what nobody asked for
        ctx.mark_non_differentiable(*(t for t, need in zip(came, needs, strict=True) if not need))
        return came

    @staticmethod
    @strictly_once_differentiable
    def backward(ctx: Any, dx_SH: Tensor, d_weight_SC: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """Sum what each process adds to the gradients of a token."""
        (exchange,) = saved(ctx, "grouped_mlp")
        transport = ctx.transport._replace(exchange=exchange)
        _, need_x, need_weight, _ = ctx.needs_input_grad
        dx_TH = d_weight_TC = None
        if need_weight:
            d_weight_SC = transport.start_combine(d_weight_SC)
        if need_x:
            dx_TH = transport.finish_combine(transport.start_combine(dx_SH))
        if need_weight:
            d_weight_TC = transport.finish_weights(d_weight_SC).to(ctx.weight_dtype)
        return None, dx_TH, d_weight_TC, None


class CollectFunction(torch.autograd.Function):
    """Send the experts' outputs back to the processes that sent the tokens, and sum them."""

    @staticmethod
    def forward(ctx: Any, transport: Transport, y_SH: Tensor) -> Tensor:
        """Return [T, H], of outputs that are zero where no token came."""
        ctx.transport = transport._replace(exchange=None)
        save(ctx, (transport.exchange,))
        return transport.finish_combine(transport.start_combine(y_SH))

    @staticmethod
    @strictly_once_differentiable
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor | None, ...]:
        """Send each process the gradient of the tokens that it had."""
        (exchange,) = saved(ctx, "grouped_mlp")
        transport = ctx.transport._replace(exchange=exchange)
        received = transport.receive(transport.start_dispatch(dy_TH))
        return None, transport.finish_dispatch(received, dy_TH.dtype)
