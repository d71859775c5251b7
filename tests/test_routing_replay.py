# SPDX-License-Identifier: Apache-2.0
"""Routing replay: the experts that a model chose are recorded, and another call takes them.

B sequences, S tokens of each, L layers with experts, C experts chosen for a token, E experts.
"""

import base64
import importlib
import inspect
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointError
from transformers import DynamicCache

from grouped_linear import Float8BlockScaling, GroupedMLP, convert
from grouped_linear.contrib import pad_routing, record_routing, replay_routing
from support.compare import assert_same_tensors
from support.devices import needs_gpu
from support.errors import sentence
from support.graphs import captured
from support.hugging_face import FAMILIES, AnyConfig, model_of, tiny, tokens
from support.pairs import one_in_ci
from support.tensors import BF16
from support.versions import skipping_for_old_transformers

with skipping_for_old_transformers():
    import grouped_linear.integrations.transformers  # noqa: F401

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
B, S, C, E = 4, 7, 2, 5


def converted(family: str = "mixtral", device: str = "cpu", layers: int = 0) -> Any:
    torch.manual_seed(0)
    model = tiny(family, num_hidden_layers=layers) if layers else model_of(family, device)
    if layers:  # the library's 0.02 leaves experts without influence
        for p in model.parameters():
            nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.2)
    convert(model)
    return model.eval()


def random_experts(device: str = "cpu", layers: int = 1, tokens: int = S) -> Tensor:
    """[B, S, L, C], no expert twice for a token."""
    scores = torch.rand(B, tokens, layers, E, device=device)
    return scores.topk(C).indices.to(torch.uint8)


def recorded(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad(), record_routing(model, *ids.shape) as recording:
        model(ids)
    return recording.take()


@torch.no_grad()
def logits(model: Any, ids: Tensor, routing: Tensor) -> Tensor:
    with replay_routing(model, routing):
        return model(ids).logits


def step(model: nn.Module, call: Any, ids: Tensor) -> dict[str, Tensor]:
    """Logits and gradients."""
    model.zero_grad()
    output = call(input_ids=ids)[0]
    output.float().square().mean().backward()
    return {"": output.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@EVERY_FAMILY
def test_own_choices_again_change_no_bit(family: str, device: str) -> None:
    model, ids = converted(family, device), tokens(device, B, S)
    with record_routing(model, B, S) as recording:
        expected = step(model, model, ids)
    routing = recording.take()
    assert routing.shape == (B, S, 1, C)
    with replay_routing(model, routing):
        assert_same_tensors(step(model, model, ids), expected)
    assert_same_tensors(step(model, model, ids), expected)  # nothing of the contexts is left


@pytest.mark.parametrize("kept", ["converted", "plain"])
@EVERY_FAMILY
def test_other_choices_are_taken_and_reach_the_router(family: str, kept: str, device: str) -> None:
    model = converted(family, device) if kept == "converted" else model_of(family, device)
    ids, experts = tokens(device, B, S), random_experts(device)
    with replay_routing(model, experts), record_routing(model, B, S) as recording:
        found = step(model, model, ids)
    assert torch.equal(recording.take(), experts)
    assert not torch.equal(found[""], step(model, model, ids)[""])
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
        self.experts.num_experts = 6  # type: ignore[assignment]

    def forward(self, inputs_embeds: Tensor) -> Any:
        needed = [*inspect.signature(type(self.gate).forward).parameters.values()][2:]
        biases = [
            torch.zeros(6) for p in needed if p.default is p.empty and p.kind is not p.VAR_KEYWORD
        ]
        flat = "hidden_states.view(" not in inspect.getsource(type(self.gate).forward)
        return self.gate(inputs_embeds[0] if flat else inputs_embeds, *biases)


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
    router = getattr(importlib.import_module(module), name)(RouterConfig())
    for p in router.parameters():
        nn.init.normal_(p, std=0.3)
    block, x = Block(router), torch.randn(1, 10, 32)
    with record_routing(block, 1, 10) as recording:
        own = block(x)
    with replay_routing(block, recording.take()):
        again = block(x)
    for i in range(3):
        assert torch.equal(again[i], own[i])

    experts_TC = torch.stack([torch.randperm(6)[:2] for _ in range(10)])
    with replay_routing(block, experts_TC[None, :, None]):
        _, weights_TC, taken_TC, *_ = block(x)
    assert torch.equal(taken_TC, experts_TC)
    # Where both chose the same experts they have the same weights, whatever the family's formula.
    both, other = own[2].sort().values, experts_TC.sort().values
    same_T = (both == other).all(dim=1)
    order = own[1].gather(1, own[2].argsort()), weights_TC.gather(1, experts_TC.argsort())
    torch.testing.assert_close(order[1][same_T], order[0][same_T])
    learning = [p for n, p in router.named_parameters() if p.requires_grad and p.dim() > 1]
    gradients = torch.autograd.grad(weights_TC.square().sum(), learning, allow_unused=True)
    assert any(g is not None and g.any() for g in gradients)


# --- which tokens a call has ---------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_micro_batches(rows: int) -> None:
    """A context each has the numbers of the whole batch; one for all is refused, also without
    gradients, where a part has as many tokens as some whole sequences.
    """
    model, ids, experts = converted(layers=2), tokens("cpu", B, S), random_experts(layers=2)
    right, parts = logits(model, ids, experts), [slice(i, i + rows) for i in range(0, B, rows)]
    found = torch.cat([logits(model, ids[part], experts[part]) for part in parts])
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)  # attention's sums vary
    assert (logits(model, ids, random_experts(layers=2)) - right).abs().max() > 0.1
    with record_routing(model, rows, S) as recording, torch.no_grad():
        routing = [(model(ids[part]), recording.take())[1] for part in parts if part.stop <= B]
    assert torch.equal(torch.cat(routing), recorded(model, ids)[: len(routing) * rows])
    for context in (record_routing(model, B, S), replay_routing(model, experts)):
        with context, torch.no_grad():
            assert f"a call of the model has {rows} x 7 tokens, the context 4 x 7" in sentence(
                lambda: model(ids[parts[0]])
            )
            model(ids)


PROMPT, ENDS = 5, {"max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}


@pytest.mark.parametrize(
    "case", ["returned", "caches", "embeds", "embeds, one", "prefix", "no cache", "chunks"]
)
def test_generate_with_options(case: str) -> None:
    """Each recording is what one forward of the returned tokens chooses."""
    model, ids, options = converted(layers=2), tokens("cpu", 2, PROMPT), {"do_sample": True, **ENDS}
    filled = DynamicCache(config=model.config)
    with torch.no_grad(), record_routing(model, 4 if case == "returned" else 2, 20) as recording:
        if case == "returned":
            options["num_return_sequences"] = 2
        elif case == "caches":  # two batches, each with a cache given by hand
            model.generate(tokens("cpu", 2, PROMPT), past_key_values=deepcopy(filled), **options)
            recording.take()
            options["past_key_values"] = filled
        elif case == "prefix":
            model(ids[:, :3], past_key_values=filled)
            options["past_key_values"] = filled
        elif case == "no cache":
            options["use_cache"] = False
        elif case == "chunks":
            options["prefill_chunk_size"] = 2
        elif case == "embeds, one":  # what generate returns has then no token that ran
            options |= {"max_new_tokens": 1, "min_new_tokens": 1}
        if case.startswith("embeds"):
            out = model.generate(inputs_embeds=model.model.embed_tokens(ids), **options)
            out = torch.cat([ids, out], 1)
        else:
            out = model.generate(ids, **options)
    routing, at_once = recording.take(), recorded(model, out[:, :-1])
    # The last token is never computed.
    assert routing.shape == (out.size(0), PROMPT + options["max_new_tokens"] - 1, 2, C)
    assert (routing == at_once).float().mean() > 0.95  # attention's sums have another order


def test_calls_that_are_not_of_one_batch() -> None:
    """Each was recorded or replayed at wrong places, and nothing raised."""
    model, ids = converted(layers=2), tokens("cpu", 2, PROMPT)
    filled, others = DynamicCache(config=model.config), (ids + 1) % 64
    with torch.no_grad():
        model(ids, past_key_values=filled)
    embeds = model.model.embed_tokens(ids).detach()

    def record(*calls: Callable[[], Any], rows: int = 2) -> None:
        with torch.no_grad(), record_routing(model, rows, 20) as recording:
            for call in calls:
                call()
        recording.take()

    def replay(*calls: Callable[[], Any], tokens: int = PROMPT) -> None:
        with torch.no_grad(), replay_routing(model, random_experts(layers=2, tokens=tokens)[:2]):
            for call in calls:
                call()

    def generate(prompt: Tensor = ids, **options: Any) -> Callable[[], Any]:
        return lambda: model.generate(prompt, **{"do_sample": False, **ENDS, **options})

    first, second = (partial(model, t) for t in (ids, others))
    long = torch.cat([ids, others], 1)

    def behind() -> None:
        model(others, past_key_values=deepcopy(filled))

    def taken_back() -> None:
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        cache.crop(-2)
        model(others, past_key_values=cache)

    wrong = [
        lambda: record(first, second),
        lambda: record(generate(), generate(others)),
        lambda: record(*2 * [lambda: model(inputs_embeds=embeds)]),
        lambda: record(generate(long, past_key_values=deepcopy(filled))),
        lambda: record(generate(guidance_scale=2.0, negative_prompt_ids=others)),
        lambda: record(generate(guidance_scale=2.0)),
        lambda: record(generate(num_beams=3, num_return_sequences=3), rows=6),
        lambda: record(generate(num_beams=2), rows=4),
        lambda: record(taken_back),
        lambda: record(generate(ids[:1].repeat(1, 2), prompt_lookup_num_tokens=2), rows=1),
        lambda: record(generate(num_return_sequences=2, do_sample=True)),
        lambda: record(generate(max_new_tokens=20)),
        lambda: record(lambda: model(ids, past_key_values=object(), use_cache=False)),
        lambda: replay(first, second),
        lambda: replay(behind),
        lambda: replay(lambda: model(ids[:, :3])),
        lambda: replay(lambda: model(ids[:, :3]), lambda: model(ids[:, 3:])),
        lambda: replay(generate(), tokens=10),
        lambda: replay(),
    ]
    assert_expected_inline(
        "\n".join(sentence(mistake) for mistake in wrong),
        """\
record_routing: the model ran other sequences in the same context: take the recording before
record_routing: the model ran other sequences in the same context: take the recording before
record_routing: the model ran other sequences in the same context: take the recording before
record_routing: a call went on behind tokens that did not run in this context, or took some back: run every token in it, once
record_routing: a call went on behind tokens that did not run in this context, or took some back: run every token in it, once
record_routing: a call went on behind tokens that did not run in this context, or took some back: run every token in it, once
record_routing: generate returned other sequences than those that ran, as beams do: decode greedily, or sample
record_routing: generate returned other sequences than those that ran, as beams do: decode greedily, or sample
record_routing: a call went on behind tokens that did not run in this context, or took some back: run every token in it, once
record_routing: a call went on behind tokens that did not run in this context, or took some back: run every token in it, once
record_routing: a call of the model has 4 x 5 tokens, the context 2 x 20: make a context for each micro-batch, with its own routing or batch_size
record_routing: the model ran more than the 20 tokens of a sequence of this context
record_routing: a object does not say how many tokens it holds: use a cache of transformers, without continuous batching
replay_routing: the model ran other sequences in the same context: make a context for each
replay_routing: a call went on behind tokens that did not run in this context, or took some back: run every token in it, once
replay_routing: the model ran 3 tokens of a sequence, the routing has 5: give the routing of these tokens alone
replay_routing: the model ran other sequences in the same context: make a context for each
replay_routing: the model ran 8 tokens of a sequence, the routing has 10: give the routing of these tokens alone
replay_routing: the model ran 0 tokens of a sequence, the routing has 5: give the routing of these tokens alone""",  # noqa: E501
    )
    replay(first, first)
    record(first, behind)  # the cache holds what ran


def test_calls_that_raise_leave_no_choices() -> None:
    """A call counts when it has ended; a recording that cannot be taken is gone."""
    model, ids = converted(layers=2), tokens("cpu", 2, PROMPT)
    others = (ids + 1) % 64
    last = model.model.layers[1].self_attn
    with torch.no_grad(), record_routing(model, 2, 20) as recording:
        model(ids)
        recording.take()
        hook = last.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(others)
        hook.remove()
        assert (
            sentence(recording.take) == "record_routing: no token was recorded since the last take"
        )
        with pytest.raises(ValueError, match=r"the model ran other sequences in the same context"):
            model(ids), model(others), recording.take()
        assert (
            sentence(recording.take) == "record_routing: no token was recorded since the last take"
        )
        model(others)
        assert torch.equal(recording.take(), recorded(model, others))


@pytest.mark.parametrize("shared", ["block", "router"])
def test_layers_that_share_a_router(shared: str) -> None:
    model, ids = tiny("qwen3_moe", num_hidden_layers=2), tokens("cpu", B, S)
    first, second = model.model.layers
    if shared == "block":
        second.mlp = first.mlp
    else:
        second.mlp.gate = first.mlp.gate
    convert(model)
    layers = 1 if shared == "block" else 2

    def call(context: Any) -> None:
        with context, torch.no_grad():
            model(ids)

    for context in (
        record_routing(model, B, S),
        replay_routing(model, random_experts(layers=layers)),
    ):
        assert sentence(partial(call, context)).endswith(
            f"_routing: model.layers.{layers - 1}.mlp runs twice in a call of the model: "
            "layers that share a router cannot be told apart"
        )


def test_padding_and_packed_sequences() -> None:
    """A cell of the routing is of the same cell of the tokens, whatever its position."""
    model, ids, experts = converted(layers=2), tokens("cpu", 2, S), random_experts(layers=2).int()
    lengths, right = (S, 4), logits(model, ids, experts[:2])
    short = logits(model, ids[1:, :4], experts[1:2, :4])[0]
    at, mask = torch.arange(S), torch.ones(2, S, dtype=torch.int64)
    for pad in (slice(0, 3), slice(4, S)):  # on the left, on the right
        given, chosen, mask[1] = ids.clone(), experts[:2].clone(), 1
        mask[1, pad], chosen[1, pad] = 0, -1
        tokens_at = mask[1].bool()
        given[1, tokens_at], chosen[1, tokens_at] = ids[1, :4], experts[1, :4]
        with torch.no_grad(), replay_routing(model, chosen), record_routing(model, 2, S) as taken:
            found = model(given, attention_mask=mask, position_ids=mask.cumsum(1) - 1).logits
        assert torch.equal(taken.take()[1, tokens_at], experts[1, :4].byte())
        torch.testing.assert_close(found[1, tokens_at], short, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[0], right[0], rtol=1e-4, atol=1e-4)
    packed = torch.cat([ids[0], ids[1, :4]])[None]
    position_ids = torch.cat([at[:n] for n in lengths])[None]
    both = torch.cat([experts[0], experts[1, :4]])[None]
    with torch.no_grad(), replay_routing(model, both):
        found = model(packed, position_ids=position_ids, use_cache=False).logits[0]
    torch.testing.assert_close(found, torch.cat([right[0], short]), rtol=1e-4, atol=1e-4)


# --- what samplers return ------------------------------------------------------------------------


def with_a_dense_layer() -> Any:
    """Three layers, of which the first has no experts, as DeepSeek's."""
    torch.manual_seed(0)
    return tiny("deepseek_v3", num_hidden_layers=3, first_k_dense_replace=1)


@pytest.mark.parametrize("form", ["vLLM 0.21", "vLLM 0.21, JSON", "vLLM", "SGLang", "tail"])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_arrays_of_samplers(form: str, side: str) -> None:
    """Sequences of 7, 4 and 2 tokens, prompts of 3, 1 and 1, of which two were in a prefix cache.

    Each row arrives at its own token; no row of padding or of the last token is made up.
    """
    model, lengths, prompts = with_a_dense_layer(), (7, 4, 2), (3, 1, 1)
    at, mask = [], torch.zeros(3, 9, dtype=torch.int64)
    for b, (n, p) in enumerate(zip(lengths, prompts, strict=True)):
        start = {"left": 9 - n, "right": 0, "both": 3 - p}[side]  # both: trl's and verl's batches
        at.append(range(start, start + n))
        mask[b, start : start + n] = 1
    chosen = random_experts(layers=2, tokens=9)[:3].short()
    chosen[0, at[0][0]] = chosen[0, at[0][1], :] = -1
    expected, given = torch.full_like(chosen, -1), []
    for b, p in enumerate(prompts):
        rows = chosen[b, at[b]]
        if form == "tail":  # SGLang's routed_experts_start_len, vLLM's routed_experts_prompt_start
            rows = rows[p:]
        last = rows if form == "vLLM" and b == 1 else rows[:-1]  # the last may be there, too
        cells = list(at[b])[p if form == "tail" else 0 :][: len(last)]
        expected[b, cells] = last
        parts: Any = (last[:p].numpy(), last[p:].numpy())  # int16
        if form == "vLLM 0.21, JSON":
            parts = tuple(part.tolist() for part in parts)
        elif form != "vLLM 0.21":
            dense = torch.zeros(len(last), 1, C, dtype=torch.int32)  # what its buffer has there
            whole = torch.cat([dense, last.int()], 1).numpy()
            flat = np.frombuffer(whole.tobytes(), dtype=np.int32)  # read-only
            tail = p, whole.astype(np.uint16)  # vLLM's of more than 256 experts
            parts = {"vLLM": last, "SGLang": flat, "tail": tail}[form]
        given.append(parts)
    routing = pad_routing(model, given, mask)
    assert routing.dtype == torch.int16
    assert torch.equal(routing, expected)

    ids = tokens("cpu", 3, 9)
    with torch.no_grad(), replay_routing(model, routing), record_routing(model, 3, 9) as recording:
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    taken, replayed = recording.take().short(), expected >= 0
    assert torch.equal(taken[replayed], expected[replayed])
    assert replayed.any()


def test_arrays_of_another_shape() -> None:
    model, mask = with_a_dense_layer(), torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    one, two = torch.zeros(2, 2, C, dtype=torch.int16), torch.zeros(2, 2, C, dtype=torch.int16)

    def padded(*given: Any, mask: Tensor = mask) -> Callable[[], Tensor]:
        return lambda: pad_routing(model, given, mask)

    far = torch.full((2, 2, C), 2**16, dtype=torch.int32)
    far[..., 1] = 1
    wrong = [
        padded(one),
        padded(one, two, mask=mask[0]),
        padded(one, None),
        padded(one.float(), two),
        padded(one[:, :, :1], two),
        padded(one, torch.zeros(2, 4, C, dtype=torch.int16)),
        padded(one.flatten(), two.flatten()),
        padded(one, torch.cat([two, one])),
        padded(one, two[:0]),
        padded((one, two), two),
        padded((2, one), two),
        lambda: replay_routing(model, padded(far, two[:1])()).__enter__(),
        lambda: pad_routing(GroupedMLP(2, 16, 16), [one], mask),
    ]
    assert_expected_inline(
        "\n".join(map(sentence, wrong)),
        """\
pad_routing: attention_mask must be [B, S], got [2, 4] for 1 sequences
pad_routing: attention_mask must be [B, S], got [4] for 2 sequences
pad_routing: sequence 1 has 2 tokens and a routing of 0: only the last may have no row; if the first n have none, give (n, rows)
pad_routing: sequence 0: a routing is integers [tokens, 2 layers with experts or all 3, 2], got torch.float32 [2, 2, 2]
pad_routing: sequence 0: a routing is integers [tokens, 2 layers with experts or all 3, 2], got torch.int16 [2, 2, 1]
pad_routing: sequence 1: a routing is integers [tokens, 2 layers with experts or all 3, 2], got torch.int16 [2, 4, 2]
pad_routing: sequence 0: a routing is integers [tokens, 2 layers with experts or all 3, 2], got torch.int16 [8]
pad_routing: sequence 1 has 2 tokens and a routing of 4: these are too many
pad_routing: sequence 1 has 2 tokens and a routing of 0: only the last may have no row; if the first n have none, give (n, rows)
pad_routing: sequence 0 has 3 tokens and a routing of 4: these are too many
pad_routing: sequence 0 has 3 tokens and a routing of 4: these are too many
replay_routing: model.layers.1.mlp has experts 0 to 4, the routing has 32767
pad_routing: GroupedMLP has no router beside a module `experts`""",  # noqa: E501
    )
    several = pad_routing(model, [one, two[:1]], mask)  # as many tokens, and one less
    assert several[:, :, 0, 0].tolist() == [[-1, 0, 0, -1], [0, -1, -1, -1]]
    block = tiny("mixtral").model.layers[0].mlp  # no list of layers: none without experts
    assert pad_routing(block, [one[:, :1]], mask[1:]).shape == (1, 4, 1, C)


# --- compiled, checkpointed, wrapped -------------------------------------------------------------


@pytest.mark.parametrize("family", one_in_ci(["qwen3_moe", "deepseek_v3", "gpt_oss"]))
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
            assert torch.equal(recording.take(), experts)
            assert_as_eager()
        assert_as_eager()  # with choices of its own
    assert backend.frame_count == 2


GENERATES = "qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h"


@pytest.mark.parametrize(
    ("family", "cache"),
    [
        *one_in_ci([("nemotron_h", None), *((f, None) for f in GENERATES[:3])]),
        *one_in_ci([(f, "static") for f in GENERATES]),
        *one_in_ci([(f, "compiled") for f in GENERATES[::-1]]),
    ],
)
def test_generates(family: str, cache: str | None, device: str) -> None:
    """Prefill and steps go on from each other, and are what one forward replays."""
    model, prompt = converted(family, device), tokens(device, B, 5)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    options |= {} if cache is None else {"cache_implementation": "static"}
    with record_routing(model, B, 16) as recording:
        ids = model.generate(prompt, **options)
    routing = recording.take()
    assert routing.shape == (B, 10, 1, C)
    agree = (recorded(model, ids[:, :-1]) == routing).float().mean()
    assert agree > 0.9  # attention's sums have another order
    backend = CompileCounterWithBackend("aot_eager")
    if cache == "compiled":
        model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
    with replay_routing(model, routing), record_routing(model, B, 10) as replayed:
        assert torch.equal(model.generate(prompt, **options), ids)
        assert torch.equal(replayed.take(), routing)
    for _ in range(2):
        other = random_experts(device, tokens=10)
        with replay_routing(model, other), record_routing(model, B, 10) as recording:
            model.generate(prompt, **options)
            assert torch.equal(recording.take(), other)
    assert backend.frame_count <= 2  # prefill and step, each once; torch 2.11 has one graph


@needs_gpu
def test_cuda_graph() -> None:
    """One graph records and replays whatever its buffers hold."""
    model, ids = converted("qwen3_moe", "cuda"), tokens("cuda", B, S)
    with torch.no_grad(), record_routing(model, B, S) as recording:
        for _ in range(2):
            model(ids)
        graph, _ = captured(partial(model, ids))
        recording.take()
        for _ in range(3):
            ids.copy_(tokens("cuda", B, S))
            graph.replay()
            found = recording.take()
            model(ids)
            assert torch.equal(found, recording.take())


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
    assert torch.equal(recording.take(), experts)
    with replay_routing(model, experts):
        loss = model(ids).logits.square().mean()
    with pytest.raises(CheckpointError, match="different number of tensors"):
        loss.backward()
    model.activation_checkpointing_enable({"use_reentrant": True})
    with replay_routing(model, experts):
        assert_same_tensors(step(model, model, ids), expected)
    with (
        pytest.raises(ValueError, match=r"use_reentrant=True .* call backward\(\) in it"),
        replay_routing(model, experts),
    ):
        model(ids)


@EVERY_FAMILY
@pytest.mark.parametrize("learning", ["", "experts"], ids=["all", "experts"])
def test_recompute_in_another_context(family: str, learning: str) -> None:
    """Its shapes are the same. Some routers take the indices of topk alone.

    Where experts alone learn, no gradient goes through the first router.
    """
    ids = tokens("cpu", B, S)
    model = converted(family).train()
    for name, p in model.named_parameters():
        p.requires_grad_(learning in name)
    routing = recorded(model, ids)
    model.activation_checkpointing_enable()
    model.disable_input_require_grads()
    with replay_routing(model, routing):
        loss = model(ids)[0].square().mean()
    with (
        pytest.raises(ValueError, match=r"in another context .* call backward\(\) in that one"),
        replay_routing(model, routing.flip(0)),
    ):
        (loss + model(ids)[0].mean()).backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_below_all_that_learns(reentrant: bool) -> None:
    """No backward runs their routers again, so none is missed."""
    model, ids, experts = converted(layers=2), tokens("cpu", B, S), random_experts(layers=2)
    model.train().requires_grad_(False).lm_head.requires_grad_()
    if reentrant:
        model.activation_checkpointing_enable({"use_reentrant": True})
        model.disable_input_require_grads()  # without which torch runs them again
    else:
        layer = model.model.layers[0]
        layer.forward = torch.no_grad()(layer.forward)
        model.model.layers[1].requires_grad_()
    with replay_routing(model, experts):
        loss = model(ids).logits.square().mean()
    loss.backward()


def test_tensors_of_whoever_calls_go_when_they_are_let_go() -> None:
    """Python 3.11 keeps the locals of a frame that another one has read."""
    model, ids, experts = converted(layers=2), tokens("cpu", B, S), random_experts(layers=2)
    layer = model.model.layers[0]
    layer.forward = torch.no_grad()(layer.forward)
    large = torch.ones(3)
    held = weakref.ref(large)
    with replay_routing(model, experts):
        model(ids)
    del large
    assert held() is None


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


PLACES = "layer", "router", "experts", "block", "model"


@pytest.mark.parametrize(
    ("wrap", "place"),
    [
        *one_in_ci([(checkpoint_wrapper, p) for p in PLACES]),
        *one_in_ci([(compiled, p) for p in ("layer", "router", "inner", "model")]),
    ],
)
def test_wrapped_modules(wrap: Any, place: str) -> None:
    model, ids, experts = converted(layers=2), tokens("cpu", B, S), random_experts(layers=2)
    with replay_routing(model, experts):
        expected = step(model, model, ids)
    for i, layer in enumerate(model.model.layers):
        if place in ("router", "experts"):
            name = "gate" if place == "router" else place
            setattr(layer.mlp, name, wrap(getattr(layer.mlp, name)))
        elif place == "block":
            layer.mlp = wrap(layer.mlp)
        elif place == "layer":
            model.model.layers[i] = wrap(layer)
    if place == "inner":
        model.model = wrap(model.model)
    call = wrap(model) if place == "model" else model
    with replay_routing(call, experts), record_routing(call, B, S) as recording:
        found = step(call, call, ids)
    assert torch.equal(recording.take(), experts)
    for t, right in zip(found.values(), expected.values(), strict=True):
        assert torch.equal(t, right)


def test_one_replay_at_a_time() -> None:
    model, experts = converted(), random_experts()
    gate = model.model.layers[0].mlp.gate
    with torch.no_grad(), replay_routing(model, experts), record_routing(model, B, S):
        before = gate.forward
        assert sentence(replay_routing(model, experts).__enter__) == (
            "replay_routing: the model replays a routing already: leave that context first"
        )
        assert gate.forward == before
        for copied in (deepcopy, pickle.dumps):
            assert "a copy or a pickle of the model would go on" in sentence(
                lambda copied=copied: copied(model)
            )
        model(tokens("cpu", B, S))
    assert not any({"forward", "generate"} & vars(module).keys() for module in model.modules())
    deepcopy(model)
    calls: list[Tensor] = []  # a forward of an instance, as accelerate sets it
    own, gate.forward = gate.forward, lambda x: (calls.append(x), own(x))[1]
    hooked = gate.forward
    with torch.inference_mode():  # whose tensors cannot be saved for a backward
        routing = recorded(model, tokens("cpu", B, S))
    with torch.inference_mode(), replay_routing(model, routing), torch.inference_mode(False):
        model(tokens("cpu", B, S)).logits.sum().backward()
    assert len(calls) == 2
    assert gate.forward is hooked


# --- what is refused, and what it is for ---------------------------------------------------------


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
    for p in model.parameters():
        if p.dim() > 1:  # of a model that has learned: the library's 0.02 makes uniform tokens
            nn.init.normal_(p, std=p.size(-1) ** -0.5)
    model.to(BF16).eval()
    models: list[Any] = [model, deepcopy(model)]
    convert(models[0])
    convert(models[1], Float8BlockScaling(), weights="both")
    ids = torch.randint(256, (8, 64))

    @torch.no_grad()
    def log_probabilities(model: Any) -> Tensor:
        scores = model(ids).logits.float()
        return scores.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])

    sampler, trainer = models if fp8_replays else models[::-1]
    with record_routing(sampler, 8, 64) as recording:
        expected = log_probabilities(sampler)
    with record_routing(trainer, 8, 64) as own:
        without = (log_probabilities(trainer) - expected).abs()
    routing = recording.take()
    differ = (routing.sort().values != own.take().sort().values).any(-1)
    with replay_routing(trainer, routing):
        replayed = (log_probabilities(trainer) - expected).abs()
    assert 0.05 < differ.float().mean() < 0.2  # seen: 0.10 of tokens in a layer
    assert differ.any(-1).float().mean() > 0.2  # 0.33 in some layer
    assert replayed.mean() < 0.8 * without.mean()  # 0.039 after 0.061
    assert replayed.max() < 0.7 * without.max()  # 0.27 or less after 0.47 or more


def test_wrong_routings_and_models() -> None:
    model, ids = tiny("mixtral", num_hidden_layers=2), tokens("cpu", B, S)
    good, gate = random_experts(layers=2), model.model.layers[1].mlp.gate
    too_large, negative, partly, twice = good.clone(), good.short(), good.short(), good.clone()
    too_large[1, 3, 1, 0], negative[0, 0, 0, 1], partly[0, 0, 0, 1], twice[3, 6, 1] = E, -2, -1, 0

    def replayed(experts: Any, ids: Tensor = ids) -> None:
        with replay_routing(model, experts):
            model(ids)

    def changed(module: Any, name: str, value: Any) -> None:
        before = getattr(module, name)
        with replay_routing(model, good), torch.no_grad():
            setattr(module, name, value)
            try:
                model(ids)
            finally:
                setattr(module, name, before)

    class Part(nn.Module):
        def __init__(self, gate: nn.Module) -> None:
            super().__init__()
            self.gate = gate

        def forward(self, x: Tensor) -> Any:
            return self.gate(x[1:])

    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    phimoe = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**sizes, **heads))

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).softmax(-1).topk(2)

    block = nn.ModuleDict({"router": Own(16, 2), "experts": GroupedMLP(2, 16, 16)})
    own_router = tiny("mixtral", num_hidden_layers=1, num_local_experts=2)
    own_router.model.layers[0].mlp.gate = Own(own_router.config.hidden_size, 2)
    own_router.model.layers[0].mlp.gate.top_k = 2
    of: Callable[..., Any] = lambda model, *shape: record_routing(model, *shape).__enter__  # noqa: E731
    mistakes = [
        lambda: replayed(good.float()),
        lambda: replayed(good[:, :, :1]),
        lambda: replayed(good[..., :1]),
        lambda: replayed(None),
        lambda: replayed(good[:0]),
        lambda: replayed(too_large),
        lambda: replayed(negative),
        lambda: replayed(partly),
        lambda: replayed(twice),
        lambda: replayed(good[:, :3]),
        lambda: replayed(good, ids[:, :3]),
        lambda: changed(gate, "top_k", 1),
        lambda: changed(model.model.layers[1].mlp, "gate", type(gate)(model.config)),
        lambda: changed(model.model.layers[1].mlp, "gate", Part(gate)),
        of(model, B, 0),
        of(GroupedMLP(2, 16, 16), 1, 1),
        of(model.model.layers[0].mlp, 1, 1),
        of(phimoe, 1, 1),
        of(block, 1, 1),
        lambda: recorded(own_router, ids),
    ]
    said = [sentence(mistake) for mistake in mistakes]
    said.append(sentence(of("qwen", 1, 2), TypeError))
    assert_expected_inline(
        "\n".join(said),
        """\
replay_routing: a routing is integers [B, S, 2, C], of 2 layers, got torch.float32 [4, 7, 2, 2]
replay_routing: a routing is integers [B, S, 2, C], of 2 layers, got torch.uint8 [4, 7, 1, 2]
replay_routing: model.layers.0.mlp chooses 2 experts for a token, the routing has 1
replay_routing: a routing is integers [B, S, 2, C], of 2 layers, got None
replay_routing: a routing is integers [B, S, 2, C], of 2 layers, got torch.uint8 [0, 7, 2, 2]
replay_routing: model.layers.1.mlp has experts 0 to 4, the routing has 5
replay_routing: model.layers.0.mlp has experts 0 to 4, the routing has -2
replay_routing: model.layers.0.mlp gets -1 beside other experts: all of a token are -1 for padding
replay_routing: model.layers.1.mlp gets an expert twice for a token: padding must be -1
replay_routing: a call of the model has 4 x 7 tokens, the context 4 x 3: make a context for each micro-batch, with its own routing or batch_size
replay_routing: with gradients a call must have all 4 x 7 tokens, got 4 x 3
replay_routing: model.layers.1.mlp: MixtralTopKRouter chooses its 2 of 5 experts in a way that is not known
replay_routing: model.layers.1.mlp did not run in the model's call: it has another router now, or the model left a layer out
replay_routing: model.layers.1.mlp: the router gets 27 tokens, the model's call has 4 x 7: models that give a router a part of the tokens are not supported
record_routing: max_tokens must be a positive integer, got 0
record_routing: GroupedMLP has no router beside a module `experts`
record_routing: nothing in MixtralSparseMoeBlock has all routers inside and takes input_ids: give the model that gets the tokens
record_routing: model.layers.0.mlp: the router of PhimoeSparseMoeBlock is not known: one module beside its experts must choose by torch.topk, and 0 do
record_routing: ModuleDict: Own must be as a router of transformers: with top_k and num_experts, and a forward that returns logits, weights, experts
record_routing: model.layers.0.mlp: Own must be as a router of transformers: with top_k and num_experts, and a forward that returns logits, weights, experts
record_routing: model must be a torch.nn.Module, got a str""",  # noqa: E501
    )
    assert not any("forward" in vars(module) for module in model.modules())
    many = tiny("mixtral", intermediate_size=16, num_local_experts=257)
    assert recorded(many, ids).dtype == torch.int16


def test_parts_of_a_routing_as_samplers_have_them() -> None:
    """Base64 of int32, numbers of numpy and masks of numpy; what is no number has a sentence."""
    model = tiny("mixtral", num_hidden_layers=2)
    rows = np.arange(12, dtype=np.int32).reshape(3, 2, 2) % 5
    mask = np.array([[0, 1, 1, 1]])
    expected = pad_routing(model, [rows], torch.from_numpy(mask))
    with torch.device("meta"):  # another device for whatever names none
        for given in (rows, (1, rows[1:].tolist())):
            assert pad_routing(model, [given], torch.from_numpy(mask)).device == expected.device
    text = base64.b64encode(rows.tobytes()).decode()
    for given in (text, (rows[:1], rows[1:].tolist()), (np.int64(0), torch.tensor(0), rows)):
        assert torch.equal(pad_routing(model, [given], mask), expected)
    late = pad_routing(model, [(np.int32(1), rows[1:])], mask)
    assert late[0, 1].eq(-1).all()
    assert torch.equal(late[0, 2:], expected[0, 2:])
    for wrong in ((-1, rows), (True, rows), [rows[:2], rows[2:]], object(), "AAA="):
        with pytest.raises(ValueError, match="pad_routing: sequence 0"):
            pad_routing(model, [wrong], mask)
