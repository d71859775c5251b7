"""Two processes: FSDP2 gathers a quantized weight in FP8, distributed checkpoints hold it.

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
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.profiler import profile

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    GroupedLinear,
    GroupedMLP,
    GroupedTensor,
    Lora,
    update_scales,
)
from support.compare import assert_same, assert_same_bits, bits
from support.layers import linear_of
from support.processes import PROCESSES, Checks, Passes
from support.tensors import BF16

E, T, K, N = 4, 40, 32, 144
SPLITS = ([10, 0, 20, 9], [0, 40, 0, 0], [1, 2, 3, 4])


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        kept: dict[str, Any] = {"recipe": Float8BlockScaling(), "dtype": BF16}
        self.experts = linear_of(E, K, N, weights="fp8", **(kept | options))
        self.plain = nn.Linear(N, 16, dtype=BF16)

    def forward(self, x: Tensor, m_splits: Tensor) -> Tensor:
        y: Tensor = self.plain(self.experts(x, m_splits))
        return y


def shard(model: nn.Module) -> None:
    """On the CPU, where what it is compared with is: left to itself FSDP2 moves to a GPU."""
    fully_shard(model, mesh=init_device_mesh("cpu", (PROCESSES,)))


def train(model: nn.Module, call: Callable[..., Tensor]) -> list[Tensor]:
    """Outputs of a few steps, on the same data on every process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    generator = torch.Generator().manual_seed(1)
    outputs = []
    for m_splits in SPLITS:
        x = torch.randn(T, K, generator=generator).to(BF16)
        y = call(x, torch.tensor(m_splits))
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(y.detach())
    return outputs


def shard_of(weight: Tensor, rank: int) -> Tensor:
    return weight.detach().chunk(PROCESSES)[rank]


def trained() -> tuple[Model, Model]:
    """The whole model and its twin that is sharded, after the same steps."""
    whole, sharded = Model(), Model()
    shard(sharded)
    train(whole, whole)
    train(sharded, sharded)
    return whole, sharded


def check_training(rank: int, directory: Path) -> None:
    """Sharded steps are those of one process."""
    whole, sharded = Model(), Model()
    shard(sharded)
    local = sharded.experts.weight.to_local()
    assert_same(local, shard_of(whole.experts.weight, rank))
    assert local.q_t is None  # a shard is not multiplied with
    for a, b in zip(train(sharded, sharded), train(whole, whole), strict=True):
        assert_same_bits(a, b)
    assert isinstance(sharded.experts.weight, DTensor)
    assert_same(sharded.experts.weight.to_local(), shard_of(whole.experts.weight, rank))
    # To look at all of it is to see numbers, in high precision.
    assert_same_bits(sharded.experts.weight.full_tensor(), whole.experts.weight.dequantize())


def check_adapters(rank: int, directory: Path) -> None:
    """Beside frozen weights in FP8 the shards of adapters learn as whole ones."""
    options: dict[str, Any] = {"lora": Lora(8, 16), "stochastic_rounding": False}
    whole, sharded = Model(**options), Model(**options)
    shard(sharded)
    for a, b in zip(train(sharded, sharded), train(whole, whole), strict=True):
        assert_same_bits(a, b)
    for part in "ab":
        own: Any = sharded.experts.get_parameter(f"weight_lora_{part}")
        assert_same_bits(
            own.to_local(), shard_of(whole.experts.get_parameter(f"weight_lora_{part}"), rank)
        )
    for model in (whole, sharded):
        model.experts.merge_lora()
    weight: Any = sharded.experts.weight
    assert_same(weight.to_local(), shard_of(whole.experts.weight, rank))
    assert not sharded.experts.weight_lora_b.full_tensor().any()


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
        for a, b in zip(train(sharded, sharded), train(whole, whole), strict=True):
            assert_same_bits(a, b)
        saved: list[Tensor] = []
        x = torch.randn(T, K, dtype=BF16)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(t) or t,  # noqa: B023
            lambda t: t,
        ):
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
    for a, b in zip(train(replicated, replicated), train(whole, whole), strict=True):
        assert_same_bits(a, b)


def check_bytes(rank: int, directory: Path) -> None:
    """What is gathered is one byte an element of the weight, and scales."""
    sharded = Model()
    shard(sharded)
    x, m_splits = torch.zeros(T, K, dtype=BF16), torch.tensor(SPLITS[0])
    with profile(record_shapes=True) as recorded, torch.no_grad():
        sharded(x, m_splits)
    gathers = [e for e in recorded.events() if "all_gather" in e.name.lower() and e.input_shapes]
    sizes = [size[0] for e in gathers for size in e.input_shapes if len(size) == 1]
    others = sum(p.numel() for p in sharded.parameters()) - E * N * K
    expected = E * N * K + E * 2 * 4 + 2 * others  # e4m3, scales and bf16
    assert expected in sizes, (expected, [(e.name, e.input_shapes) for e in gathers])


def load_into(model: nn.Module, checkpoint: Path) -> None:
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=checkpoint)
    set_model_state_dict(model, state)


def sharded_zeros() -> Model:
    model = Model(init_method=nn.init.zeros_)
    shard(model)
    return model


def check_saved_by_two_loaded_by_two(rank: int, directory: Path) -> None:
    _, sharded = trained()
    dcp.save(get_model_state_dict(sharded), checkpoint_id=directory)
    restored = sharded_zeros()
    load_into(restored, directory)
    assert_same(restored.experts.weight.to_local(), sharded.experts.weight.to_local())


def check_saved_in_the_background(rank: int, directory: Path) -> None:
    _, sharded = trained()
    saving: Any = dcp.async_save(get_model_state_dict(sharded), checkpoint_id=directory)
    getattr(saving, "upload_completion", saving).result()
    restored = sharded_zeros()
    load_into(restored, directory)
    assert_same(restored.experts.weight.to_local(), sharded.experts.weight.to_local())


def check_saved_by_two_loaded_by_one(rank: int, directory: Path) -> None:
    whole, sharded = trained()
    dcp.save(get_model_state_dict(sharded), checkpoint_id=directory)
    alone = Model(init_method=nn.init.zeros_)
    state = alone.state_dict()
    dcp.load(state, checkpoint_id=directory)
    alone.load_state_dict(state)
    assert_same(alone.experts.weight.detach(), whole.experts.weight.detach())


def check_saved_by_one_loaded_by_two(rank: int, directory: Path) -> None:
    whole, _ = trained()
    dcp.save(whole.state_dict(), checkpoint_id=directory)
    restored = sharded_zeros()
    load_into(restored, directory)
    assert_same(restored.experts.weight.to_local(), shard_of(whole.experts.weight, rank))


def check_meta(rank: int, directory: Path) -> None:
    """Sharded without ever being whole, then loaded."""
    whole, _ = trained()
    dcp.save(whole.state_dict(), checkpoint_id=directory)
    model = Model(device="meta")
    model.plain.to("meta")
    shard(model)
    model.to_empty(device="cpu")
    load_into(model, directory)
    assert_same(model.experts.weight.to_local(), shard_of(whole.experts.weight, rank))


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
            nn.init.constant_(p, torch.nan)
    layer.reset_parameters()
    for p in layer.parameters():
        whole = p.full_tensor()
        assert ((whole.abs() <= 1.1 * bound) & (whole != 0)).float().mean() > 0.9


def check_compiled(rank: int, directory: Path) -> None:
    model, twin = Model(), Model()
    for m in (model, twin):
        shard(m)
    compiled = torch.compile(model, backend="aot_eager")
    for a, b in zip(train(model, compiled), train(twin, twin), strict=True):
        assert_same_bits(a, b)
    assert_same(model.experts.weight.to_local(), twin.experts.weight.to_local())


def check_data_parallel(rank: int, directory: Path) -> None:
    model, twin = Model(), Model()
    parallel = nn.parallel.DistributedDataParallel(model)
    for a, b in zip(train(model, parallel), train(twin, twin), strict=True):
        assert_same_bits(a, b)
    assert_same(model.experts.weight.detach(), twin.experts.weight.detach())


def check_mlp(rank: int, directory: Path) -> None:
    """Both parameters of a GroupedMLP."""

    def make() -> GroupedMLP:
        torch.manual_seed(0)
        return GroupedMLP(E, K, N, recipe=Float8BlockScaling(), dtype=BF16, weights="fp8")

    def call(mlp: GroupedMLP) -> Callable[..., Tensor]:
        token = torch.arange(T)
        experts, scores = torch.stack([token % E, token // 7 % 3], dim=1), torch.full((T, 2), 0.5)
        return lambda x, _: mlp(x, scores, experts)

    whole, sharded = make(), make()
    shard(sharded)
    for a, b in zip(train(sharded, call(sharded)), train(whole, call(whole)), strict=True):
        assert_same_bits(a, b)
    for p, of_whole in zip(sharded.parameters(), whole.parameters(), strict=True):
        assert isinstance(p, DTensor)
        assert_same(p.to_local(), shard_of(of_whole, rank))


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


def check_uneven_shards_are_refused(rank: int, directory: Path) -> None:
    uneven = GroupedLinear(3, K, N, recipe=Float8BlockScaling(), weights="fp8")
    shard(uneven)
    with pytest.raises(ValueError, match="as many experts on every process, got 3 for 2 processes"):
        uneven(torch.ones(3, K), [1, 1, 1])


def published(seed: int, dtype: torch.dtype) -> GroupedTensor:
    """Scales that are no powers of two: quantizing the numbers anew would change the bytes."""
    torch.manual_seed(seed)
    recipe = Float8BlockScaling(power_of_two_scales=False)
    return GroupedTensor.quantize(torch.randn(E, N, K).to(dtype), recipe)


class Weights(nn.Module):
    def __init__(self, seed: int, names: str, dtype: torch.dtype) -> None:
        super().__init__()
        for i, name in enumerate(names):
            self.register_parameter(name, nn.Parameter(published(10 * seed + i, dtype)))
        self.register_buffer("plain", torch.full((3,), float(seed)))


def check_data_parallel_sends_bytes(rank: int, directory: Path) -> None:
    """What wraps a model makes all processes equal to the first, to the byte."""
    for names in ("a", "ab"):  # alone and together in what is sent
        for dtype in (torch.float32, BF16):
            model, first = Weights(1 + rank, names, dtype), Weights(1, names, dtype)
            for p in model.parameters():
                p.untouched = p.detach()
            nn.parallel.DistributedDataParallel(model)
            for p, of_first in zip(model.parameters(), first.parameters(), strict=True):
                assert_same(p.detach(), of_first.detach())
                assert_same(p.untouched, of_first.detach())  # in the same memory
            assert model.plain[0] == 1


def check_frozen_weights_are_sent(rank: int, directory: Path) -> None:
    """A frozen weight in FP8 beside adapters, in one dtype: sent together, then trained."""
    models = [Model(lora=Lora(8, 16)) for _ in range(2)]
    for model, source in zip(models, (rank, 0), strict=True):
        torch.manual_seed(source)
        with torch.no_grad():
            model.experts.weight.copy_(published(source, BF16))
            for p in model.parameters():
                if p.requires_grad:
                    p.normal_()
    model, twin = models
    parallel = nn.parallel.DistributedDataParallel(model)
    for a, b in zip(train(model, parallel), train(twin, twin), strict=True):
        assert_same_bits(a, b)
    assert_same(model.experts.weight.detach(), published(0, BF16))


def check_broadcast(rank: int, directory: Path) -> None:
    weight = published(rank, BF16)
    dist.broadcast(weight, src=1)
    assert_same(weight, published(1, BF16))
    version = weight.q._version
    dist.broadcast(weight, src=0)
    assert weight.q._version > version  # a forward that saved it must raise
    with pytest.raises(NotImplementedError, match="would not reach a quantized tensor"):
        dist.all_reduce(weight)


def check_distributed_tensors(rank: int, directory: Path) -> None:
    """The parts of one process's weight, to the byte; its experts need not divide evenly."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for experts in (E, 3, 1):
        for source in (0, 1, None):
            whole = published(rank, BF16)[:experts]
            own: Any = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=source)
            sent = published(rank if source is None else source, BF16)[:experts]
            assert_same(own.to_local(), [*sent.chunk(PROCESSES), sent[:0]][rank])
    copied = distribute_tensor(published(rank, BF16), mesh, [Replicate()])
    assert_same(copied.to_local(), published(0, BF16))
    by_columns = distribute_tensor(published(rank, BF16), mesh, [Shard(1)])  # cuts through blocks
    assert_same_bits(by_columns.full_tensor(), published(0, BF16).dequantize())


def check_scatter(rank: int, directory: Path) -> None:
    """The bytes of quantized tensors; numbers are quantized where they are sent."""
    sent = [published(1, BF16), published(2, BF16).dequantize()]
    received = published(3, BF16)
    version = received.q._version
    dist.scatter(received, None if rank else sent)
    assert_same(received, sent[0] if rank == 0 else received.clone().copy_(sent[1]))
    assert received.q._version > version  # a forward that saved it must raise


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


def check_deferred_wgrad_of_shards_is_refused(rank: int, directory: Path) -> None:
    layer = linear_of(E, K, N, delay_wgrad_compute=True)
    shard(layer)
    layer(torch.ones(4, K), [1, 1, 1, 1]).sum().backward()
    with pytest.raises(RuntimeError, match="leave delay_wgrad_compute out"):
        layer.backward_dw()


CHECKS: Checks = {
    "training": check_training,
    "nothing_kept_of_weights": check_nothing_kept_of_weights,
    "replicas": check_replicas,
    "adapters": check_adapters,
    "bytes": check_bytes,
    "saved_by_two_loaded_by_two": check_saved_by_two_loaded_by_two,
    "saved_in_the_background": check_saved_in_the_background,
    "saved_by_two_loaded_by_one": check_saved_by_two_loaded_by_one,
    "saved_by_one_loaded_by_two": check_saved_by_one_loaded_by_two,
    "meta": check_meta,
    **{f"reset_{name}": partial(check_reset, name) for name in RESETS},
    "compiled": check_compiled,
    "data_parallel": check_data_parallel,
    "mlp": check_mlp,
    "delayed_scaling": check_delayed_scaling,
    "amaxes_of_both_processes": check_amaxes_of_both_processes,
    "broadcast_buffers": check_broadcast_buffers_are_refused,
    "uneven_shards": check_uneven_shards_are_refused,
    "data_parallel_sends_bytes": check_data_parallel_sends_bytes,
    "frozen_weights_are_sent": check_frozen_weights_are_sent,
    "broadcast": check_broadcast,
    "scatter": check_scatter,
    "distributed_tensors": check_distributed_tensors,
    "distributed_tensors_in_layers": check_distributed_tensors_in_layers,
    "deferred_wgrad": check_deferred_wgrad_of_shards_is_refused,
}


@pytest.mark.parametrize("check", CHECKS)
def test_two_processes(check: str, passes: Passes) -> None:
    passes(check)
