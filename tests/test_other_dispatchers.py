# SPDX-License-Identifier: Apache-2.0
"""Two processes whose tokens somebody else's dispatcher sends: stand-ins for two interfaces.

DeepEP V2 (README and deep_ep/buffers/elastic.py of dd758ca, 2026-07-14) and torchtitan
(models/common/token_dispatcher.py of b5bcd76, 2026-08-21). E experts, L of them on a process, T
tokens a process, C experts chosen for a token, R rows that came, H and F features.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from grouped_linear import Float8BlockScaling, GroupedMLP, Recipe
from grouped_linear.parallel import ExpertParallel
from support.compare import assert_all_same_bits
from support.documents import example
from support.processes import PROCESSES, Checks, device, on_cpu, on_gpus
from support.tensors import BF16

E, T, C, H, F = 8, 24, 3, 128, 48
L = E // PROCESSES


def data(rank: int) -> tuple[Tensor, ...]:
    """x, weights, experts and dy of a process; some tokens choose fewer experts."""
    torch.manual_seed(1 + rank)
    x, dy = torch.randn(2, T, H)
    weights, experts = torch.randn(T, E).softmax(-1).topk(C)
    experts[::5, 1:] = -1
    return tuple(t.to(device()) for t in (x.to(BF16), weights, experts, dy.to(BF16)))


def make(recipe: Recipe | None, experts: type[GroupedMLP] = GroupedMLP, count: int = E) -> Any:
    torch.manual_seed(0)
    return experts(count, H, F, recipe=recipe, dtype=BF16, device=device())


class Handle(NamedTuple):
    """Of an exchange: what a combine and the next dispatch need."""

    goes: Tensor
    """[D, T] bool, which tokens go to each process."""
    from_each: list[int]
    num_sms: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_expert: Tensor
    order: Tensor | None
    """Of the expanding layout: for each row the token that came."""


class StandIn:
    """DeepEP's ElasticBuffer, as far as a dispatcher asks of it, on torch's collectives."""

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_experts: int | None = None,
        num_sms: int = 0,
        handle: Handle | None = None,
        do_expand: bool = False,
        do_cpu_sync: bool | None = None,
    ) -> tuple[Any, ...]:
        """One row for each token of a process that chose experts here; their numbers here, or -1.

        With do_expand one row for each choice, sorted by expert, and rows that nobody writes.
        """
        assert x.dtype == BF16
        assert x.is_contiguous()
        if handle is not None:
            assert topk_idx is topk_weights is None
            assert num_sms == handle.num_sms
            return self._send(x, handle.goes, handle.from_each), None, None, handle, None
        assert topk_idx is not None
        assert topk_weights is not None
        assert num_experts is not None
        assert (topk_idx.dtype, topk_weights.dtype) == (torch.int64, torch.float32)
        first = torch.arange(0, num_experts, L, device=x.device)[:, None, None]
        goes = ((topk_idx >= first) & (topk_idx < first + L)).any(2)
        came = torch.empty(PROCESSES, dtype=torch.int64, device=x.device)
        dist.all_to_all_single(came, goes.sum(1))
        from_each = came.tolist()
        x, experts, weights = (self._send(t, goes, from_each) for t in (x, topk_idx, topk_weights))
        experts = experts - dist.get_rank() * L
        experts = experts.masked_fill((experts < 0) | (experts >= L), -1)
        counts = (experts[..., None] == torch.arange(L, device=x.device)).sum((0, 1))
        order = None
        if do_expand:
            assert do_cpu_sync is False
            chosen = experts.flatten()
            order = torch.where(chosen < 0, L, chosen).argsort(stable=True)[: counts.sum()]
            rest = PROCESSES * T * C - len(order)
            x, weights = (
                torch.cat([t, t.new_full((rest, *t.shape[1:]), torch.nan)])
                for t in (x[order // C], weights.flatten()[order])
            )
        handle = Handle(goes, from_each, 24, counts.tolist(), counts.cumsum(0), order)
        return x, experts, weights, handle, None

    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None
    ) -> tuple[Any, ...]:
        """Send rows back, and sum each token's in float32; the same of weights."""
        assert x.dtype == BF16
        if handle.order is not None:
            rows = len(handle.order)
            x = torch.zeros(sum(handle.from_each), H, device=x.device).index_add_(
                0, handle.order // C, x[:rows].float()
            )
        return self._back(x, handle).to(BF16), self._back(topk_weights, handle), None

    def _send(self, rows: Tensor, goes: Tensor, from_each: list[int]) -> Tensor:
        out = rows.new_empty(sum(from_each), rows.size(1))
        sent = torch.cat([rows[g] for g in goes])
        dist.all_to_all_single(out, sent, from_each, goes.sum(1).tolist())
        return out

    def _back(self, rows: Any, handle: Handle) -> Any:
        if rows is None:
            return None
        sent = handle.goes.sum(1).tolist()
        came = rows.new_empty(sum(sent), rows.size(1))
        dist.all_to_all_single(came, rows.contiguous(), sent, handle.from_each)
        total = came.new_zeros(handle.goes.size(1), rows.size(1), dtype=torch.float32)
        for part, goes in zip(came.split(sent), handle.goes, strict=True):
            total[goes] += part
        return total


def step(layer: Any, rank: int) -> list[Tensor]:
    x, weights, experts, dy = data(rank)
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    y = layer(x, weights, experts)
    gradients = torch.autograd.grad(y, [*leaves, *layer.parameters()], dy)
    return [y.detach(), *(g.to_local() if isinstance(g, DTensor) else g for g in gradients)]


def check_deep_ep(recipe: Recipe | None, rank: int, directory: Path) -> None:
    """The example's dispatcher has the bits of this package's."""
    mesh = init_device_mesh(device().type, (PROCESSES,))
    by_deep_ep = ExpertParallel(
        lambda mesh, experts: example("deepep_dispatcher").DeepEP(StandIn(), experts)
    )
    layers = [
        parallelize_module(make(recipe), mesh, style)
        for style in (by_deep_ep, ExpertParallel("all_to_all"))
    ]
    assert_all_same_bits(*(step(layer, rank) for layer in layers))


def check_deep_ep_expanded(rank: int, directory: Path) -> None:
    """Without a gradient rows come sorted, in static shapes, and nobody waits for their number."""
    recipe = Float8BlockScaling()
    x, weights, experts, _ = data(rank)
    mesh = init_device_mesh(device().type, (PROCESSES,))
    want = parallelize_module(make(recipe), mesh, ExpertParallel("all_to_all"))
    local = make(recipe, count=L)
    buffer = StandIn()
    with torch.no_grad():
        for p, q in zip(local.parameters(), want.parameters(), strict=True):
            p.copy_(q.to_local())
        rows, _, row_weights, handle, _ = buffer.dispatch(
            x, experts, weights, E, do_expand=True, do_cpu_sync=False
        )
        ends = handle.psum_num_recv_tokens_per_expert
        m_splits = ends.diff(prepend=ends.new_zeros(1))
        y = local.forward_sorted(rows, m_splits, row_weights)
        assert not y[ends[-1] :].any()
        y, *_ = buffer.combine(y, handle)
        expected = want(x, weights, experts)
    # A process's part of a token is one sum, rounded once, or C roundings and a sum.
    assert (y - expected).abs().max() <= 2**-7 * expected.abs().max()


class Titan:
    """torchtitan's token dispatcher over processes: rows sorted by expert, scores in combine."""

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, counts_E: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        order = topk_expert_ids_TK.flatten().argsort(stable=True)
        sent = counts_E.view(PROCESSES, L).contiguous()
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        splits = sent.sum(1).tolist(), came.sum(1).tolist()
        rows = x_TD[order // C]
        rows = all_to_all_single(rows.new_empty(sum(splits[1]), H), rows, splits[1], splits[0])
        expert = torch.arange(L, device=rows.device).repeat(PROCESSES)
        permutation = expert.repeat_interleave(came.flatten()).argsort(stable=True)
        return rows[permutation], came.sum(0), (order, topk_scores_TK, permutation, splits)

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        order, scores, permutation, splits = metadata
        rows = torch.empty_like(routed_output_RD).index_copy(0, permutation, routed_output_RD)
        rows = all_to_all_single(rows.new_empty(len(order), H), rows, splits[0], splits[1])
        weighted = (rows.float() * scores.flatten()[order][:, None]).to(rows.dtype)
        return torch.zeros_like(x_TD).index_add(0, order // C, weighted)


class SortedExperts(GroupedMLP):
    """In the place of torchtitan's GroupedExperts."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:  # type: ignore[override]
        return self.forward_sorted(x_RD, num_tokens_per_expert_E)


def check_torchtitan(recipe: Recipe | None, rank: int, directory: Path) -> None:
    """Its rows through forward_sorted, beside one process with all experts."""
    whole, local = make(recipe), make(recipe, SortedExperts, L)
    everything = [torch.cat(parts) for parts in zip(*map(data, range(PROCESSES)), strict=True)]
    experts, dispatcher = everything[2].clamp(min=0), Titan()
    with torch.no_grad():
        for p, q in zip(local.parameters(), whole.parameters(), strict=True):
            p.copy_(q[rank * L : (rank + 1) * L])

    def spread(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        counts = (experts.flatten()[:, None] == torch.arange(E, device=x.device)).sum(0)
        rows, splits, metadata = dispatcher.dispatch(x, weights, experts, counts)
        return dispatcher.combine(local(rows, splits), metadata, x)

    results = []
    for layer, model, part in (
        (spread, local, slice(rank * T, (rank + 1) * T)),
        (whole, whole, slice(None)),
    ):
        x, weights, chosen, dy = (t[part] for t in (*everything[:2], experts, everything[3]))
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        y: Any = layer(x, weights, chosen)
        results.append([y, *torch.autograd.grad(y, [x, weights, *model.parameters()], dy)])
    got, want = results
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        w = w[rank * T : (rank + 1) * T] if i < 3 else w[rank * L : (rank + 1) * L]
        # It rounds each expert's output and each product, not only their sum, and dy * weight.
        tolerance = 2**-6 if recipe is None else 2**-4
        assert (g - w).float().norm() <= tolerance * w.float().norm(), i


RECIPES: dict[str, Recipe | None] = {"bf16": None, "block": Float8BlockScaling()}
CHECKS: Checks = {
    **{f"deep_ep_{name}": partial(check_deep_ep, recipe) for name, recipe in RECIPES.items()},
    "deep_ep_expanded": check_deep_ep_expanded,
    **{f"torchtitan_{name}": partial(check_torchtitan, recipe) for name, recipe in RECIPES.items()},
}

test_two_processes, test_two_gpus = on_cpu(CHECKS), on_gpus(CHECKS)
