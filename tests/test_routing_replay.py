# SPDX-License-Identifier: Apache-2.0
"""Routing replay: the experts that a model chose are recorded, and another call takes them.

B sequences, S tokens of each, L layers with experts, C experts chosen for a token, E experts.
"""

import importlib
import inspect
import pickle
import re
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointError

from grouped_linear import (
    Float8BlockScaling,
    GroupedMLP,
    convert,
    record_routing,
    replay_routing,
)
from support.compare import assert_same_tensors
from support.devices import DEVICES, needs_gpu
from support.errors import sentence
from support.hugging_face import FAMILIES, AnyConfig, model_of, tiny, tokens
from support.tensors import BF16
from support.versions import skipping_for_old_transformers

with skipping_for_old_transformers():
    import grouped_linear.integrations.transformers  # noqa: F401

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
B, S, C, E = 2, 7, 2, 5


def converted(family: str, device: str = "cpu", **options: Any) -> Any:
    torch.manual_seed(0)
    model = model_of(family, device)
    convert(model, **options)
    return model


def random_experts(device: str = "cpu", layers: int = 1, tokens: int = S) -> Tensor:
    """[B, S, L, C], no expert twice for a token."""
    scores = torch.rand(B, tokens, layers, E, device=device)
    return scores.topk(C).indices.to(torch.uint8)


def step(model: nn.Module, call: Any, ids: Tensor) -> dict[str, Tensor]:
    """Logits and gradients."""
    model.zero_grad()
    logits = call(input_ids=ids)[0]
    logits.float().square().mean().backward()
    return {"": logits.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@DEVICES
@EVERY_FAMILY
def test_own_choices_again_change_no_bit(family: str, device: str) -> None:
    model, ids = converted(family, device), tokens(device, B, S)
    with record_routing(model, B, S) as recording:
        expected = step(model, model, ids)
    assert recording.routing.experts.shape == (B, S, 1, C)
    with replay_routing(model, recording.routing):
        assert_same_tensors(step(model, model, ids), expected)
    assert_same_tensors(step(model, model, ids), expected)  # nothing of the contexts is left


@DEVICES
@EVERY_FAMILY
def test_other_choices_are_taken_and_reach_the_router(family: str, device: str) -> None:
    model, ids, experts = converted(family, device), tokens(device, B, S), random_experts(device)
    with replay_routing(model, experts), record_routing(model, B, S, weights=True) as recording:
        found = step(model, model, ids)
    own, routing = step(model, model, ids), recording.routing
    assert torch.equal(routing.experts, experts)
    assert routing.weights is not None
    assert routing.weights.shape == experts.shape
    assert not torch.equal(found[""], own[""])
    routers = [n for n in found if re.search(r"(gate|router)\.(\w+\.)?weight$", n)]
    assert routers
    assert all(found[name].any() for name in routers)


class RouterConfig(AnyConfig):
    """Sizes for whatever a router asks of its model's configuration: 2 groups of 3 experts."""

    SIZES = (
        (r"factor|scal", 1.5),
        (r"_fn$|scor.*func", "sigmoid"),
        (r"topk_method", "group_limited_greedy"),
        (r"norm_min", 1e-12),
        (r"use_expert_bias", False),
        (r"group", 2),
        (r"shared", 1),
        (r"num_.*experts$|^n_.*experts$|expert_num", 6),
        *AnyConfig.SIZES,
    )


class Block(nn.Module):
    """A router beside experts, as models have them."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = router, nn.Module()
        experts: Any = self.experts
        experts.config, experts.num_experts, experts.is_concatenated = RouterConfig(), 6, True


# Their experts follow from something else than the largest scores.
OTHER_ROUTERS = {"DeepseekV4HashRouter", "PhimoeTopKRouter", "ZayaRouter"}


def every_router() -> Iterator[Any]:
    """Module and name of each router of a model with the experts interface."""
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if "\n@use_experts_implementation" not in (text := file.read_text()):
            continue
        module = f"transformers.models.{file.parent.name}.{file.stem}"
        for name in re.findall(r"^class (\w*(?:Router|MoEV1Gate))\(", text, re.MULTILINE):
            if name not in OTHER_ROUTERS:
                yield pytest.param(module, name, id=name)


@pytest.mark.parametrize(("module", "name"), list(every_router()))
def test_every_router_of_the_library(module: str, name: str) -> None:
    cls = getattr(importlib.import_module(module), name)
    router = cls(RouterConfig())
    for p in router.parameters():
        nn.init.normal_(p, std=0.3)
    block, x = Block(router), torch.randn(1, 10, 32)
    needed = [*inspect.signature(cls.forward).parameters.values()][2:]
    biases = [
        torch.zeros(6) for p in needed if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    ]
    if "hidden_states.view(" not in inspect.getsource(cls.forward):
        x = x[0]

    with record_routing(block, 1, 10) as recording:
        own = router(x, *biases)
    with replay_routing(block, recording.routing):
        again = router(x, *biases)
    for i in range(3):
        assert torch.equal(again[i], own[i])

    experts_TC = torch.stack([torch.randperm(6)[:2] for _ in range(10)])
    with replay_routing(block, experts_TC[None, :, None]):
        _, weights_TC, taken_TC, *_ = router(x, *biases)
    assert torch.equal(taken_TC, experts_TC)
    # Where both chose the same experts they have the same weights, whatever the family's formula.
    both, other = own[2].sort().values, experts_TC.sort().values
    same_T = (both == other).all(dim=1)
    order = own[1].gather(1, own[2].argsort()), weights_TC.gather(1, experts_TC.argsort())
    torch.testing.assert_close(order[1][same_T], order[0][same_T])
    learning = [p for n, p in router.named_parameters() if p.requires_grad and p.dim() > 1]
    gradients = torch.autograd.grad(weights_TC.square().sum(), learning, allow_unused=True)
    assert any(g is not None and g.any() for g in gradients)


@DEVICES
@pytest.mark.parametrize(
    "family", ["deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.nightly)]
)
def test_compiled_in_one_graph(family: str, device: str) -> None:
    """The same graph takes any routing: nothing of it is a constant, no context compiles again."""
    model, ids = converted(family, device), tokens(device, B, S)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)

    def assert_as_eager() -> None:
        found, expected = (step(model, call, ids) for call in (compiled, model))
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)

    for _ in range(2):
        experts = random_experts(device)
        with replay_routing(model, experts), record_routing(model, B, S) as recording:
            step(model, compiled, ids)
            assert torch.equal(recording.routing.experts, experts)
            assert_as_eager()
        assert_as_eager()  # with choices of its own
    assert backend.frame_count == 2


@DEVICES
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_generates(family: str, cache: str | None, device: str) -> None:
    """Prefill and steps are recorded one after the other, and are what one forward replays."""
    model, prompt = converted(family, device).eval(), tokens(device, B, 5)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    options |= {} if cache is None else {"cache_implementation": cache}
    with record_routing(model, B, 16) as recording:
        ids = model.generate(prompt, **options)
    routing = recording.routing
    assert routing.experts.shape == (B, 10, 1, C)  # the last token is never computed
    with torch.no_grad(), record_routing(model, B, 10) as at_once:
        logits = model(ids[:, :-1]).logits
    agree = (at_once.routing.experts == routing.experts).float().mean()
    assert agree > 0.9  # attention's sums have another order
    with replay_routing(model, routing), record_routing(model, B, 10) as replayed:
        assert torch.equal(model.generate(prompt, **options), ids)
    assert torch.equal(replayed.routing.experts, routing.experts)

    other = random_experts(device, tokens=10)
    with replay_routing(model, other), record_routing(model, B, 10) as recording:
        for _ in range(2):  # the second from the first token on again
            model.generate(prompt, **options)
            assert torch.equal(recording.routing.experts, other)
    with torch.no_grad(), replay_routing(model, other):
        assert not torch.equal(model(ids[:, :-1]).logits, logits)


@DEVICES
def test_generates_compiled(device: str) -> None:
    model, prompt = converted("qwen3_moe", device).eval(), tokens(device, B, 5)
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    backend = CompileCounterWithBackend("aot_eager")
    model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
    for _ in range(2):
        other = random_experts(device, tokens=10)
        with replay_routing(model, other), record_routing(model, B, 10) as recording:
            model.generate(prompt, **options)
        assert torch.equal(recording.routing.experts, other)
    assert backend.frame_count == 2  # prefill and step, each once


@needs_gpu
def test_cuda_graph() -> None:
    """One graph records and replays whatever its buffers hold."""
    model, ids = converted("qwen3_moe", "cuda").eval(), tokens("cuda", B, S)
    with torch.no_grad(), record_routing(model, B, S) as recording:
        for _ in range(2):
            model(ids)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(ids)
        with torch.cuda.graph(graph, stream=stream):
            model(ids)
        for _ in range(3):
            ids.copy_(tokens("cuda", B, S))
            graph.replay()
            found = recording.routing.experts.clone()
            model(ids)
            assert torch.equal(found, recording.routing.experts)


@DEVICES
def test_activation_checkpointing(device: str) -> None:
    """A recompute takes the same experts; one outside of the context is an error, no other result.

    The forward with a replay saves one tensor more than the one without.
    """
    ids, experts = tokens(device, B, S), random_experts(device)
    model = converted("qwen3_moe", device).train()
    with replay_routing(model, experts):
        expected = step(model, model, ids)
    model.activation_checkpointing_enable()
    with replay_routing(model, experts), record_routing(model, B, S) as recording:
        assert_same_tensors(step(model, model, ids), expected)
    assert torch.equal(recording.routing.experts, experts)
    with replay_routing(model, experts):
        loss = model(ids).logits.square().mean()
    with pytest.raises(CheckpointError, match="different number of tensors"):
        loss.backward()


def test_two_forwards_before_their_backward() -> None:
    """The recording is of the last forward, and not of the one that is computed again last."""
    model = converted("qwen3_moe").train()
    model.activation_checkpointing_enable()
    first, last = tokens("cpu", 2, B, S)
    with torch.no_grad(), record_routing(model, B, S) as recording:
        model(last)
        expected = recording.routing.experts
    with record_routing(model, B, S) as recording:
        losses = [model(ids).logits.square().mean() for ids in (first, last)]
        sum(losses).backward()
    assert torch.equal(recording.routing.experts, expected)


@pytest.mark.parametrize(
    ("wrap", "place"),
    [
        *((checkpoint_wrapper, p) for p in ("router", "experts", "block", "layer", "model")),
        *((partial(torch.compile, backend="eager"), p) for p in ("router", "model")),
    ],
)
def test_wrapped_modules(wrap: Any, place: str) -> None:
    model, ids, experts = converted("mixtral"), tokens("cpu", B, S), random_experts()
    layer = model.model.layers[0]
    with replay_routing(model, experts):
        expected = step(model, model, ids)
    if place == "router":
        layer.mlp.gate = wrap(layer.mlp.gate)
    elif place == "experts":
        layer.mlp.experts = wrap(layer.mlp.experts)
    elif place == "block":
        layer.mlp = wrap(layer.mlp)
    elif place == "layer":
        model.model.layers[0] = wrap(layer)
    else:
        model = wrap(model)
    with replay_routing(model, experts), record_routing(model, B, S) as recording:
        found = step(model, model, ids)
    assert torch.equal(recording.routing.experts, experts)
    for t, right in zip(found.values(), expected.values(), strict=True):
        assert torch.equal(t, right)


def test_padding_of_a_sampler() -> None:
    """Where all experts of a token are -1 its router chooses; other tokens take their choices."""
    model, ids = converted("deepseek_v3"), tokens("cpu", B, S)
    with torch.no_grad(), record_routing(model, B, S) as recording:
        model(ids)
    chosen, experts = recording.routing.experts.int(), random_experts().int()
    experts[1, 4:] = -1
    chosen[:, :4], chosen[0] = experts[:, :4], experts[0]
    with replay_routing(model, experts), record_routing(model, B, S) as recording:
        step(model, model, ids)
    taken = recording.routing.experts.int()
    assert torch.equal(taken[experts >= 0], experts[experts >= 0])
    assert torch.equal(taken[1, 4:], chosen[1, 4:])


def test_one_replay_at_a_time() -> None:
    model, experts = converted("mixtral"), random_experts()
    gate = model.model.layers[0].mlp.gate
    with replay_routing(model, experts), record_routing(model, B, S):
        before = gate.forward
        assert sentence(replay_routing(model, experts).__enter__) == (
            "replay_routing: model.layers.0.mlp replays a routing already: leave that context first"
        )
        assert gate.forward == before
        for copied in (deepcopy, pickle.dumps):
            assert sentence(lambda copied=copied: copied(model)).endswith(
                "routing: a copy or a pickle of the model would go on with this context: make it "
                "outside"
            )
    deepcopy(model)


def test_generation_that_takes_tokens_back() -> None:
    """Beams exchange sequences, guessed tokens are taken back, no cache has them come again."""
    model, prompt = converted("mixtral").eval(), tokens("cpu", B, 5)
    other = deepcopy(model)
    modes: dict[str, dict[str, Any]] = {
        "beam_search": {"num_beams": 2},
        "beam_sample": {"num_beams": 2, "do_sample": True},
        "assisted_generation": {"prompt_lookup_num_tokens": 2},
        "custom_generate": {"custom_generate": lambda *_, **__: None},
        "use_cache=False": {"use_cache": False},
    }
    for context in (record_routing(model, B, 16), replay_routing(model, random_experts())):
        with context:
            for mode, options in modes.items():
                call = partial(model.generate, prompt, max_new_tokens=4, **options)
                assert f"_routing: generate by {mode} exchanges sequences" in sentence(call)
            call = partial(model.generate, prompt[:1], assistant_model=model)
            assert "generate by assisted_generation" in sentence(call)
            call = partial(other.generate, prompt[:1], assistant_model=model)
            assert "generate by an assistant" in sentence(call)
            assert "continuous batching mixes" in sentence(model.init_continuous_batching)
    assert "generate" not in vars(model)
    model.generate(prompt, max_new_tokens=4, num_beams=2)


def test_routers_with_a_forward_of_their_own() -> None:
    """accelerate gives modules such an attribute, which hides the class's forward."""
    model, ids, experts = converted("mixtral"), tokens("cpu", B, S), random_experts()
    router = model.model.layers[0].mlp.gate
    calls, own = [], router.forward
    router.forward = hooked = lambda x: (calls.append(x), own(x))[1]
    with replay_routing(model, experts), record_routing(model, B, S) as recording:
        model(ids)
    assert torch.equal(recording.routing.experts, experts)
    assert len(calls) == 1
    assert router.forward is hooked


def test_recorded_for_inference_and_trained_on() -> None:
    """Tensors of inference mode cannot be saved for a backward."""
    model, ids = converted("mixtral"), tokens("cpu", B, S)
    with torch.inference_mode(), record_routing(model, B, S) as recording:
        model(ids)
        routing = recording.routing
    with replay_routing(model, routing):
        model(ids).logits.sum().backward()
    with torch.inference_mode():
        context = replay_routing(model, routing)
        context.__enter__()
    model(ids).logits.sum().backward()
    context.__exit__(None, None, None)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fp8_replays", [True, False])
def test_log_probabilities_come_nearer(fp8_replays: bool, seed: int) -> None:
    """FP8 and BF16 choose differently for some tokens; with one's choices they differ less.

    docs/inference.md quotes these numbers.
    """
    torch.manual_seed(seed)
    model = tiny(
        "qwen3_moe",
        vocab_size=256,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )
    models: list[Any] = [model]
    for p in models[0].parameters():
        if p.dim() > 1:  # of a model that has learned: the library's 0.02 makes uniform tokens
            nn.init.normal_(p, std=p.size(-1) ** -0.5)
    models[0].to(BF16).eval()
    models.append(deepcopy(models[0]))
    convert(models[0])
    convert(models[1], Float8BlockScaling(), weights="both")
    ids = torch.randint(256, (8, 64))

    @torch.no_grad()
    def log_probabilities(model: Any) -> Tensor:
        logits = model(ids).logits.float()
        return logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])

    sampler, trainer = models if fp8_replays else models[::-1]
    with record_routing(sampler, 8, 64) as recording:
        expected = log_probabilities(sampler)
    with record_routing(trainer, 8, 64) as own:
        without = (log_probabilities(trainer) - expected).abs()
    experts = [r.routing.experts.sort().values for r in (recording, own)]
    differ = (experts[0] != experts[1]).any(-1)
    with replay_routing(trainer, recording.routing):
        replayed = (log_probabilities(trainer) - expected).abs()
    assert 0.05 < differ.float().mean() < 0.2  # seen: 0.10 of tokens in a layer
    assert differ.any(-1).float().mean() > 0.2  # 0.33 in some layer
    assert replayed.mean() < 0.8 * without.mean()  # 0.039 after 0.061
    assert replayed.max() < 0.7 * without.max()  # 0.27 or less after 0.47 or more


def test_bytes_per_token() -> None:
    model = converted("mixtral")
    with record_routing(model, B, S) as recording:
        model(tokens("cpu", B, S))
    assert recording.routing.bytes_per_token == C  # one layer
    routing = recording.routing.to("cpu")
    assert torch.equal(routing.experts, recording.routing.experts)
    many = tiny("mixtral", intermediate_size=16, num_hidden_layers=2, num_local_experts=257)
    with torch.no_grad(), record_routing(many, B, S, weights=True) as recording:
        many(tokens("cpu", B, S))
    assert recording.routing.experts.dtype == torch.int16
    assert recording.routing.bytes_per_token == 2 * C * (2 + 4)


def test_wrong_routings() -> None:
    model, ids = tiny("mixtral", num_hidden_layers=2), tokens("cpu", B, S)
    good = random_experts(layers=2)
    too_large, negative, partly = good.clone(), good.short(), good.short()
    too_large[1, 3, 1, 0], negative[0, 0, 0, 1], partly[0, 0, 0, 1] = E, -2, -1

    def replayed(experts: Any, ids: Tensor = ids) -> None:
        with replay_routing(model, experts):
            model(ids)

    def recorded(*shape: Any) -> None:
        with record_routing(model, *shape) as recording:
            model(ids)
        recording.routing  # noqa: B018

    def steps(tokens: int) -> None:
        with torch.no_grad(), replay_routing(model, good):
            for _ in range(tokens):
                model(ids[:, :1])

    def recorded_beside_another() -> None:
        with torch.no_grad(), record_routing(model, B, S) as recording:
            layer = model.model.layers[1].mlp
            replaced, layer.gate = layer.gate, type(layer.gate)(model.config)
            model(ids)
            layer.gate = replaced
        recording.routing  # noqa: B018

    def chosen_by_another() -> None:
        gate = model.model.layers[0].mlp.gate
        with replay_routing(model, good):
            gate.top_k = 1
            try:
                model(ids)
            finally:
                gate.top_k = 2

    with torch.no_grad(), record_routing(model, B, 8) as recording:
        for _ in range(2):
            model(ids)
    mistakes = [
        lambda: replayed(good.float()),
        lambda: replayed(good[:, :, :1]),
        lambda: replayed(good[..., :1]),
        lambda: replayed(None),
        lambda: replayed(good[:0]),
        lambda: replayed(too_large),
        lambda: replayed(negative),
        lambda: replayed(partly),
        lambda: replayed(good[:, :3]),
        lambda: replayed(good, ids[:, :3]),
        lambda: replayed(good, ids[:1]),
        lambda: steps(8),
        lambda: recorded(B, 0),
        lambda: recorded(3, S),
        lambda: recorded(B, S + 1),
        lambda: recording.routing,
        recorded_beside_another,
        chosen_by_another,
        lambda: record_routing(GroupedMLP(2, 16, 16), 1, 1).__enter__(),
        lambda: record_routing(
            model_of("mixtral", "cpu").model.layers[0].mlp.gate, 1, 1
        ).__enter__(),
    ]
    assert_expected_inline(
        "\n".join(sentence(mistake) for mistake in mistakes),
        """\
replay_routing: experts must be integers [B, S, 2, C], of 2 layers, got torch.float32 [2, 7, 2, 2]
replay_routing: experts must be integers [B, S, 2, C], of 2 layers, got torch.uint8 [2, 7, 1, 2]
replay_routing: model.layers.0.mlp chooses 2 experts for a token, [2, 7, 2, 1] has 1
replay_routing: experts must be integers [B, S, 2, C], of 2 layers, got None
replay_routing: experts are of no token: [0, 7, 2, 2]
replay_routing: model.layers.1.mlp has experts 0 to 4, the routing has 5
replay_routing: model.layers.0.mlp has experts 0 to 4, the routing has -2
replay_routing: a token has -1 beside other experts: all are -1 for padding
replay_routing: model.layers.0.mlp: a call has 14 tokens, not 2 sequences of up to 3
replay_routing: model.layers.0.mlp: with gradients a call must have all 2 x 7 tokens, got 2 x 3
replay_routing: model.layers.0.mlp: a call has 7 tokens, not 2 sequences of up to 7
replay_routing: model.layers.0.mlp: the model ran 8 tokens of a sequence, there are 7
record_routing: max_tokens must be a positive integer, got 0
record_routing: model.layers.0.mlp: a call has 14 tokens, not 3 sequences of up to 7
record_routing: model.layers.0.mlp: with gradients a call must have all 2 x 8 tokens, got 2 x 7
record_routing: model.layers.0.mlp: the model ran 14 tokens of a sequence, there are 8
record_routing: model.layers.1.mlp ran 0 tokens of a sequence, other layers 7: another router has taken its place since
replay_routing: model.layers.0.mlp: MixtralTopKRouter chooses its 2 of 5 experts in a way that is not known
record_routing: GroupedMLP has no experts that go through transformers' interface
record_routing: MixtralTopKRouter has no experts that go through transformers' interface""",  # noqa: E501
    )
    assert not any("forward" in vars(module) for module in model.modules())


def test_routers_that_are_refused() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**sizes, **heads))
    for context in (record_routing(model, B, S), replay_routing(model, random_experts())):
        assert sentence(context.__enter__).endswith(
            "model.layers.0.mlp: the router of PhimoeSparseMoeBlock is not known: 0 modules beside "
            "its experts choose by torch.topk"
        )
