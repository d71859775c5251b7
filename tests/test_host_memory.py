# SPDX-License-Identifier: Apache-2.0
"""Frozen experts in the host's memory compute what they compute on the device, bit for bit.

On a CPU the copies that layers compute with are other memory there.
"""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from grouped_linear import Float8BlockScaling, GroupedMLP, Lora, convert
from support.compare import assert_all_same_bits, assert_same_bits, outcome
from support.devices import HERE
from support.documents import example
from support.hugging_face import tiny
from support.layers import with_numbers_in_adapters
from support.processes import one_process
from support.tensors import BF16
from support.versions import FSDP_TAKES_BYTES

host_memory = example("host_memory")
IDS = torch.arange(24).reshape(2, 12)
FROZEN = {"qwen3_moe": "fp8", "gpt_oss": "mxfp4"}
LAYERS = 3


def model_of(family: str, device: str) -> Any:
    """Three layers, checkpointed, whose attention learns."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": LAYERS, "hidden_size": 64, "attention_dropout": 0}
    if family == "gpt_oss":
        sizes |= {"layer_types": None, "intermediate_size": 96}
    model = tiny(family, **sizes).to(device, BF16)
    convert(model, Float8BlockScaling(), weights=FROZEN[family])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def blocks_of(model: Any) -> list[nn.Module]:
    return [layer.mlp for layer in model.model.layers]


def by_hooks(model: Any, device: str) -> None:
    host_memory.keep_on_host(blocks_of(model), torch.device(device))


def by_fsdp2(model: Any, device: str) -> None:
    for layer in model.model.layers:
        others = {p for p in layer.parameters() if p.dtype != torch.uint8}
        fully_shard(
            layer,
            mesh=init_device_mesh(device, (1,)),
            ignored_params=others,
            reshard_after_forward=True,
            offload_policy=CPUOffloadPolicy(pin_memory=device == "cuda"),
        )


@pytest.fixture
def group(device: str) -> Iterator[None]:
    with one_process("nccl" if device == "cuda" else "gloo"):
        yield


def train(model: Any, device: str) -> list[Tensor]:
    """The losses of two steps, and what was learnt."""
    learn = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learn, lr=0.1)
    losses = []
    for ids in (IDS, IDS.flip(1)):
        loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *learn]


def frozen_of(model: nn.Module) -> list[Tensor]:
    return [p.data for *_, p in host_memory.frozen_bytes(model)]


def places(module: nn.Module) -> list[int]:
    return [t.data_ptr() for t in frozen_of(module)]


class Forbidden(TorchDispatchMode):
    """Raises where an op of the library, in a backward, too, reads memory of the host."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.host = {*places(module)}
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "grouped_linear":
            tensors = [t for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)]
            assert self.host.isdisjoint(t.data_ptr() for t in tensors), func
            self.calls += 1
        return func(*args, **(kwargs or {}))


def compile_blocks(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.compile()
        layer.mlp.forward = torch.compile(layer.mlp.forward)


@pytest.mark.parametrize("device", HERE)
@pytest.mark.parametrize("family", FROZEN)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_model(family: str, device: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, learnt weights and logits. Each time that a block computes, one copy is made."""
    plain, kept = model_of(family, device), model_of(family, device)
    state = {name: t.cpu() for name, t in kept.state_dict().items()}
    if compiled:
        compile_blocks(plain)
        compile_blocks(kept)
    by_hooks(kept, device)
    before = places(kept)
    enter, copies = torch.cuda.stream, []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: copies.append(0) or enter(stream))

    for name, t in kept.state_dict().items():
        assert t.device.type == "cpu" or t.dtype != torch.uint8
        assert_same_bits(t.cpu(), state[name])
    expected = train(plain, device)
    with nullcontext() if compiled else Forbidden(kept) as mode:
        assert_all_same_bits(train(kept, device), expected)
    assert len(copies) == 2 * 2 * LAYERS
    assert mode is None or mode.calls > len(copies)
    with torch.no_grad():
        ids = IDS.to(device)
        assert_same_bits(kept.eval()(ids).logits, plain.eval()(ids).logits)
    assert places(kept) == before


@pytest.mark.skipif(not FSDP_TAKES_BYTES, reason="FSDP2 takes integers from torch 2.13 on")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("device", HERE)
@pytest.mark.parametrize("family", FROZEN)
def test_fsdp2(family: str, device: str) -> None:
    """What torch has for the same."""
    plain, kept = model_of(family, device), model_of(family, device)
    state = {name: t.cpu() for name, t in kept.state_dict().items() if t.dtype == torch.uint8}
    by_fsdp2(kept, device)
    assert_all_same_bits(train(kept, device), train(plain, device))
    for name, expected in state.items():
        got: Any = kept.state_dict()[name]
        assert got.device.type == "cpu"
        assert_same_bits(got.full_tensor(), expected)


def test_compiled_module() -> None:
    block = GroupedMLP(4, 64, 32, weights="mxfp4")
    block.compile()
    with pytest.raises(ValueError, match="block 0: compile its forward, not the module"):
        host_memory.keep_on_host([block], torch.device("cpu"))


class Stack(nn.Module):
    """Layers of this package, with adapters on the device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"weights": "mxfp4", "lora": Lora(rank=4), "device": device}
        self.layers = nn.ModuleList(GroupedMLP(4, 64, 32, **options) for _ in range(LAYERS))
        with_numbers_in_adapters(self)

    def forward(self, x: Tensor, fails: str | None = None) -> Tensor:
        scores = x[:, :4].softmax(-1).topk(2)
        for i, layer in enumerate(self.layers):
            x = x + checkpoint(layer, x, *scores, use_reentrant=False)
            if fails == "forward" and i == 0:
                raise KeyboardInterrupt
            if fails == "backward" and i == 0:
                x.register_hook(interrupt)
        return x


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    return outcome(model(x), [x, *(p for p in model.parameters() if p.requires_grad)])


def interrupt(_: Tensor) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("device", HERE)
@pytest.mark.parametrize("fails", ["forward", "backward", None])
def test_new_bytes(device: str, fails: str | None) -> None:
    """No copy outlives a pass: after one that was interrupted, too, new bytes count."""
    model, other = Stack(device), Stack(device)
    for bits in frozen_of(other):
        bits.random_(119, 122)
    host_memory.keep_on_host(model.layers, torch.device(device))
    before = places(model)
    x = torch.randn(20, 64, device=device, requires_grad=True)
    try:
        model(x, fails).square().sum().backward()
    except KeyboardInterrupt:
        assert fails
    model.zero_grad()
    assert places(model) == before
    model.load_state_dict(other.state_dict())

    expected = outputs(other, x)
    with Forbidden(model):
        assert_all_same_bits(outputs(model, x), expected)


@pytest.mark.parametrize("device", HERE)
def test_without_gradients(device: str) -> None:
    """Under inference_mode, and training afterwards."""
    model = Stack(device)
    plain = copy.deepcopy(model)
    host_memory.keep_on_host(model.layers, torch.device(device))
    x = torch.randn(20, 64, device=device, requires_grad=True)
    with torch.inference_mode():
        assert_same_bits(model(x), plain(x))
    assert_all_same_bits(outputs(model, x), outputs(plain, x))
