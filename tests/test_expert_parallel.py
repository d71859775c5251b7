# SPDX-License-Identifier: Apache-2.0
"""Two processes: experts spread over them compute what one process does, to the bit.

E experts, L of them on a process, T tokens a process, C experts chosen for a token, H and F
features.
"""

import copy
import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from expecttest import assert_expected_inline
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks import parallel as benchmark
from benchmarks import parallel_30b, parallel_losses
from benchmarks import parallel_training as training
from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedMLP,
    Lora,
    MXFP8BlockScaling,
    Recipe,
    ops,
)
from grouped_linear.contrib import compare as compare_with_plain
from grouped_linear.contrib import watch
from grouped_linear.parallel import (
    AllGather,
    AllToAll,
    AllToAllV,
    Dispatched,
    ExpertParallel,
    TokenDispatcher,
    symmetric_memory,
)
from grouped_linear.parallel.expert_parallel import DISPATCHERS
from support.compare import assert_all_same_bits, assert_same_bits, bits
from support.documents import example
from support.graphs import captured
from support.layers import with_numbers_in_adapters
from support.processes import PROCESSES, Checks, device, on_cpu, on_gpus, one_process
from support.tensors import BF16

E, T, C, H, F = 4, 40, 2, 160, 96
L = E // PROCESSES
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "block": Float8BlockScaling(),
    "current": Float8CurrentScaling(),
    "mxfp8": MXFP8BlockScaling(),
}
BLOCK: dict[str, Any] = {"recipe": Float8BlockScaling()}
QAT: dict[str, Any] = {"recipe": Float8BlockScaling(qat="mxfp4")}
GATE_UP_AGAIN = {**BLOCK, "recompute_gate_up": True}
Step = dict[str, Tensor]


def mesh() -> DeviceMesh:
    return init_device_mesh(device().type, (PROCESSES,))


def spread(mlp: GroupedMLP, *args: Any, **options: Any) -> GroupedMLP:
    """A copy with its experts on both processes."""
    return parallelize_module(copy.deepcopy(mlp), mesh(), ExpertParallel(*args, **options))


def make(**options: Any) -> GroupedMLP:
    torch.manual_seed(0)
    return GroupedMLP(E, H, F, device=device(), **options)


def tokens(count: int = PROCESSES * T, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, logits and dy of all processes."""
    torch.manual_seed(1)
    shapes = (count, H), (count, E), (count, H)
    return [torch.randn(shape).to(device(), dtype) for shape in shapes]


def own(rank: int) -> slice:
    return slice(rank * T, (rank + 1) * T)


def route(logits: Tensor, count: int = C) -> tuple[Tensor, Tensor]:
    """Two choices a token: one addition, in one process or between two."""
    weights, experts = logits.softmax(dim=-1).topk(count)
    return weights, experts


def step(model: Any, x: Tensor, logits: Tensor, dy: Tensor, choose: Any = route) -> Step:
    """The output and all gradients; of a spread layer this process's part."""
    x, logits = x.clone().requires_grad_(), logits.clone().requires_grad_()
    learns = {
        name.removeprefix("_orig_mod."): p
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    y = model(x, *choose(logits))
    gradients = torch.autograd.grad(y, (x, logits, *learns.values()), dy)
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    return {"y": y.detach(), **dict(zip(("x", "logits", *learns), local, strict=True))}


TOKENS = "y", "x", "logits"


def compare(got: Step, want: Step, rank: int, exact_weights: bool = True) -> None:
    """What tokens get has the same bits; weights' gradients have them, or nearly so."""
    for name, whole in want.items():
        if name in TOKENS:
            assert_same_bits(got[name], whole[own(rank)])
        else:
            compare_weight_gradient(got[name], whole[rank * L : (rank + 1) * L], exact_weights)


def compare_weight_gradient(got: Tensor, want: Tensor, exact: bool = True) -> None:
    """A GPU cuts long sums in pieces, which depend on how many experts there are."""
    if exact and device().type == "cpu":
        assert_same_bits(got, want)
    else:
        assert (got - want).norm() <= 1e-5 * want.norm()


def check_one_process(
    of_mlp: dict[str, Any], how: dict[str, Any], compiled: bool, rank: int, directory: Path
) -> None:
    data = tokens()
    whole = make(**of_mlp)
    parallel: Any = spread(whole, **how)
    if compiled:
        parallel = compile_whole(parallel)
    got, want = step(parallel, *(t[own(rank)] for t in data)), step(whole, *data)
    # In FP8 x and dy are rounded before wgrad rounds them along tokens. What differs is next to 0.
    compare(got, want, rank, exact_weights=not how.get("fp8"))


def compile_whole(model: Any, **options: Any) -> Any:
    """In one graph; by Inductor on a GPU. On a CPU that takes longest, and the guide does it."""
    backend = "inductor" if device().type == "cuda" else "aot_eager"
    return torch.compile(model, fullgraph=True, backend=backend, **options)


def check_both_compiled(rank: int, directory: Path) -> None:
    """In one graph: weights in both precisions, and what FSDP2 gathers of them."""
    check_one_process({**BLOCK, "weights": "both"}, WAYS["all_gather"], True, rank, directory)
    meshes = init_device_mesh(device().type, (1, PROCESSES), mesh_dim_names=("data", "experts"))
    parallel = make(**BLOCK, weights="both")
    parallel = parallelize_module(parallel, meshes["experts"], ExpertParallel())
    parallel = fully_shard(parallel, mesh=meshes["data"])
    x, logits, dy = (t[own(rank)].requires_grad_() for t in tokens())
    want = torch.autograd.grad(parallel(x, *route(logits)), (x, logits), dy)
    parallel.forward = compile_whole(parallel.forward)
    got = torch.autograd.grad(parallel(x, *route(logits)), (x, logits), dy)
    assert_all_same_bits(got, want)


def check_open_sizes(dispatch: str, rank: int, directory: Path) -> None:
    """FP8 and a capacity have the most to trace."""
    how: dict[str, Any] = {"dispatch": dispatch, "capacity_factor": 1.5, "fp8": True}
    parallel, twin = (spread(make(**BLOCK), **how) for _ in range(2))
    compiled = compile_whole(parallel, dynamic=True)
    for count in (T, T - 4):
        data = [t[own(rank)][:count] for t in tokens()]
        assert_all_same_bits(step(compiled, *data).values(), step(twin, *data).values())
        assert parallel.dispatcher is not None
        assert twin.dispatcher is not None
        assert parallel.dispatcher.dropped == twin.dispatcher.dropped


def check_fp8_error(dispatch: str, rank: int, directory: Path) -> None:
    """Without a recipe, rounding of x and dy to e4m3 is seen, and no more than that."""
    data = tokens(dtype=BF16)
    whole = make(dtype=BF16)

    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = route(logits, PROCESSES + 1)
        experts = experts.clone()
        experts[::2] %= L  # more choices than processes, and all of one process
        return weights, experts

    want = step(whole, *data, choose)
    got = step(spread(whole, dispatch, fp8=True), *(t[own(rank)] for t in data), choose)
    for name in ("y", "x"):
        exact = want[name][own(rank)].float()
        error = (got[name].float() - exact).norm() / exact.norm()
        assert 0.005 < error < 0.06  # e4m3 rounds by up to 2^-4, on average by 0.025


def kept_by_all_gather(experts: Tensor, factor: float) -> Tensor:
    """Which choices of all processes are kept, and how many each one drops: a loop to read."""
    kept, room = torch.zeros_like(experts, dtype=torch.bool), int(factor * T * C)
    for process in range(PROCESSES):
        here = [
            (e, t, c)
            for e in range(process * L, (process + 1) * L)
            for t in range(len(experts))
            for c in range(C)
            if experts[t, c] == e
        ]
        for _, t, c in here[:room]:
            kept[t, c] = True
    return kept


def kept_by_all_to_all(experts: Tensor, factor: float) -> Tensor:
    slots = min(int(factor * T * C / PROCESSES), T)
    kept = torch.zeros_like(experts, dtype=torch.bool)
    for sender in range(PROCESSES):
        for process in range(PROCESSES):
            sent = 0
            for t in range(sender * T, (sender + 1) * T):
                chosen = experts[t] // L == process
                if chosen.any() and sent < slots:
                    sent += 1
                    kept[t] |= chosen
    return kept & kept_by_all_gather(torch.where(kept, experts, -1), factor)


def check_capacity(dispatch: str, factor: float, rank: int, directory: Path) -> None:
    """Most tokens want the first process's experts, and a fifth no expert's: these take no room.

    What is past the capacity is no choice.
    """
    x, logits, dy = tokens()
    logits[:, :L] += 1.5

    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = route(logits)
        somewhere = torch.arange(len(experts), device=device()) % 5 > 0
        nobody = torch.tensor([-1, E], device=device())
        return weights, torch.where(somewhere[:, None], experts, nobody)

    whole, (_, experts) = make(), choose(logits)
    chosen = (experts >= 0) & (experts < E)
    of = kept_by_all_gather if dispatch == "all_gather" else kept_by_all_to_all
    kept = of(experts.cpu(), factor).to(device())
    lost = (~kept & chosen).sum()
    assert 0 < lost < kept.numel() / 2
    parallel = spread(whole, dispatch, capacity_factor=factor)

    def bounded(logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = choose(logits)
        return weights, torch.where(kept, experts, -1)

    mine = [t[own(rank)] for t in (x, logits, dy)]
    compare(step(parallel, *mine, choose), step(whole, x, logits, dy, bounded), rank)
    assert parallel.dispatcher is not None
    dropped = parallel.dispatcher.dropped.clone()
    torch.distributed.all_reduce(dropped)
    assert dropped == lost
    with torch.no_grad():
        y = parallel(mine[0], *choose(mine[1]))
    again = parallel.dispatcher.dropped.clone()
    torch.distributed.all_reduce(again)
    assert again == 2 * dropped
    dispatcher = spread(whole, dispatch).dispatcher  # without a capacity; an empty slot chose none
    assert dispatcher is not None
    came = dispatcher.dispatch(mine[0], *choose(mine[1])).top_k_index
    here = ((came >= 0) & (came < L)).sum()
    torch.distributed.all_reduce(here)
    assert here == chosen.sum()
    # Dynamo traces no checkpoint that sets an attribute, as `dropped += ...` does.
    compiled = torch.compile(checkpoint, fullgraph=True, backend="aot_eager")
    given = mine[0].requires_grad_(), *choose(mine[1])
    assert_same_bits(compiled(parallel, *given, use_reentrant=False), y)


def check_micro_batches(rank: int, directory: Path) -> None:
    """Weight caches and main_grad of this process's experts."""
    options = {**BLOCK, "cache_weights": True, "fuse_wgrad_accumulation": True}
    whole = make(**options)
    parallel = spread(whole)
    assert parallel.down_proj_cache is not None
    assert parallel.down_proj_cache.values.size(0) == L
    data, grads = tokens(), []
    for mlp, part in ((whole, slice(None)), (parallel, own(rank))):
        for p in (mlp.gate_up_proj, mlp.down_proj):
            p.main_grad = torch.full_like(p, torch.nan)
        for first in (True, False):
            x, logits, dy = (t[part] for t in data)
            mlp(x, *route(logits), first).backward(dy)
        grads.append([p.main_grad for p in mlp.parameters()])
    for got, want in zip(*reversed(grads), strict=True):
        compare_weight_gradient(got.to_local(), want[rank * L : (rank + 1) * L])


def check_quantized_weight(weights: Any, rank: int, directory: Path) -> None:
    """The bytes of frozen experts go with them; an adapter's gradients are those of one process."""
    torch.manual_seed(0)
    options: dict[str, Any] = {**BLOCK, "weights": weights, "lora": Lora(8), "dtype": BF16}
    whole = GroupedMLP(E, H, 64, device=device(), **options)
    with_numbers_in_adapters(whole)
    parallel, data = spread(whole), tokens(dtype=BF16)
    for mlp, part in ((whole, slice(None)), (parallel, own(rank))):
        x, logits, dy = (t[part] for t in data)
        mlp(x, *route(logits)).backward(dy)
    for p, of_whole in zip(parallel.parameters(), whole.parameters(), strict=True):
        local, part = p.to_local(), of_whole.detach()[rank * L : (rank + 1) * L]
        assert_same_bits(local, part)
        assert (p.grad is None) == (of_whole.grad is None) == (not p.requires_grad)
        if p.grad is not None:
            compare_weight_gradient(p.grad.to_local(), of_whole.grad[rank * L : (rank + 1) * L])


def check_copies_of_states(rank: int, directory: Path) -> None:
    """Copies and files of the bytes of several processes."""
    state, twin = (spread(make(**BLOCK, weights="fp8")).state_dict() for _ in range(2))
    copied = copy.deepcopy(state)
    torch.save(state, directory / f"{rank}.pt")
    loaded = torch.load(directory / f"{rank}.pt")
    assert type(loaded["down_proj"]) is DTensor
    for t in state.values():
        t.to_local().zero_()
    for name, expected in twin.items():
        for one in (copied[name], loaded[name]):
            assert (one.dtype, one.placements) == (expected.dtype, expected.placements)
            assert_same_bits(bits(one.to_local()), bits(expected.to_local()))
    assert_same_bits(bits(copied["down_proj"].full_tensor()), bits(twin["down_proj"].full_tensor()))


def check_adapters(rank: int, directory: Path) -> None:
    """Adapters lie with their experts, and have one process's gradients."""
    data, whole = tokens(), make(lora=Lora(8, 16), **BLOCK)
    whole.requires_grad_(True)
    with_numbers_in_adapters(whole)
    parallel = spread(whole, **WAYS["all_to_all"])
    compare(step(parallel, *(t[own(rank)] for t in data)), step(whole, *data), rank)
    for mlp in (whole, parallel):
        mlp.merge_lora()
    assert_same_bits(
        parallel.down_proj.to_local(), whole.down_proj[rank * L : (rank + 1) * L].detach()
    )
    dropping = make(lora=Lora(8, 16, dropout=0.5), **BLOCK)
    with_numbers_in_adapters(dropping)
    dropping, (x, logits) = spread(dropping), (t[own(rank)] for t in data[:2])
    assert not dropping.down_proj.requires_grad
    drawn = dropping(x, *route(logits))
    assert not torch.equal(drawn, dropping.eval()(x, *route(logits)))


def check_meta(options: dict[str, Any], rank: int, directory: Path) -> None:
    """Experts that were never on one process, drawn where they lie."""
    torch.manual_seed(0)
    made = GroupedMLP(E, H, F, bias=True, device="meta", **options)
    mlp = parallelize_module(made, mesh(), ExpertParallel())
    mlp.to_empty(device=device())
    mlp.reset_parameters()
    for name, p in mlp.named_parameters():
        assert p.to_local().size(0) == L
        if name.endswith("_scale_inv"):
            continue
        whole = (p if p.is_floating_point() else mlp.dequantize(name)).full_tensor()
        assert ((whole.abs() <= 1.1 / min(H, F) ** 0.5) & (whole != 0)).float().mean() > 0.9
    x, logits, dy = (t[own(rank)] for t in tokens())
    assert step(mlp, x, logits, dy)["y"].isfinite().all()


def check_counts_from_zero(rank: int, directory: Path) -> None:
    """Not from what new memory holds, whether the count was on meta; and where they are drawn."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # new tensors are filled
    for moved in ("meta", device()):
        mlp = GroupedMLP(E, H, F, device="meta")
        mlp = parallelize_module(mlp, mesh(), ExpertParallel(capacity_factor=4.0))
        assert mlp.dispatcher is not None
        mlp.dispatcher.to(moved)
        mlp.to_empty(device=device())
        assert mlp.dispatcher.dropped == 0  # parameters may come from a checkpoint
    state = mlp.state_dict()
    mlp.dispatcher.register_buffer("own", torch.ones(2), persistent=False)
    mlp.to("meta").load_state_dict(state, assign=True)
    assert mlp.dispatcher.dropped == 0
    assert mlp.dispatcher.own.is_meta  # no state has its values
    mlp.dispatcher.own = torch.ones(2, device=device())
    torch.use_deterministic_algorithms(False)
    mlp.dispatcher.dropped.fill_(5)
    mlp.to_empty(device=device())
    assert mlp.dispatcher.dropped == 5
    mlp.reset_parameters()
    x, logits, _ = (t[own(rank)] for t in tokens())
    mlp(x, *route(logits))
    assert mlp.dispatcher.dropped == 0


def check_first_process_draws(rank: int, directory: Path) -> None:
    """As torch's styles: parameters are the first process's; asked not to talk, each's own."""
    torch.manual_seed(rank)
    mlp = GroupedMLP(E, H, F, device=device())
    torch.manual_seed(0)
    of_first = GroupedMLP(E, H, F, device=device())
    own_experts = slice(rank * L, (rank + 1) * L)
    kept = parallelize_module(
        copy.deepcopy(mlp), mesh(), ExpertParallel(), src_data_rank=None
    ).down_proj.to_local()
    assert_same_bits(kept, mlp.down_proj[own_experts])
    assert_same_bits(spread(mlp).down_proj.to_local(), of_first.down_proj[own_experts])


class OwnDispatcher(TokenDispatcher):
    """With torch's differentiable collectives alone: what a user would write first."""

    def __init__(self, mesh: DeviceMesh, num_experts: int) -> None:
        super().__init__()
        self.mesh, self.first = mesh, num_experts // mesh.size() * mesh.get_local_rank()

    def dispatch(self, x: Tensor, top_k_weights: Tensor, top_k_index: Tensor) -> Dispatched:
        gathered = [
            torch.cat(dist_nn.all_gather(t.contiguous(), self.mesh.get_group()))
            for t in (x, top_k_weights, top_k_index)
        ]
        return Dispatched(gathered[0], gathered[1], gathered[2] - self.first)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        whole: Tensor = dist_nn.all_reduce(y, group=self.mesh.get_group())
        return whole.chunk(self.mesh.size())[self.mesh.get_local_rank()]


def check_own_dispatcher(rank: int, directory: Path) -> None:
    data = tokens()
    whole = make()
    got = step(spread(whole, OwnDispatcher), *(t[own(rank)] for t in data))
    compare(got, step(whole, *data), rank)


class CountingDispatcher(AllGather):
    """Counts what it is asked to do."""

    asked = 0

    def dispatch(self, x: Tensor, top_k_weights: Tensor, top_k_index: Tensor) -> Dispatched:
        self.asked += 1
        return super().dispatch(x, top_k_weights, top_k_index)


def check_subclass(rank: int, directory: Path) -> None:
    """A method of a subclass is called, with the bits of the layer that overlaps."""
    data, whole = [t[own(rank)] for t in tokens()], make(**BLOCK)
    parallel = spread(whole, partial(CountingDispatcher, fp8=True))
    overlapping = spread(whole, "all_gather", fp8=True)
    assert_all_same_bits(step(parallel, *data).values(), step(overlapping, *data).values())
    assert isinstance(parallel.dispatcher, CountingDispatcher)
    assert parallel.dispatcher.asked == 1
    x, logits, _ = data  # without a gradient of x the experts compute none
    came = parallel.dispatcher.dispatch(x, *route(logits.clone().requires_grad_()))
    assert [t.requires_grad for t in came[:2]] == [False, True]


def check_replaced_method(rank: int, directory: Path) -> None:
    """A method that replaces an object's is called, before it was compiled and after."""
    data = [t[own(rank)] for t in tokens()]
    parallel = spread(make(**BLOCK), "all_gather", fp8=True)
    before = step(parallel, *data)
    compiled = compile_whole(parallel)
    assert_all_same_bits(step(compiled, *data).values(), before.values())
    dispatcher: Any = parallel.dispatcher
    combine = dispatcher.combine
    dispatcher.combine = lambda y, dispatched: 2 * combine(y, dispatched)
    for model in (parallel, compiled):
        after = step(model, *data)
        assert_all_same_bits(after.values(), (2 * t for t in before.values()))
    del dispatcher.combine
    for model in (parallel, compiled):
        assert_all_same_bits(step(model, *data).values(), before.values())


def check_shared_experts(rank: int, directory: Path) -> None:
    """The example's function, whose stream a GPU has, gives the bits of a plain sum."""
    beside = example("fsdp2_expert_parallel").beside
    mlp, shared = spread(make()), nn.Linear(H, H, device=device())
    side = torch.cuda.Stream() if device().type == "cuda" else None
    results = []
    for stream in (side, None):
        x, logits, dy = (t[own(rank)] for t in tokens())
        x = x.clone().requires_grad_()
        y = beside(stream, shared, mlp, x, *route(logits))
        results.append((y, *torch.autograd.grad(y, (x, shared.weight), dy)))
    assert_all_same_bits(*results)


class Order(TorchDispatchMode):
    """The names of collectives and of this package's ops, in the order of their calls."""

    NAMESPACES = "_c10d_functional", "grouped_linear", "grouped_linear_parallel"

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.add(func)
        return func(*args, **(kwargs or {}))

    def add(self, op: Any) -> None:
        namespace, name = op._schema.name.split("::")
        if namespace in self.NAMESPACES:
            self.names.append(COLLECTIVES.get(name, name))


COLLECTIVES = dict.fromkeys(
    ("all_gather_into_tensor", "all_to_all_single", "all_to_all_v"), "start"
)


def check_checkpoint(way: str, rank: int, directory: Path) -> None:
    """Recomputed, with the same bits; a policy that keeps what came sends nothing again."""
    data = [t[own(rank)] for t in tokens()]
    parallel = spread(make(**BLOCK), way, fp8=True)
    plain = step(parallel, *data)
    collectives = [
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.all_to_all_single.default,
        torch.ops.grouped_linear_parallel.all_to_all_v.default,
    ]
    policy = partial(create_selective_checkpoint_contexts, [*ops.GEMMS, *collectives])
    sent = 3 + (way == "all_to_all_v")  # whose numbers of rows go, too
    for again, options in ((sent, {}), (0, {"context_fn": policy})):
        x, logits, dy = (t.clone().requires_grad_() for t in data)
        y: Any = checkpoint(
            lambda x, logits: parallel(x, *route(logits)), x, logits, use_reentrant=False, **options
        )
        with Order() as order:
            got = torch.autograd.grad(y, (x, logits, *parallel.parameters()), dy)
        assert order.names.count("start") == 4 + again
        local = [g.to_local() if isinstance(g, DTensor) else g for g in got]
        assert_all_same_bits((y.detach(), *local), plain.values())


def check_looked_into(rank: int, directory: Path) -> None:
    """A process counts its experts' tokens, of which those past the capacity; and is not added up
    with processes that have others.
    """
    whole, data = make(**BLOCK), tokens()
    parallel = spread(whole, capacity_factor=1.0)
    seen, of_whole = watch(parallel), watch(whole)
    got, want = step(parallel, *(t[own(rank)] for t in data)), step(whole, *data)
    assert got.keys() == want.keys()
    (load,), (all_experts,) = (w.read().loads for w in (seen, of_whole))
    assert parallel.dispatcher is not None
    assert load.dropped == parallel.dispatcher.dropped
    routed = torch.tensor(all_experts.tokens[rank * L : (rank + 1) * L])
    kept = routed.cumsum(0).clamp(max=T * C).diff(prepend=torch.zeros(1))  # by expert
    assert load.tokens == tuple(kept.tolist())
    assert load.dropped == routed.sum() - kept.sum()
    for way in ("all_to_all", "all_to_all_v"):  # an empty slot has a token of no expert
        other = spread(whole, way)
        of_other = watch(other)
        step(other, *(t[own(rank)] for t in data))
        assert of_other.read().loads[0].tokens == tuple(routed.tolist())
    with pytest.raises(ValueError, match="are spread over processes of this group"):
        seen.read(dist.group.WORLD)
    seen.remove()
    fsdp: Any = fully_shard(make(**BLOCK), mesh=mesh())
    for sharded in (parallel, fsdp):
        with pytest.raises(ValueError, match="its parameters are on several processes: compare it"):
            compare_with_plain(sharded, lambda model=sharded: model(data[0], *route(data[1])))
    replica = DistributedDataParallel(make(**BLOCK))
    found = [
        compare_with_plain(model, lambda model=model: step(model, *data)).differences
        for model in (make(**BLOCK), replica)
    ]
    assert [d[1:] for d in found[0]] == [d[1:] for d in found[1]]
    # torch's words: its reducer knows plain tensors.
    for model in (parallel, nn.Sequential(nn.Linear(H, H, device=device()), parallel)):
        with pytest.raises((RuntimeError, NotImplementedError), match=r"DTensor|sharding strategy"):
            DistributedDataParallel(model)


def check_whole_experts(
    options: dict[str, Any], compiled: Sequence[str], watched: bool, rank: int, directory: Path
) -> None:
    """The guide's other columns: experts that FSDP2 or DistributedDataParallel has on each process.

    Both processes have equal tokens, so that means over them have one process's bits. Compiled ones
    are watched where `watched` says so: what watch counts takes longer to trace than the layer.
    """
    x, logits, dy = (t[:T] for t in tokens())
    whole = make(**options)
    if "lora" in options:
        with_numbers_in_adapters(whole)
    of_whole = watch(whole)
    want, loads = step(whole, x, logits, dy), of_whole.read().loads
    of_whole.remove()
    ways = [*itertools.product(("FSDP2", "DDP"), ("eager", "checkpointed"))]
    for by, how in (*ways, *((by, "compiled") for by in compiled)):
        layer: Any = copy.deepcopy(whole)
        if by == "FSDP2":
            fully_shard(layer, mesh=mesh())
            if device().type == "cpu":  # gloo cannot divide while it sums
                layer.set_force_sum_reduction_for_comms(True)
        seen, model = watch(layer) if watched or how != "compiled" else None, layer
        if how == "compiled":
            layer.forward = compile_whole(layer.forward)
        if by == "DDP":
            model = DistributedDataParallel(layer)
        leaf = x.clone().requires_grad_()
        routing = route(logits)
        if how == "checkpointed":
            y: Any = checkpoint(model, leaf, *routing, use_reentrant=False)
        else:
            y = model(leaf, *routing)
        y.backward(dy)
        assert_all_same_bits((y.detach(), leaf.grad), (want["y"], want["x"]))
        for name, p in layer.named_parameters():
            if p.grad is not None:
                expected = want[name] if by == "DDP" else want[name].chunk(PROCESSES)[rank]
                compare_weight_gradient(getattr(p.grad, "_local_tensor", p.grad), expected)
        if seen is not None:
            times = 1 + (how == "checkpointed")
            (load,) = seen.read().loads
            assert load.tokens == tuple(times * n for n in loads[0].tokens)


def check_refused(rank: int, directory: Path) -> None:
    """Before anything is sent."""
    multiple = "must be a multiple of the number of processes, got 3 experts and 2 processes"
    for model, style, sentence in (
        (nn.Linear(16, 16), ExpertParallel(), "got Linear: transformers and torchtitan spread"),
        (make(recipe=DelayedScaling()), ExpertParallel(), "take another recipe, as Float8"),
        (GroupedMLP(3, H, F), ExpertParallel(), f"AllGather: num_experts {multiple}"),
        (spread(make()), ExpertParallel(), "sharded already: apply it before"),
    ):
        with pytest.raises(ValueError, match=sentence):
            parallelize_module(model, mesh(), style)
    mlp = make()
    with pytest.raises(ValueError, match="dispatch must return a TokenDispatcher, got int"):
        parallelize_module(mlp, mesh(), ExpertParallel(lambda mesh, E: E))  # type: ignore[arg-type, return-value]
    both = init_device_mesh(device().type, (PROCESSES, 1), mesh_dim_names=("data", "experts"))
    with pytest.raises(ValueError, match="ExpertParallel: mesh must have one dimension, got 2"):
        ExpertParallel(OwnDispatcher)._apply(mlp, both)
    assert mlp.dispatcher is None
    with pytest.raises(ValueError, match=f"ExpertParallel: num_experts {multiple}"):
        parallelize_module(GroupedMLP(3, H, F), mesh(), ExpertParallel(OwnDispatcher))
    for wrong in (4.0, True, -4, 0):
        with pytest.raises(ValueError, match="AllToAll: num_experts must be a positive integer"):
            AllToAll(mesh(), wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="AllToAll: at most 1024 experts a process"):
        AllToAll(mesh(), 10**400)
    parallel = spread(make())
    x, logits, _ = (t[own(rank)] for t in tokens())
    with pytest.raises(ValueError, match="the dispatcher chooses max_rows"):
        parallel(x, *route(logits), max_rows=7)
    with pytest.raises(ValueError, match="its dispatcher sorts: call forward"):
        parallel.forward_sorted(x, [len(x), *[0] * (parallel.num_experts - 1)])
    with pytest.raises(RuntimeError, match="differ in their tokens"):
        parallel(x[1:], *route(logits))


def check_unequal_tokens(way: str, rank: int, directory: Path) -> None:
    """Each process says it, before anything else is sent; equal numbers pass."""
    parallel = spread(make(), way, check_tokens=True)
    x, logits, _ = (t[own(rank)] for t in tokens())
    some = slice(rank, None)
    said = rf"every process must have as many tokens, got \[{T}, {T - 1}\]: pad with tokens"
    with pytest.raises(RuntimeError, match=said):
        parallel(x[some], *route(logits[some]))
    expected = spread(make(), way)(x, *route(logits))
    assert_same_bits(parallel(x, *route(logits)), expected)
    with pytest.raises(RuntimeError, match=r"leave it out under torch\.compile"):
        torch.compile(parallel, fullgraph=True)(x, *route(logits))


def check_benchmark(rank: int, directory: Path) -> None:
    """It runs, and every row has its numbers."""
    rows = benchmark.measure("tiny", "block", mesh(), rounds=1)
    assert len(rows) == 1 + 2 * len(benchmark.WAYS)
    assert all(row.ms > 0 and row.efficiency > 0 for row in rows)
    assert all((row.communication > 0) == (row.way != "-") for row in rows)
    sent = {(row.scaling, row.way): row.sent for row in rows}
    assert 0 < sent["weak", "all_gather, FP8"] < sent["weak", "all_gather"]
    assert sent["strong", "all_to_all"] < sent["weak", "all_to_all"]
    assert benchmark.table(rows).count("\n") == len(rows) + 1


def check_training_benchmark(rank: int, directory: Path) -> None:
    """Ways over several processes learn the same, and FSDP2 gathers less where it is FP8."""
    ways = "FSDP2", "FSDP2" + training.BOTH, "all_to_all, FP8"
    rows = training.measure(ways, "tiny", "block", mesh(), rounds=1)
    assert {row.way for row in rows} == {*ways, *map(training.alone, ways)}
    assert all(row.ms > 0 and row.efficiency > 0 for row in rows)
    of_way = {row.way: row for row in rows}
    for row in rows:
        assert row.gpus == 1 or abs(row.loss - of_way["FSDP2"].loss) < 0.01
    assert 0 < of_way["FSDP2" + training.BOTH].gathered < of_way["FSDP2"].gathered
    assert training.table(rows).count("\n") == len(rows) + 1


def check_losses(rank: int, directory: Path) -> None:
    """Experts over processes, and FSDP2, learn from the batches of both what one learns."""
    text = torch.arange(999, dtype=torch.uint8).to(device()) % 97
    arguments = parallel_losses.CASES["tiny"], "block"
    curves = {
        ("block", way): parallel_losses.learn(*arguments, way, text, steps=4)
        for way in parallel_losses.WAYS
    }
    for losses in curves.values():
        assert losses[-1] < losses[0]
        torch.testing.assert_close(
            losses, curves["block", parallel_losses.ALONE], rtol=3e-3, atol=0
        )
    assert parallel_losses.table(curves).count("\n") == len(curves) + 1


def check_30b(rank: int, directory: Path) -> None:
    """Each way learns the same from equal weights; a restart changes no bit of its losses."""
    text = (torch.arange(999, dtype=torch.uint8) % 97).to(device())
    options = parallel_30b.Options(
        "tiny", layers=2, context=32, sequences=1, accumulate=2, steps=6, kept=1
    )
    rows = []
    for form, experts in itertools.product(("FSDP2", "all_gather"), parallel_30b.EXPERTS):
        arguments = form, experts, options, text, mesh(), directory / form / experts
        rows.append(parallel_30b.train(*arguments))
        again = parallel_30b.train(*arguments, resumed=True)
        assert len(again.losses) == 3
        # attention's backward adds in any order on a GPU
        bound = 0 if device().type == "cpu" else 1e-3
        assert parallel_30b.apart(rows[-1].losses, again.losses) <= bound, (form, experts)
        rows[-1].apart = 0.0
    for row in rows:
        assert row.losses[-1] < row.losses[0]
        assert row.dropped == 0
        assert parallel_30b.apart(rows[0].losses, row.losses) < 3e-3
    assert len(parallel_30b.cells(rows[0], {"FSDP2": 1.0})) == len(parallel_30b.COLUMNS) - 6
    # AdamW in the backward: fewer gradients in memory, the same bits
    for form, experts in itertools.product(("FSDP2", "all_gather"), ("block", "both")):
        once = replace(options, accumulate=1, steps=3)
        after, within = (
            parallel_30b.train(form, experts, replace(once, step_in_backward=b), text, mesh())
            for b in (False, True)
        )
        assert parallel_30b.apart(after.losses, within.losses) <= bound, (form, experts)


def check_cuda_graph(
    recipe: Recipe | None, how: dict[str, Any], rank: int, directory: Path
) -> None:
    """One graph of forward and backward for any routing."""
    if device().type == "cpu":
        return
    parallel = compile_whole(spread(make(recipe=recipe, dtype=BF16), **how))
    whole = make(recipe=recipe, dtype=BF16)
    data = [t[own(rank)].contiguous() for t in tokens(dtype=BF16)]
    call = partial(step, parallel, *data)
    graph, got = captured(call, warm_ups=3, capture_error_mode="thread_local")
    for seed in (2, 3):
        torch.manual_seed(seed)
        fresh = [torch.randn(PROCESSES * len(t), t.size(1)).to(t) for t in data]
        for t, new in zip(data, fresh, strict=True):
            t.copy_(new[own(rank)])
        graph.replay()
        want = step(whole, *fresh)
        for name in ("y", "x"):
            exact = want[name][own(rank)].float()
            # Each process rounds its part of a sum to bfloat16, and then their sum.
            assert (got[name].float() - exact).abs().max() <= 2**-7 * exact.abs().max()


WAYS: dict[str, dict[str, Any]] = {
    "all_gather": {"dispatch": "all_gather"},
    "all_to_all": {"dispatch": "all_to_all"},
    "all_to_all_v": {"dispatch": "all_to_all_v"},
    "all_gather_fp8": {"dispatch": "all_gather", "fp8": True},
    "all_to_all_fp8": {"dispatch": "all_to_all", "fp8": True},
    "all_to_all_v_fp8": {"dispatch": "all_to_all_v", "fp8": True},
}
CHECKS: Checks = {
    **{
        f"{recipe}_{way}": partial(check_one_process, {"recipe": RECIPES[recipe]}, how, False)
        for recipe in RECIPES
        for way, how in WAYS.items()
        if recipe == "block" or not how.get("fp8")  # whose GEMMs round the same way
    },
    **{
        f"block_{way}_compiled": partial(check_one_process, BLOCK, WAYS[way], True)
        for way in ("all_gather", "all_to_all_v_fp8")  # open_sizes compiles all_to_all
    },
    "both_compiled": check_both_compiled,
    "qat": partial(check_one_process, QAT, WAYS["all_gather"], False),
    "qat_both": partial(
        check_one_process, {**QAT, "weights": "both"}, WAYS["all_to_all_fp8"], True
    ),
    **{
        f"gate_up_again_{name}": partial(check_one_process, GATE_UP_AGAIN, how, compiled)
        for name, how, compiled in (
            ("eager", WAYS["all_to_all_fp8"] | {"capacity_factor": 2.0}, False),
            ("compiled", WAYS["all_gather"] | {"capacity_factor": 2.0}, True),
        )
    },
    "bias": partial(check_one_process, {"bias": True}, WAYS["all_to_all"], False),
    **{
        f"open_sizes_{way}": partial(check_open_sizes, way)
        for way in ("all_to_all", "all_to_all_v")
    },
    **{f"fp8_error_{way}": partial(check_fp8_error, way) for way in DISPATCHERS},
    "capacity_all_gather": partial(check_capacity, "all_gather", 1.125),
    "capacity_all_to_all": partial(check_capacity, "all_to_all", 0.75),
    "capacity_all_to_all_v": partial(check_capacity, "all_to_all_v", 0.75),
    "micro_batches": check_micro_batches,
    **{f"quantized_{w}": partial(check_quantized_weight, w) for w in ("fp8", "mxfp4")},
    "looked_into": check_looked_into,
    "whole_experts": partial(check_whole_experts, BLOCK, ("FSDP2", "DDP"), False),
    "whole_experts_adapters": partial(
        check_whole_experts, {**BLOCK, "lora": Lora(8)}, ("FSDP2",), False
    ),
    "whole_experts_again": partial(check_whole_experts, GATE_UP_AGAIN, ("DDP",), False),
    "whole_experts_watched": partial(check_whole_experts, BLOCK, ("FSDP2", "DDP"), True),
    "copies_of_states": check_copies_of_states,
    "adapters": check_adapters,
    "meta": partial(check_meta, {}),
    "counts_from_zero": check_counts_from_zero,
    "meta_quantized": partial(check_meta, {**BLOCK, "weights": "fp8"}),
    "first_process_draws": check_first_process_draws,
    **{f"checkpoint_{way}": partial(check_checkpoint, way) for way in DISPATCHERS},
    "subclass": check_subclass,
    "replaced_method": check_replaced_method,
    "own_dispatcher": check_own_dispatcher,
    "shared_experts": check_shared_experts,
    "refused": check_refused,
    **{f"unequal_tokens_{way}": partial(check_unequal_tokens, way) for way in DISPATCHERS},
    "benchmark": check_benchmark,
    "training_benchmark": check_training_benchmark,
    "losses": check_losses,
    "30b_benchmark": check_30b,
    **{
        f"cuda_graph_{recipe}_{way}": partial(check_cuda_graph, RECIPES[recipe], how)
        for recipe in RECIPES
        for way, how in WAYS.items()
        if recipe == "block" or not how.get("fp8")
    },
}
ON_A_CPU = {name: check for name, check in CHECKS.items() if not name.startswith("cuda_graph")}


# They trace for many seconds, what open_sizes_all_to_all, whole_experts and test_watch.py have.
LONG = "open_sizes_all_to_all_v", "whole_experts_watched"


test_two_processes = on_cpu(
    [pytest.param(n, marks=[pytest.mark.nightly] * (n in LONG)) for n in ON_A_CPU]
)
test_two_gpus = on_gpus(CHECKS)


def test_computes_while_rows_travel() -> None:
    """Between the start of a collective and the wait for it stands what can hide it."""
    compiled: list[list[str]] = []

    def record(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        order = Order()
        for node in graph.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                order.add(node.target)
        compiled.append(order.names)
        return graph

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=record, bw_compiler=record, partition_fn=partition)
    with one_process():
        mlp = GroupedMLP(E, 128, F, recipe=Float8BlockScaling())
        parallelize_module(mlp, init_device_mesh("cpu", (1,)), ExpertParallel())
        x, logits, dy = (t[:, :128].requires_grad_() for t in tokens())
        with Order() as forward:
            y = mlp(x, *route(logits))
        with Order() as backward:
            torch.autograd.grad(y, (x, logits, *mlp.parameters()), dy)
        y = torch.compile(mlp, fullgraph=True, backend=backend)(x, *route(logits))
        torch.autograd.grad(y, (x, logits, *mlp.parameters()), dy)
    assert compiled == [forward.names, backward.names]
    assert_expected_inline(
        textwrap.fill(" ".join(forward.names), 90),
        """\
start start wait_tensor sort_by_expert quantize_weight wait_tensor group_quantize
grouped_scaled_mm group_quantize_swiglu quantize_weight grouped_scaled_mm gather_sum start
wait_tensor gather_sum""",
    )
    assert_expected_inline(
        textwrap.fill(" ".join(backward.names), 90),
        """\
start wait_tensor group_quantize group_quantize grouped_scaled_mm
group_quantize_swiglu_grad start grouped_scaled_mm_wgrad grouped_scaled_mm gather_sum
start group_quantize grouped_scaled_mm_wgrad wait_tensor gather_sum wait_tensor""",
    )


@pytest.mark.parametrize("factor", [0.7, 1, 1.1, 1e-300, 1e300])
def test_capacity_of_many_choices(factor: float) -> None:
    """Graphs of dynamic shapes compute it in 64 bits, as this tensor does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dispatcher = AllGather(init_device_mesh("cpu", (1,)), E, capacity_factor=factor)
    finally:
        dist.destroy_process_group()
    many = 10 * 2**27
    most = {0.7: 7 * 2**27, 1e-300: 2**27 * 10 // 2**20}.get(factor, many)
    assert dispatcher.capacity(torch.tensor(many)) == most
    assert dispatcher.capacity(1) == 1  # a part of a row is a row


def test_without_nvshmem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_symmetric_memory, "is_nvshmem_available", lambda: False)
    made = AllToAllV.__new__(AllToAllV)
    made.require("cpu")
    with pytest.raises(RuntimeError, match="AllToAllV: needs NVSHMEM, which this torch lacks or"):
        made.require("cuda")


def test_buffers_belong_to_the_group_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of groups start anew after destroy_process_group, on as many processes as may be."""
    monkeypatch.setattr(_symmetric_memory, "get_backend", lambda device: "NVSHMEM")
    monkeypatch.setattr(_symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda t, group: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made = []
    for _ in range(2):
        with one_process():
            group, cpu = dist.group.WORLD, torch.device("cpu")
            assert group is not None
            made.append((group.group_name, symmetric_memory._buffers(group, cpu)))
            assert symmetric_memory._buffers(group, cpu) is made[-1][1]
    (first, before), (second, after) = made
    assert first == second
    assert before is not after


def test_wrong_styles() -> None:
    with pytest.raises(ValueError, match="all_to_all, all_to_all_v or a function, got 'ring'"):
        ExpertParallel("ring")
    by_name: list[Any] = [{"capacity_factor": 2.0}, {"fp8": True}, {"check_tokens": True}]
    for option in by_name:
        with pytest.raises(ValueError, match="are for dispatchers by name"):
            ExpertParallel(AllGather, **option)
    with pytest.raises(ValueError, match=r"^ExpertParallel: dispatch must be .*, got 3$"):
        ExpertParallel(3)
    with pytest.raises(ValueError, match=r"^ExpertParallel: fp8 must be True or False, got 'yes'"):
        ExpertParallel(fp8="yes")
    for factor in ("2", 0.0, -1.0, True, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"^ExpertParallel: capacity_factor must be None"):
            ExpertParallel(capacity_factor=factor)
    assert issubclass(AllToAll, TokenDispatcher)
