# SPDX-License-Identifier: Apache-2.0
"""Two processes, with weights in high precision and FP8: what is gathered, stepped, saved and sent.

A model whose weights are kept so is told apart from a plain one by nothing but the bytes that FSDP2
gathers. E experts, T rows, K in_features, N out_features.
"""

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile
from torch.testing import assert_close

from grouped_linear import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    GroupedLinear,
    GroupedMLP,
    Recipe,
    convert,
    grouped_linear,
)
from grouped_linear.quantized.gathered import GatheredWeight
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from support.compare import assert_all_same_bits, assert_same_bits
from support.documents import ROOT, examples
from support.errors import sentence
from support.fresh import assert_fresh, rounded
from support.hugging_face import tiny
from support.processes import PROCESSES, Checks, device, on_cpu, on_gpus, one_process

E, T, H, F = 4, 40, 32, 160
BF16, FP32 = torch.bfloat16, torch.float32
COUNTS = torch.tensor([15, 0, 20, 5])


RECIPES = {
    "block": Float8BlockScaling(),
    "current": Float8CurrentScaling(),
    "qat": Float8BlockScaling(qat="mxfp4"),
    "qat_16_bits": Recipe(weight=Format(qat="mxfp4")),
    "own": Recipe(weight=Format(quantize=rounded)),
}


class Model(nn.Module):
    def __init__(self, recipe: Recipe, weights: str | None, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"recipe": recipe, "dtype": dtype, "device": device()}
        self.layers = nn.ModuleList(GroupedMLP(E, H, F, weights=weights, **options) for _ in "ab")
        with torch.no_grad():  # blocks have other scales than their neighbours
            for p in self.parameters():
                p.mul_(torch.logspace(-1, 1, p.numel(), device=p.device).view_as(p))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (torch.arange(T, device=x.device)[:, None] + torch.arange(2, device=x.device)) % E
        for layer in self.layers:
            x = x + layer(x, torch.full((T, 2), 0.5, device=x.device), chosen)
        return x


def train(model: Any, seed: int = 1, steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    generator, outputs = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        y = model(torch.randn(T, H, generator=generator).to(device(), BF16))
        y.float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(y.detach())
    return outputs


def shard(model: nn.Module, reshard: bool = True, **options: Any) -> None:
    mesh = init_device_mesh(device().type, (PROCESSES,))
    for module in (*model.layers, model):  # type: ignore[misc]
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, **options)


def assert_kept(p: Any, numbers: Tensor) -> None:
    """A shard has these numbers, and the FP8 ones are theirs."""
    assert_fresh(p)
    assert_same_bits(p.to_local().dequantize(), numbers)


def check_training(name: str, rank: int, directory: Path) -> None:
    """Sharded steps are those of one process, and of plain weights."""
    for reshard in (True, False):
        whole, plain, kept = (
            Model(RECIPES[name], None),
            Model(RECIPES[name], None),
            Model(RECIPES[name], "both"),
        )
        for model in (plain, kept):
            shard(model, reshard)
        outputs = [train(model) for model in (whole, plain, kept)]
        for other in outputs[1:]:
            assert_all_same_bits(other, outputs[0])
        for p, q in zip(kept.parameters(), plain.parameters(), strict=True):
            assert_kept(p, q.to_local())  # type: ignore[attr-defined]


def check_hybrid(rank: int, directory: Path) -> None:
    """HSDP: replicas that see other rows step alike, as plain weights do."""
    models = [Model(RECIPES["block"], weights) for weights in ("both", None)]
    names = ("replicate", "shard")
    mesh = init_device_mesh(device().type, (PROCESSES, 1), mesh_dim_names=names)
    for model in models:
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
        train(model, seed=rank)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        own = p.to_local().dequantize()  # type: ignore[attr-defined]
        assert_fresh(p)
        assert_same_bits(own, q.to_local())  # type: ignore[attr-defined]
        others = [torch.empty_like(own) for _ in range(PROCESSES)]
        dist.all_gather(others, own)
        for other in others:
            assert_same_bits(other, own)


def check_mixed_precision(rank: int, directory: Path) -> None:
    """float32 numbers stay on their process; what is quantized has the policy's dtype."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for recipe in RECIPES.values():
        kept, plain = (Model(recipe, weights, FP32) for weights in ("both", None))
        for model in (kept, plain):
            shard(model, mp_policy=policy)
        for a, e in zip(*(train(model) for model in (kept, plain)), strict=True):
            assert_same_bits(a, e)
        for p, q in zip(kept.parameters(), plain.parameters(), strict=True):
            assert_kept(p, q.to_local())  # type: ignore[attr-defined]


def check_bytes(rank: int, directory: Path) -> None:
    """FSDP2 gathers a byte an element and the scales, where BF16 takes two bytes."""
    model = Model(RECIPES["block"], "both")
    shard(model)
    with profile(record_shapes=True) as recorded, torch.no_grad():
        model(torch.zeros(T, H, device=device(), dtype=BF16))
    gathers = [e for e in recorded.events() if "all_gather" in e.name.lower() and e.input_shapes]
    sizes = [size[0] for e in gathers for size in e.input_shapes if len(size) == 1]
    in_bf16 = 2 * sum(p.numel() for p in model.layers[0].parameters())
    assert 0.5 * in_bf16 < max(sizes) <= 0.52 * in_bf16


def check_gathered(rank: int, directory: Path) -> None:
    """A layer reads FP8 numbers alone of what FSDP2 gathered; all else is refused."""
    model = Model(RECIPES["block"], "both")
    shard(model)
    model.layers[0].unshard()  # type: ignore[operator]
    p: Any = model.layers[0].down_proj
    assert isinstance(p, GatheredWeight)
    for operation in (lambda: p.detach().zero_(), lambda: p.sum(), lambda: p[0]):
        assert sentence(operation).startswith(
            "GatheredWeight: FSDP2 gathers FP8 numbers alone, which layers read, got aten."
        )
    model.layers[0].reshard()  # type: ignore[operator]
    assert_fresh(model.layers[0].down_proj)


def check_other_recipes(rank: int, directory: Path) -> None:
    """What is gathered is read by recipes of its kind alone: qat that is switched on later is not.

    A weight whose master is here is quantized again in each call.
    """
    x = torch.randn(T, H, device=device())
    for name, other in itertools.permutations(RECIPES, 2):
        layer = GroupedLinear(E, H, F, bias=False, recipe=RECIPES[name], weights="both")
        layer.to(device())
        expected = grouped_linear(x, layer.weight.dequantize(), COUNTS, recipe=RECIPES[other])
        assert_same_bits(grouped_linear(x, layer.weight, COUNTS, recipe=RECIPES[other]), expected)
        if name == "own":  # gathered in high precision
            continue
        fully_shard(layer)
        layer.unshard()
        with pytest.raises(ValueError, match=r"grouped_linear: a weight that FSDP2 gathers under"):
            grouped_linear(x, layer.weight, COUNTS, recipe=RECIPES[other])


def check_checkpoints(rank: int, directory: Path) -> None:
    """They are those of a plain model, either way, whole or sharded, loaded in place."""
    kept, plain = Model(RECIPES["block"], "both"), Model(RECIPES["block"], None)
    for model in (kept, plain):
        shard(model)
        train(model)
    expected = [p.to_local().clone() for p in plain.parameters()]  # type: ignore[attr-defined]
    for i, (source, target) in enumerate(((kept, plain), (plain, kept), (kept, kept))):
        saved = directory / str(i)
        dcp.save({"model": get_model_state_dict(source)}, checkpoint_id=saved)
        with torch.no_grad():
            for p in target.parameters():
                p.zero_()
        state = {"model": get_model_state_dict(target)}
        dcp.load(state, checkpoint_id=saved)  # in place: nothing is loaded after it
        for p, e in zip(target.parameters(), expected, strict=True):
            if target is kept:
                assert_kept(p, e)
            else:
                assert_same_bits(p.to_local(), e)
    alone = Model(RECIPES["block"], "both")  # saved by two processes, read by one, and back
    read = {"model": get_model_state_dict(alone)}
    dcp.load(read, checkpoint_id=directory / "0", no_dist=True)
    for p, e in zip(alone.parameters(), expected, strict=True):
        assert_fresh(p)
        assert_same_bits(p.detach().dequantize().chunk(PROCESSES)[rank], e)
    with torch.no_grad():
        for p in alone.parameters():
            p.mul_(2)
    if rank == 0:
        saved = directory / "one"
        dcp.save({"model": get_model_state_dict(alone)}, checkpoint_id=saved, no_dist=True)
    dist.barrier()
    dcp.load({"model": get_model_state_dict(kept)}, checkpoint_id=directory / "one")
    for p, e in zip(kept.parameters(), expected, strict=True):
        assert_kept(p, 2 * e)
        with torch.no_grad():
            p.mul_(0.5)
    full = StateDictOptions(full_state_dict=True)
    states = [get_model_state_dict(model, options=full) for model in (kept, plain)]
    for name, t in states[0].items():
        assert type(t) is Tensor
        assert_same_bits(t, states[1][name])
    doubled = {name: 2 * t for name, t in states[0].items()}
    set_model_state_dict(kept, doubled, options=full)
    for p, e in zip(kept.parameters(), expected, strict=True):
        assert_kept(p, 2 * e)


def check_data_parallel(rank: int, directory: Path) -> None:
    results = []
    for weights in ("both", None):
        model = Model(RECIPES["block"], weights)
        if rank:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2)  # DistributedDataParallel makes processes equal
        parallel = DistributedDataParallel(model)
        train(parallel, seed=rank)
        for p in model.parameters():
            work = dist.all_reduce(p.detach(), async_op=True)
            work.wait()
            dist.broadcast(p.detach(), 1)
        results.append(model)
    for p, q in zip(*(model.parameters() for model in results), strict=True):
        assert_fresh(p)
        assert_same_bits(p.dequantize(), q)


def check_guide(rank: int, directory: Path) -> None:
    """docs/several_gpus.md: the gradients of one process that has the tokens of both."""
    page, names = (ROOT / "docs" / "several_gpus.md").read_text(), dict[str, Any]()
    # The group is there.
    exec(re.sub("^dist.init_process_group.*$", "", examples(page)[0], flags=re.MULTILINE), names)
    expected = names["new_model"]()
    for other in range(PROCESSES):
        tokens = names["tokens"] + 16 * (other - rank)
        (expected(input_ids=tokens, labels=tokens).loss / PROCESSES).backward()
    copies = names["replica"].module, names["sharded"]
    for e, *given in zip(*map(nn.Module.parameters, (expected, *copies)), strict=True):
        for p in given:
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            assert_close(grad, e.grad, rtol=1e-4, atol=1e-6)  # sums in another order, in float32


def functional(name: str, *options: Any) -> Callable[[Tensor], Any]:
    """A functional collective that writes its argument: nobody waits for it."""
    operation = getattr(torch.ops._c10d_functional, name)
    return lambda t: operation(t if "coalesced" not in name else [t], *options, "0")


def coalesced(t: Tensor) -> None:
    with dist._coalescing_manager():
        for part in t.chunk(2):
            dist.all_reduce(part)


def scattered(t: Tensor) -> None:
    parts = [torch.full_like(t, i + 1.0) for i in range(PROCESSES)]
    dist.scatter(t, parts if dist.get_rank() == 0 else None)


COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce_": functional("all_reduce_", "sum"),
    "all_reduce_coalesced_": functional("all_reduce_coalesced_", "sum"),
    "broadcast_": functional("broadcast_", 1),
    "gather out": lambda t: torch.ops._c10d_functional.all_gather_into_tensor_out(
        t[: E // PROCESSES].clone(), PROCESSES, "0", out=t
    ),
    "all_reduce": lambda t: dist.all_reduce(t, async_op=True).wait(),
    "reduce": lambda t: dist.reduce(t, 1),
    "all_gather": lambda t: dist.all_gather(list(t.chunk(2)), t[:2].clone()),
    "all_gather_into_tensor": lambda t: dist.all_gather_into_tensor(t, t[:2].clone()),
    "reduce_scatter_tensor": lambda t: dist.reduce_scatter_tensor(t[:2], t.clone()),
    "all_to_all_single": lambda t: dist.all_to_all_single(t, t.clone()),
    "coalesced": coalesced,
    "scatter": scattered,
}


def check_collectives(rank: int, directory: Path) -> None:
    """Whatever writes has ended before it is quantized."""
    for name, collective in COLLECTIVES.items():
        torch.manual_seed(rank)
        plain = torch.randn(E, F, H, device=device())
        kept = GroupedTensorWithMaster.quantize(plain.clone())
        for t in (plain, kept):
            collective(t)
        if name not in ("reduce",) or rank == 1:
            torch.ops._c10d_functional.wait_tensor(plain)
            assert_same_bits(kept.dequantize(), plain)
        assert_fresh(kept)


def check_point_to_point(rank: int, directory: Path) -> None:
    """A weight is sent as it is. Nobody sees when a receive writes one: that is refused."""
    torch.manual_seed(0)
    w = torch.randn(E, F, H).to(device())
    kept, received = GroupedTensorWithMaster.quantize(w), torch.empty_like(w)
    other = 1 - rank
    for batched in (False, True):
        received.zero_()
        if batched:
            pairs = (dist.isend, kept), (dist.irecv, received)
            works = dist.batch_isend_irecv([dist.P2POp(do, t, other) for do, t in pairs])
        elif rank == 0:
            dist.send(kept, other)
            dist.recv(received, other)
            works = []
        else:
            dist.recv(received, other)
            works = [dist.isend(kept, other)]
        for work in works:
            work.wait()
        assert_same_bits(received, w)
    for receive in (dist.recv, dist.irecv):
        assert sentence(lambda receive=receive: receive(kept, other)) == (  # type: ignore[misc]
            "GroupedTensorWithMaster: c10d.recv_.default ends when nothing shows it, and the FP8 "
            "numbers would be old: receive in a plain tensor and copy_ that"
        )
    assert_same_bits(kept.dequantize(), w)


def check_distributed_tensors(rank: int, directory: Path) -> None:
    """Each process has its part of rank 0's weight, in high precision and FP8."""
    mesh = init_device_mesh(device().type, (PROCESSES,))
    for experts in (E, 3):
        for recipe in RECIPES.values():
            torch.manual_seed(rank)
            w = torch.randn(experts, 144, H).to(device(), BF16)
            whole = GroupedTensorWithMaster.quantize(w, recipe)
            plain, kept = (distribute_tensor(t, mesh, [Shard(0)]) for t in (w, whole))
            assert_same_bits(kept.full_tensor(), plain.full_tensor())
            if kept.to_local().is_whole:  # a view, where one was padded and the format is its own
                assert_fresh(kept)
            else:
                assert recipe is RECIPES["own"]
            with pytest.raises(RuntimeError, match="N must be a positive multiple of 16, got 72"):
                distribute_tensor(whole[0], mesh, [Shard(0)])  # on both, before one sends


CHECKS: Checks = {
    **{f"training_{name}": partial(check_training, name) for name in RECIPES},
    "hybrid": check_hybrid,
    "mixed_precision": check_mixed_precision,
    "bytes": check_bytes,
    "gathered": check_gathered,
    "other_recipes": check_other_recipes,
    "checkpoints": check_checkpoints,
    "data_parallel": check_data_parallel,
    "guide": check_guide,
    "collectives": check_collectives,
    "point_to_point": check_point_to_point,
    "distributed_tensors": check_distributed_tensors,
}

test_two_processes = on_cpu(CHECKS)
test_two_gpus = on_gpus(sorted(CHECKS.keys() - {"guide"}))  # which is on CPUs


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of this process alone, where FSDP2 gathers nothing."""
    with one_process():
        yield init_device_mesh("cpu", (1,))


def alone(mesh: Any, **options: Any) -> tuple[Any, Any]:
    """A layer in both precisions, sharded, which has run once and is resharded; and a plain one."""
    torch.manual_seed(0)
    made = {"bias": False, "recipe": RECIPES["block"]}
    sharded, plain = GroupedLinear(E, H, F, weights="both", **made), GroupedLinear(E, H, F, **made)
    plain.load_state_dict(sharded.state_dict())
    fully_shard(sharded, mesh=mesh, **options)
    sharded(torch.randn(T, H).to(BF16 if options else FP32), COUNTS)
    sharded.reshard()
    return sharded, plain


def test_scales_of_one_process_follow_writes(mesh: Any) -> None:
    """They travel as metadata, which FSDP2 does not fill again."""
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    sharded, plain = alone(mesh, mp_policy=policy)
    with torch.no_grad():
        sharded.weight.mul_(16)
        plain.weight.mul_(16)
    x = torch.randn(T, H).to(BF16)
    assert_same_bits(sharded(x, COUNTS).detach(), plain.to(BF16)(x, COUNTS).detach())


@pytest.mark.parametrize("dtype", [FP32, torch.float64])
def test_an_assigned_shard_stays_in_both_precisions(mesh: Any, dtype: torch.dtype) -> None:
    sharded, plain = alone(mesh)
    w, x = torch.randn(E, F, H), torch.randn(T, H)
    state = {"weight": distribute_tensor(w.to(dtype), mesh, [Shard(0)])}
    sharded.load_state_dict(state, assign=True)
    plain.load_state_dict({"weight": w})
    assert isinstance(sharded.weight.to_local(), GroupedTensorWithMaster)
    assert_same_bits(sharded(x, COUNTS).detach(), plain(x, COUNTS).detach())


def test_gradients_of_transposed_weights(mesh: Any) -> None:
    """GPT-OSS stores [E, K, N]: a parameter that FSDP2 gathered in FP8 has its gradient, too."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4}
    whole = tiny("gpt_oss", **sizes)
    sharded = copy.deepcopy(whole)
    tokens = torch.randint(64, (2, 16))
    for model in (whole, sharded):
        convert(model, RECIPES["block"], weights="both")
    fully_shard(sharded.model.layers[0], mesh=mesh)
    for model in (whole, sharded):
        model(input_ids=tokens, labels=tokens).loss.backward()
    for (name, p), q in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        if "experts" in name:
            assert_same_bits(q.grad.full_tensor(), p.grad)
