# SPDX-License-Identifier: Apache-2.0
"""Three dispatchers, which send tokens to the processes that hold their experts.

D processes, T tokens of each, S slots for tokens that come to one, C experts chosen for a token, E
experts, L = E / D of them on a process, H features.
"""

import inspect
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from grouped_linear import ops
from grouped_linear.autograd.mlp import Arriving
from grouped_linear.meta_kernels.rules import MAX_GROUPS, ceil_div
from grouped_linear.nn.checks import check_flags
from grouped_linear.nn.dispatcher import Dispatched, Started, TokenDispatcher
from grouped_linear.ops.constants import is_integer, is_number
from grouped_linear.parallel.exchange import (
    CollectFunction,
    Exchange,
    Group,
    SpreadFunction,
    Transport,
    VariableExchange,
    exchange_counts,
    numbers_of,
    weights_and_experts,
)


def starts(end_D: Tensor) -> Tensor:
    """[D], where each process's rows begin."""
    return pad(end_D[:-1], (1, 0))


def _is(method: Any, function: Any) -> bool:
    """Whether an object's method is this function of a class."""
    # Dynamo (2.13) answers getattr with its default, and does not guard vars(object).
    return inspect.ismethod(method) and method.__func__ is function


def check_dispatch_options(where: str, capacity_factor: Any, fp8: Any, check_tokens: Any) -> None:
    """Raise ValueError for options that no dispatcher has."""
    given = capacity_factor is not None
    if given and not (is_number(capacity_factor) and 0 < capacity_factor < float("inf")):
        raise ValueError(
            f"{where}: capacity_factor must be None or positive and finite, got {capacity_factor!r}"
        )
    check_flags(where, fp8=fp8, check_tokens=check_tokens)


def check_mesh(where: str, mesh: DeviceMesh, num_experts: Any) -> None:
    """Raise ValueError unless experts divide evenly among a mesh of one dimension."""
    if mesh.ndim != 1:
        raise ValueError(f"{where}: mesh must have one dimension, got {mesh.ndim}")
    if not is_integer(num_experts) or num_experts < 1:
        raise ValueError(f"{where}: num_experts must be a positive integer, got {num_experts!r}")
    if num_experts % mesh.size():
        raise ValueError(
            f"{where}: num_experts must be a multiple of the number of processes, got "
            f"{num_experts} experts and {mesh.size()} processes"
        )


class _StaticDispatcher(TokenDispatcher):
    """The part that all ways share: shapes follow from the number of tokens."""

    dropped: Tensor

    def __init__(
        self,
        mesh: DeviceMesh,
        num_experts: int,
        *,
        capacity_factor: float | None = None,
        fp8: bool = False,
        check_tokens: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_mesh(name, mesh, num_experts)
        if mesh.size() > MAX_GROUPS:
            raise ValueError(f"{name}: at most {MAX_GROUPS} processes, got {mesh.size()}")
        if num_experts > MAX_GROUPS * mesh.size():
            raise ValueError(
                f"{name}: at most {MAX_GROUPS} experts a process, got {num_experts} experts and "
                f"{mesh.size()} processes"
            )
        check_dispatch_options(name, capacity_factor, fp8, check_tokens)
        self.require(mesh.device_type)
        self.group = Group(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())
        self.local_experts = num_experts // mesh.size()
        self.capacity_factor, self.fp8 = capacity_factor, fp8
        self.check_tokens = check_tokens
        self.register_buffer(
            "dropped", torch.zeros((), dtype=torch.int64, device=mesh.device_type), persistent=False
        )

    def reset(self) -> None:
        """Count from zero."""
        self.dropped.zero_()

    def _leave_meta(self, device: torch.device) -> None:
        if self.dropped.is_meta:
            self.dropped = torch.zeros_like(self.dropped, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_StaticDispatcher":
        """Follow the model to another device, with the count, which has no value on meta."""
        before = self.dropped
        super()._apply(fn, recurse)
        if before.is_meta:
            self.reset()
        else:
            self.dropped.copy_(before)  # to_empty's holds anything
        return self

    def require(self, device_type: str) -> None:
        """Raise RuntimeError for devices on which this way does not work."""

    def capacity(self, count: int, processes: int = 1) -> int:
        """``ceil(capacity_factor * count / processes)``, in integers: a count may be symbolic.

        Compiled code computes it in 64 bits, so the factor is rounded to a fraction whose
        denominator is at most 2 ** 20. The number of processes as a factor has room for all.
        """
        assert self.capacity_factor is not None
        factor = min(max(float(self.capacity_factor), 2**-20), self.group.size)
        ratio = Fraction(factor).limit_denominator(2**20)
        return ceil_div(count * ratio.numerator, ratio.denominator * processes)

    def exchange(self, expert_TC: Tensor) -> Exchange | VariableExchange:
        """Which tokens go where. Choices that are dropped are counted in ``dropped``."""
        raise NotImplementedError

    def dispatch(self, x: Tensor, top_k_weights: Tensor, top_k_index: Tensor) -> Dispatched:
        """Send each token once to each process that holds one of its experts."""
        expert_TC = self._experts(top_k_index)
        transport = self._transport(x, expert_TC)
        x_SH, weight_SC, expert_SC = SpreadFunction.apply(transport, x, top_k_weights, expert_TC)
        return Dispatched(x_SH, weight_SC, *self._own(expert_TC, expert_SC), transport)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Sum a token's outputs in the order of processes, in float32, rounded once."""
        return CollectFunction.apply(dispatched.handle, y)

    def _start(self, x: Tensor, top_k_weights: Tensor, top_k_index: Tensor) -> Started | None:
        """Send tokens as :meth:`dispatch` does, and wait for their choices alone."""
        # A subclass, or this object alone, may have other methods, which the layer then calls.
        ours = _StaticDispatcher
        if not (_is(self.dispatch, ours.dispatch) and _is(self.combine, ours.combine)):
            return None
        expert_TC = self._experts(top_k_index)
        transport = self._transport(x, expert_TC)
        sent = transport.start_dispatch(x, numbers_of(top_k_weights, expert_TC))
        received = transport.receive(sent)
        weight_SC, expert_SC = weights_and_experts(transport.numbers(received))
        return Arriving(transport, received, weight_SC), *self._own(expert_TC, expert_SC)

    def _experts(self, top_k_index: Tensor) -> Tensor:
        """The choices in int32. A wide number that is no expert must not become one."""
        if top_k_index.dtype == torch.int64:
            top_k_index = top_k_index.clamp(-1, self.local_experts * self.group.size)
        return top_k_index.to(torch.int32)

    def _transport(self, x: Tensor, expert_TC: Tensor) -> Transport:
        if self.check_tokens:
            name = type(self).__name__
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    f"{name}: check_tokens reads on the host how many tokens each process has: "
                    "leave it out under torch.compile"
                )
            own_D = torch.full((self.group.size,), x.size(0), device=x.device)
            counts = exchange_counts(own_D, self.group).tolist()
            if len(set(counts)) > 1:
                raise RuntimeError(
                    f"{name}: every process must have as many tokens, got {counts}: pad with "
                    "tokens whose experts are -1"
                )
        return Transport(self.group, self.fp8, self.exchange(expert_TC))

    def _own(self, expert_TC: Tensor, expert_SC: Tensor) -> tuple[Tensor, int | None]:
        """The experts that came as numbers of this process's, and how many rows there may be."""
        own_SC = expert_SC - self.group.rank * self.local_experts
        if self.capacity_factor is None:
            return own_SC, None
        max_rows = self.capacity(expert_TC.numel())
        came = ((own_SC >= 0) & (own_SC < self.local_experts)).sum()
        self.dropped.add_((came - max_rows).clamp(min=0))
        return own_SC, max_rows

    def extra_repr(self) -> str:
        """The options."""
        return (
            f"processes={self.group.size}, local_experts={self.local_experts}, "
            f"capacity_factor={self.capacity_factor}, fp8={self.fp8}"
        )


class AllGather(_StaticDispatcher):
    """Every process gets all tokens, and computes those that chose its experts.

    docs/several_gpus.md says where each dispatcher pays.

    Args:
        mesh: the processes that share the experts, one dimension.
        num_experts: E, of all processes together.
        capacity_factor: the rows for which a process's GEMMs have memory, as a multiple of T * C,
            the rows that come to a process where experts are equally popular. Rows past it, sorted
            by expert and token, are dropped, and ``dropped`` counts them. None has room for the
            choices of all processes, D * T * C, and drops nothing.
        fp8: send x, and in the backward the gradient of the outputs, in FP8 with a scale for each
            128 features of a token: half of the bytes. ``Float8BlockScaling`` computes the same
            outputs, and the same gradients of x, from these as from tokens in 16 bits.
        check_tokens: compare the processes' numbers of tokens in every call, and raise where they
            differ. The host waits for the device, so this is for debugging.

    Attributes:
        dropped: how many choices this process has dropped since it was last zeroed, int64 on the
            device. A forward that activation checkpointing runs again counts twice.

    Raises:
        ValueError: if experts do not divide evenly, or for another mesh or capacity factor.
    """

    def exchange(self, expert_TC: Tensor) -> Exchange:
        """Every token to every process."""
        T, D = expert_TC.size(0), self.group.size
        return Exchange(torch.arange(T * D, device=expert_TC.device).view(D, T).t())


class AllToAll(_StaticDispatcher):
    """Each process gets the tokens that chose its experts, each token once.

    Every process has a fixed number of slots for the tokens of each other: for all T of them, or
    with `capacity_factor` fewer.

    Args:
        mesh, num_experts, fp8, check_tokens: see :class:`AllGather`.
        capacity_factor: slots from one process to another: this many times the choices that go
            there where experts are equally popular, T * C / D, but at most T. The last tokens past
            it are dropped, with all that they chose there, and counted in ``dropped`` of the
            sender. Rows of GEMMs are bounded as :class:`AllGather` bounds them. None drops nothing.

    Its attribute ``dropped`` and its errors are those of :class:`AllGather`.
    """

    def exchange(self, expert_TC: Tensor) -> Exchange | VariableExchange:
        """Tokens sorted by process, in slots."""
        (T, C), D, device = expert_TC.shape, self.group.size, expert_TC.device
        if T == 0:  # not a row to point to
            return Exchange(expert_TC.new_empty(0, D))
        slots = self.slots(T, C)
        kept_TD, (_, token_R, row_TD, end_D) = self.select(expert_TC, slots)
        # An extra slot, which no token fills: choices of no expert point there.
        block, start_D = slots + 1, starts(end_D)
        process_D = torch.arange(D, dtype=torch.int32, device=device)
        slot_TD = torch.where(kept_TD, process_D * block + row_TD - start_D, slots)
        place_B = torch.arange(block, dtype=torch.int32, device=device)
        row_DB = start_D[:, None] + place_B
        empty_DB = (row_DB >= end_D[:, None]) | (place_B == slots)
        token_S = token_R[row_DB.flatten().clamp(max=T * D - 1)]
        return Exchange(slot_TD, token_S, empty_DB.flatten())

    def slots(self, T: int, C: int) -> int:
        """How many tokens may go to one process."""
        if self.capacity_factor is None:
            return T
        return min(self.capacity(T * C, self.group.size), T)

    def sort(self, needed_TD: Tensor) -> ops.SortedByExpert:
        """The tokens that are needed, sorted by process."""
        process_D = torch.arange(self.group.size, dtype=torch.int32, device=needed_TD.device)
        return ops.sort_by_expert(
            torch.where(needed_TD, process_D, -1), num_experts=self.group.size
        )

    def select(self, expert_TC: Tensor, slots: int) -> tuple[Tensor, ops.SortedByExpert]:
        """Which tokens go to each process [T, D]; all that chose experts of it, sorted by process.

        Counts in ``dropped`` the choices of those that do not go.
        """
        D = self.group.size
        process_D = torch.arange(D, dtype=torch.int32, device=expert_TC.device)
        owner_TC = expert_TC.div(self.local_experts, rounding_mode="floor")
        needed_TD = (owner_TC[:, :, None] == process_D).any(dim=1)
        by_process = self.sort(needed_TD)
        kept_TD = needed_TD & (by_process.row - starts(by_process.offs) < slots)
        if self.capacity_factor is not None:
            sent_TC = kept_TD.gather(1, owner_TC.clamp(0, D - 1).long())
            has_owner_TC = (owner_TC >= 0) & (owner_TC < D)
            self.dropped.add_((has_owner_TC & ~sent_TC).sum())
        return kept_TD, by_process


class AllToAllV(AllToAll):
    """Each process gets the tokens that chose its experts, each token once, and nothing else.

    Only those slots of :class:`AllToAll` that hold a token are sent. Their number stays on the
    device: on GPUs torch's symmetric memory sends them by NVSHMEM, which torch for CUDA brings. The
    first call allocates, so make it before a CUDA graph is captured. All layers of a mesh share
    that memory: call them on one stream. On CPUs the host reads the sizes.

    Args:
        mesh, num_experts, fp8, check_tokens: see :class:`AllGather`.
        capacity_factor: see :class:`AllToAll`, which drops the same tokens.

    Its attribute ``dropped`` and its errors are those of :class:`AllGather`; without NVSHMEM it
    raises RuntimeError on GPUs.
    """

    def require(self, device_type: str) -> None:
        """Raise RuntimeError on GPUs without NVSHMEM."""
        if device_type == "cuda" and not _symmetric_memory.is_nvshmem_available():
            raise RuntimeError("AllToAllV: needs NVSHMEM, which this torch lacks or cannot find")

    def exchange(self, expert_TC: Tensor) -> VariableExchange:
        """Tokens sorted by process."""
        (T, C), D = expert_TC.shape, self.group.size
        slots = self.slots(T, C)
        kept_TD, by_process = self.select(expert_TC, slots)
        if self.capacity_factor is not None:
            by_process = self.sort(kept_TD)
        _, token_R, row_TD, end_D = by_process
        most = T * min(C, D)
        sent_D = (end_D - starts(end_D)).long()
        came_D = exchange_counts(sent_D, self.group)
        slot_TD = torch.where(kept_TD, row_TD, most)
        empty_S = torch.arange(D * slots, device=expert_TC.device) >= came_D.sum()
        return VariableExchange(slot_TD, token_R[:most], sent_D, came_D, empty_S)
