# SPDX-License-Identifier: Apache-2.0
"""Two processes: FSDP2 gathers a frozen weight's bytes, distributed checkpoints hold it in FP8.

And delayed scaling, whose scales follow from what both processes saw.
E experts, T rows, K in_features, N out_features.
"""

from collections.abc import Callable
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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.profiler import profile

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    GroupedLinear,
    GroupedMLP,
    Lora,
    update_scales,
)
from grouped_linear.quantized.keep import local_part
from support.compare import assert_all_same_bits, assert_same_bits, assert_same_tensors, bits
from support.layers import linear_of
from support.processes import PROCESSES, Checks, on_cpu
from support.saved import saved_tensors
from support.tensors import BF16

E, T, K, N = 4, 40, 32, 144
SPLITS = ([10, 0, 20, 9], [0, 40, 0, 0], [1, 2, 3, 4])


class Model(nn.Module):
    def __init__(self, experts: int = E, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        kept: dict[str, Any] = {"recipe": Float8BlockScaling(), "dtype": BF16, "lora": Lora(8, 16)}
        kept["weights"] = "fp8"
        self.num_experts = experts
        self.experts = linear_of(experts, K, N, **(kept | options))
        self.plain = nn.Linear(N, 16, dtype=BF16)

    def forward(self, x: Tensor, m_splits: Tensor) -> Tensor:
        y: Tensor = self.plain(self.experts(x, m_splits))
        return y


def shard(model: nn.Module, **options: Any) -> None:
    """On the CPU, where what it is compared with is: left to itself FSDP2 moves to a GPU."""
    fully_shard(model, mesh=init_device_mesh("cpu", (PROCESSES,)), **options)


def train(model: nn.Module, call: Callable[..., Tensor]) -> list[Tensor]:
    """Outputs of a few steps, on the same data on every process."""
    learn = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learn, lr=1e-2) if learn else None
    generator = torch.Generator().manual_seed(1)
    outputs = []
    for m_splits in SPLITS:
        x = torch.randn(T, K, generator=generator).to(BF16).requires_grad_()
        y = call(x, torch.tensor(m_splits[: getattr(model, "num_experts", E)]))
        y.float().square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        outputs.append(y.detach())
    return outputs


def shard_of(weight: Tensor, rank: int) -> Tensor:
    parts = weight.detach().chunk(PROCESSES)
    return parts[rank] if rank < len(parts) else weight[:0]


FROZEN = "weight", "weight_scale_inv"


def assert_frozen_is_shard(sharded: Any, whole: Any, rank: int) -> None:
    for name in FROZEN:
        own: Any = sharded.experts.get_parameter(name)
        assert isinstance(own, DTensor)
        assert_same_bits(own.to_local(), shard_of(whole.experts.get_parameter(name), rank))


def check_training(experts: int, weights: str, rank: int, directory: Path) -> None:
    """Adapters beside frozen weights: sharded steps are those of one process."""
    whole, sharded = (Model(experts, weights=weights) for _ in range(2))
    shard(sharded)
    assert_frozen_is_shard(sharded, whole, rank)
    assert_all_same_bits(train(sharded, sharded), train(whole, whole))
    assert_frozen_is_shard(sharded, whole, rank)
    for part in "ab":
        name = f"weight_lora_{part}"
        own: Any = sharded.experts.get_parameter(name)
        assert_same_bits(own.to_local(), shard_of(whole.experts.get_parameter(name), rank))
    numbers: Any = sharded.experts.dequantize("weight")
    assert_same_bits(numbers.full_tensor(), whole.experts.dequantize("weight"))


def check_policy(rank: int, directory: Path) -> None:
    """Mixed precision casts what learns, and gathers the bytes as they are."""
    whole, sharded = Model(dtype=torch.float32), Model(dtype=torch.float32)
    for model in (whole, sharded):
        model.plain.float()
    shard(sharded, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    x, m_splits = torch.randn(T, K, generator=torch.Generator().manual_seed(2)), SPLITS[0]
    expected = whole.to(BF16)(x.to(BF16), torch.tensor(m_splits))
    assert_same_bits(sharded(x, torch.tensor(m_splits)), expected)


class Mlps(nn.Module):
    """Two layers, so that one's weights are sharded again while the other runs."""

    def __init__(self, recipe: Float8BlockScaling) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(GroupedMLP(E, K, N, recipe=recipe, dtype=BF16) for _ in "ab")

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        chosen = (torch.arange(T)[:, None] + torch.arange(2)) % E
        for layer in self.layers:
            x = x + layer(x, torch.full((T, 2), 0.5), chosen)
        return x


def check_nothing_kept_of_weights(rank: int, directory: Path) -> None:
    """Between forward and backward no layer has whole weights where the backward quantizes them."""
    held = {}
    for requantize in (False, True):
        recipe = Float8BlockScaling(requantize_weights=requantize)
        whole, sharded = Mlps(recipe), Mlps(recipe)
        mesh = init_device_mesh("cpu", (PROCESSES,))
        for layer in (*sharded.layers, sharded):
            fully_shard(layer, mesh=mesh)
        assert_all_same_bits(train(sharded, sharded), train(whole, whole))
        x = torch.randn(T, K, dtype=BF16)
        with saved_tensors() as saved:
            sharded(x, x)
        weights = [t for t in saved if t.dim() == 3 and t.size(2) in (K, N, 2 * N)]
        held[requantize] = sum(t.untyped_storage().nbytes() for t in weights)
    # Of the first layer gate_up_proj is not read again: x needs no gradient.
    assert held == {False: 4 * E * K * N, True: 0}


def check_replicas(rank: int, directory: Path) -> None:
    """Each process has all of it: what FSDP2 does with a shard of one."""
    whole, replicated = Model(), Model()
    mesh = init_device_mesh("cpu", (PROCESSES, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(replicated, mesh=mesh)
    assert_all_same_bits(train(replicated, replicated), train(whole, whole))


def check_bytes(rank: int, directory: Path) -> None:
    """What is gathered is one byte an element of the weight, and scales."""
    sharded = Model(lora=None)
    shard(sharded)
    x, m_splits = torch.zeros(T, K, dtype=BF16), torch.tensor(SPLITS[0])
    with profile(record_shapes=True) as recorded, torch.no_grad():
        sharded(x, m_splits)
    gathers = [e for e in recorded.events() if "all_gather" in e.name.lower() and e.input_shapes]
    sizes = [size[0] for e in gathers for size in e.input_shapes if len(size) == 1]
    others = sum(p.numel() for p in sharded.parameters() if p.is_floating_point())
    expected = E * N * K + E * 2 * 4 + 2 * others  # e4m3, scales and bf16
    assert expected in sizes, (expected, [(e.name, e.input_shapes) for e in gathers])


def load_into(model: nn.Module, checkpoint: Path) -> None:
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=checkpoint)
    set_model_state_dict(model, state)


def sharded_zeros(experts: int = E) -> Model:
    model = Model(experts)
    for p in model.parameters():
        nn.init.zeros_(p)
    shard(model)
    return model


def check_saved_by_one(experts: int, rank: int, directory: Path) -> None:
    """Loaded by two; also sharded without ever being whole."""
    whole, meta = Model(experts), Model(experts, device="meta")
    dcp.save(whole.state_dict(), checkpoint_id=directory)
    meta.plain.to("meta")
    shard(meta)
    meta.to_empty(device="cpu")
    for model in (sharded_zeros(experts), meta):
        load_into(model, directory)
        assert_frozen_is_shard(model, whole, rank)


def check_whole_states(rank: int, directory: Path) -> None:
    """Gathered in one place; sent from there in high precision, which each shard quantizes."""
    whole, sharded = Model(), Model()
    shard(sharded)
    state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    assert_same_tensors(state, whole.state_dict())
    state["experts.weight"] = whole.experts.dequantize("weight")  # gloo sends no float8
    del state["experts.weight_scale_inv"]
    restored, options = sharded_zeros(), StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(restored, state, options=options)
    assert_frozen_is_shard(restored, whole, rank)


RESETS: dict[str, dict[str, Any]] = {
    "packed": {},
    "weights_per_expert": {"single_grouped_weight": False},
    "quantized": {"recipe": Float8BlockScaling(), "weights": "fp8"},
    "init_method": {"init_method": lambda w: nn.init.constant_(w, K**-0.5 / 2)},
}


def check_reset(name: str, rank: int, directory: Path) -> None:
    """Parameters drawn where they are sharded."""
    bound = K**-0.5
    layer = linear_of(E, K, N, device="meta", **RESETS[name])
    shard(layer)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for p in layer.parameters():
            nn.init.constant_(p, torch.nan if p.is_floating_point() else 0)
    layer.reset_parameters()
    for name, p in layer.named_parameters():
        if name == "weight_scale_inv":
            continue
        whole = (p if p.is_floating_point() else layer.dequantize(name)).full_tensor()
        assert ((whole.abs() <= 1.1 * bound) & (whole != 0)).float().mean() > 0.9


def check_compiled(rank: int, directory: Path) -> None:
    model, twin = Model(), Model()
    for m in (model, twin):
        shard(m)
    compiled = torch.compile(model, backend="aot_eager")
    assert_all_same_bits(train(model, compiled), train(twin, twin))


def check_data_parallel(rank: int, directory: Path) -> None:
    """What wraps a model makes all processes equal to the first, to the byte."""
    models = [Model() for _ in range(2)]
    for model, source in zip(models, (rank, 0), strict=True):
        torch.manual_seed(source)
        model.experts.reset_parameters()
    model, twin = models
    parallel = nn.parallel.DistributedDataParallel(model)
    assert_all_same_bits(train(model, parallel), train(twin, twin))
    for name in FROZEN:
        assert_same_bits(model.experts.get_parameter(name), twin.experts.get_parameter(name))


class Delayed(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        recipe = DelayedScaling(amax_history_len=2)
        self.experts = linear_of(E, K, N, recipe=recipe, **options)

    def forward(self, x: Tensor, m_splits: Tensor, first: bool | None = None) -> Tensor:
        y: Tensor = self.experts(x, m_splits, first)
        return y


def micro_batches(step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Two, of magnitudes that differ from rank to rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    xs = torch.randn(2, T, K, generator=generator) * 10.0 ** (step + rank)
    return [(x, torch.tensor(m_splits)) for x, m_splits in zip(xs, SPLITS, strict=False)]


def check_delayed_scaling(rank: int, directory: Path) -> None:
    """Data parallel with a weight cache, as documented: one process that saw all data."""
    model, alone = Delayed(cache_weights=True), Delayed(cache_weights=True)
    parallel = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        first, last = micro_batches(step, rank)
        with parallel.no_sync():
            parallel(*first, True).square().mean().backward()
        parallel(*last, False).square().mean().backward()

        gradients = []
        for r in range(PROCESSES):
            for i, (x, m_splits) in enumerate(micro_batches(step, r)):
                alone(x, m_splits, i == 0).square().mean().backward()
            gradients.append([p.grad for p in alone.parameters()])
            alone.zero_grad()
        for p, *of_ranks in zip(alone.parameters(), *gradients, strict=True):
            p.grad = sum(of_ranks) / PROCESSES

        update_scales(parallel, group=dist.group.WORLD)
        update_scales(alone)
        for optimizer in optimizers:
            optimizer.step()
        for (name, a), (_, b) in zip(
            (*model.state_dict().items(), *model.named_buffers()),
            (*alone.state_dict().items(), *alone.named_buffers()),
            strict=True,
        ):
            assert torch.equal(bits(a), bits(b)), (step, name)
    assert (model.experts.weight_state.x.scale > 0).any()


def check_amaxes_of_both_processes(rank: int, directory: Path) -> None:
    layer = GroupedLinear(2, 16, 32, recipe=DelayedScaling(amax_history_len=3))
    state = layer.weight_state
    state.x.amax.copy_(torch.tensor([[1.0, 5.0], [3.0, torch.inf]])[rank])
    state.dy.amax.copy_(torch.tensor([[0.0, 0.0], [0.0, 7.0]])[rank])
    update_scales(layer, dist.group.WORLD)
    history = [operand.amax_history[0].tolist() for operand in state.operands]
    assert history == [[3.0, 0.0], [0.0, 0.0], [0.0, 7.0]]  # an infinity of one is one of all
    assert state.x.scale[0] > 0
    assert state.x.scale[1] == 0  # there is none yet: the next call takes the group's own


def check_broadcast_buffers_are_refused(rank: int, directory: Path) -> None:
    broadcasting = nn.parallel.DistributedDataParallel(Delayed())
    broadcasting(torch.ones(4, K), [1, 1, 1, 1]).sum().backward()
    with pytest.raises(RuntimeError, match="construct it with broadcast_buffers=False"):
        update_scales(broadcasting, group=dist.group.WORLD)
    update_scales(nn.parallel.DistributedDataParallel(Model()))  # has no amaxes to lose


def check_distributed_tensors_in_layers(rank: int, directory: Path) -> None:
    """One sentence, before anything is computed or sent."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    x, choice = torch.ones(E, K), torch.zeros(E, 1, dtype=torch.int64)
    distributed = distribute_tensor(x, mesh, [Replicate()])
    sizes = torch.ones(E, dtype=torch.int64)
    layers: list[Any] = [GroupedLinear(E, K, N, bias=False), GroupedMLP(E, K, N)]
    calls = [(sizes,), (torch.ones(E, 1), choice)]
    for layer, arguments in zip(layers, calls, strict=True):
        with pytest.raises(TypeError, match=r"x is a DTensor.*: pass its to_local"):
            layer(distributed, *arguments)
        distribute_module(layer, mesh, lambda name, module, mesh: None)
        for call in (layer, torch.compile(layer, backend="eager")):
            with pytest.raises(Exception, match=r"weight is a DTensor|gate_up_proj is a DTensor"):
                call(x, *arguments)
    # Also where another tensor is multiplied in its place.
    cached = linear_of(E, K, N, recipe=Float8BlockScaling(), cache_weights=True)
    cached(x, sizes, torch.tensor(True))
    cached.weight = nn.Parameter(distribute_tensor(cached.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(TypeError, match="weight is a DTensor"):
        cached(x, sizes, False)


def check_states_of_distributed_tensors(rank: int, directory: Path) -> None:
    """A weight in high precision is quantized where it lies: as the parameter, or not at all."""
    mesh, weight = init_device_mesh("cpu", (PROCESSES,)), torch.ones(E, N, K)
    sharded, whole = (linear_of(E, K, N, recipe=Float8BlockScaling(), weights="fp8") for _ in "ab")
    shard(sharded)
    for layer, w in ((whole, distribute_tensor(weight, mesh, [Shard(0)])), (sharded, weight)):
        before = [local_part(p).clone() for p in layer.parameters()]
        with pytest.raises(RuntimeError, match="is a DTensor where the parameter is none, or the"):
            layer.load_state_dict({"weight": w}, strict=False)
        assert_all_same_bits([local_part(p) for p in layer.parameters()], before)


def check_deferred_wgrad_of_shards_is_refused(rank: int, directory: Path) -> None:
    layer = linear_of(E, K, N, delay_wgrad_compute=True)
    shard(layer)
    layer(torch.ones(4, K), [1, 1, 1, 1]).sum().backward()
    with pytest.raises(RuntimeError, match="leave delay_wgrad_compute out"):
        layer.backward_dw()


CHECKS: Checks = {
    "training": partial(check_training, E, "fp8"),
    "training_of_three_experts": partial(check_training, 3, "fp8"),
    "training_mxfp4": partial(check_training, 3, "mxfp4"),
    "policy": check_policy,
    "nothing_kept_of_weights": check_nothing_kept_of_weights,
    "replicas": check_replicas,
    "bytes": check_bytes,
    "saved_by_one": partial(check_saved_by_one, E),
    "saved_by_one_of_three_experts": partial(check_saved_by_one, 3),
    "whole_states": check_whole_states,
    **{f"reset_{name}": partial(check_reset, name) for name in RESETS},
    "compiled": check_compiled,
    "data_parallel": check_data_parallel,
    "delayed_scaling": check_delayed_scaling,
    "amaxes_of_both_processes": check_amaxes_of_both_processes,
    "broadcast_buffers": check_broadcast_buffers_are_refused,
    "distributed_tensors_in_layers": check_distributed_tensors_in_layers,
    "states_of_distributed_tensors": check_states_of_distributed_tensors,
    "deferred_wgrad": check_deferred_wgrad_of_shards_is_refused,
}

test_two_processes = on_cpu(CHECKS)
