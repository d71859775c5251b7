# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's models, as their library has them, on our ops beside its eager experts.

Tiny random models, one of each form that the experts interface knows: see FAMILIES.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import FineGrainedFP8Config

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    GeGLU,
    MXFP8BlockScaling,
    SquaredReLU,
    SwiGLU,
    convert,
    grouped_mlp,
    ops,
)
from grouped_linear.quantized.frozen import dequantize_blocks
from support import reference
from support.calls import Calls
from support.commands import run
from support.compare import relative_error
from support.documents import models
from support.hugging_face import FAMILIES, AnyConfig, model_of, tiny, tokens
from support.processes import PROCESSES, Checks, on_cpu
from support.saved import saved_tensors
from support.tensors import BF16, FP32
from support.versions import skipping_for_old_transformers

with skipping_for_old_transformers():
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from grouped_linear.integrations.transformers import (
        SWIGLU_FORMS,
        activation_of,
        options_of,
        register,
    )

NAMES = {"grouped_linear": None, "grouped_linear_fp8": Float8BlockScaling()}
NOT_IN_FP8 = "gpt_oss", "aria"  # biases, transposed weights
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    for name, recipe in NAMES.items():
        register(name, recipe)


def train(model: nn.Module, call: Callable[..., Any], ids: Tensor) -> dict[str, Tensor]:
    """Logits and the gradient of every parameter."""
    model.zero_grad()
    output = call(input_ids=ids)[0]
    output.float().square().mean().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    experts = {name: p for name, p in model.named_parameters() if "expert" in name}
    assert experts
    assert {name for name, p in experts.items() if p.requires_grad} <= gradients.keys()
    return {"logits": output.detach(), **gradients}


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The norm of each difference beside that of the tensor."""
    assert actual.keys() == expected.keys()
    return {name: relative_error(actual[name], e) for name, e in expected.items()}


def results(
    family: str, device: str, *names: str, dtype: torch.dtype = FP32, autocast: bool = False
) -> list[dict[str, Tensor]]:
    """What each implementation gives, and the library's own in float32 at last."""
    model, ids = model_of(family, device, dtype), tokens(device, 3, 7)
    found = []
    for name in names:
        model.set_experts_implementation(name)
        with torch.autocast(device, dtype=BF16, enabled=autocast):
            found.append(train(model, model, ids))
    model.float().set_experts_implementation("eager")
    return [*found, train(model, model, ids)]


@pytest.mark.parametrize(
    ("name", "least", "most"), [("grouped_linear", 0, 1e-5), ("grouped_linear_fp8", 1e-4, 0.25)]
)
@EVERY_FAMILY
def test_logits_and_gradients(
    family: str, name: str, least: float, most: float, device: str
) -> None:
    """The same products without a recipe, sums of tens in another order.

    A product of e4m3 operands is off by 4% of its norm (test_layer.py). Gradients follow from up to
    five of them, through nonlinearities that may raise the error.
    """
    error = errors(*results(family, device, name))
    assert max(error.values()) < most, error
    assert error["logits"] >= least  # in FP8 it is not the exact product


@EVERY_FAMILY
@pytest.mark.parametrize(
    "kind", [{"dtype": BF16}, {"autocast": True}], ids=["parameters", "autocast"]
)
def test_bfloat16(family: str, kind: dict[str, Any], device: str) -> None:
    """As near to float32 as the library's own experts are.

    Either rounds where the other does not, so twice its error, and two roundings, are allowed.
    """
    actual, library, exact = results(family, device, "grouped_linear", "eager", **kind)
    ours, own = errors(actual, exact), errors(library, exact)
    for name, error in ours.items():
        assert error < 2 * own[name] + 2.0**-7, name


@pytest.mark.parametrize("family", ["mixtral", "aria", "gpt_oss"])
def test_swiglu_is_fused(family: str) -> None:
    model, ids = model_of(family, "cpu"), tokens("cpu", 3, 7)
    model.set_experts_implementation("grouped_linear_fp8")
    with Calls() as calls:
        train(model, model, ids)
    assert any("swiglu" in op for op in calls.counts)


@pytest.mark.parametrize("where", ["class", "instance", "limit"])
def test_other_gates_are_heeded(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes the place of a gate that is known, and limits that no SwiGLU has."""
    model, ids = model_of("gpt_oss", "cpu"), tokens("cpu", 3, 7)
    experts = model.model.layers[0].mlp.experts
    if where == "limit":
        experts.limit = -1.0
    else:

        def gate(gate_up: Tensor) -> Tensor:
            return gate_up[..., ::2].tanh() * gate_up[..., 1::2]

        at = type(experts) if where == "class" else experts
        other = (lambda _, gate_up: gate(gate_up)) if where == "class" else gate
        monkeypatch.setattr(at, "_apply_gate", other, raising=where == "class")
    found = {}
    for name in ("eager", "grouped_linear"):
        model.set_experts_implementation(name)
        found[name] = train(model, model, ids)
    assert max(errors(found["grouped_linear"], found["eager"]).values()) < 1e-5
    if where == "class":
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        error = errors(train(model, compiled, ids), found["eager"])
        assert max(error.values()) < 1e-5


@pytest.mark.parametrize("where", ["class", "instance", "forward hook", "backward hook"])
@pytest.mark.parametrize("family", ["mixtral", "nemotron_h"])
def test_what_changes_a_known_activation_is_heeded(family: str, where: str) -> None:
    """It halves the output, or the gradient of the input."""
    model, ids = model_of(family, "cpu"), tokens("cpu", 3, 7)
    for module in model.modules():
        act_fn = getattr(module, "act_fn", None)
        if act_fn is None:
            continue
        own, forward = act_fn.forward, type(act_fn).forward
        half = {"forward": lambda self, x, forward=forward: forward(self, x) / 2}
        if where == "class":
            act_fn.__class__ = type("Half", (type(act_fn),), half)
        elif where == "instance":
            act_fn.forward = lambda x, own=own: own(x) / 2
        elif where == "forward hook":
            act_fn.register_forward_hook(lambda module, args, h: h / 2)
        else:
            act_fn.register_full_backward_hook(lambda module, dx, dh: (dx[0] / 2,))
    found = {}
    for name in ("eager", "grouped_linear"):
        model.set_experts_implementation(name)
        found[name] = train(model, model, ids)
    assert max(errors(found["grouped_linear"], found["eager"]).values()) < 1e-5


# One of each form of the experts: the others have Mixtral's, or GPT-OSS's transposed weights.
@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f not in ("qwen3_moe", "deepseek_v3", "aria")]
)
def test_compiled_in_one_graph(family: str, device: str) -> None:
    """The eager experts of the library cannot be: their loop reads which experts were hit."""
    model = model_of(family, device)
    model.set_experts_implementation("grouped_linear")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(2):  # other tokens go to other experts
        ids = tokens(device, 3, 7)
        error = errors(train(model, compiled, ids), train(model, model, ids))
        assert max(error.values()) < 1e-5, error
    assert counter.frame_count == 1


def test_inductor(device: str) -> None:
    model, ids = model_of("mixtral", device), tokens(device, 3, 7)
    model.set_experts_implementation("grouped_linear_fp8")
    compiled = torch.compile(model, fullgraph=True)
    error = errors(train(model, compiled, ids), train(model, model, ids))
    # A sum in another order may move what is quantized to its neighbour, 2^-3 of it away.
    assert max(error.values()) < 2.0**-4, error


@EVERY_FAMILY
def test_generates(family: str, device: str) -> None:
    model = model_of(family, device).eval()
    if not model.can_generate():
        assert family == "muse_spark"  # its text model alone has no head
        return
    prompt, continued = tokens(device, 2, 5), {}
    for name in ("eager", "grouped_linear"):
        model.set_experts_implementation(name)
        continued[name] = model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert continued["eager"].shape == (2, 9)
    assert torch.equal(continued["grouped_linear"], continued["eager"])


def test_named_where_the_model_is_loaded(tmp_path: Path) -> None:
    model, ids = model_of("mixtral", "cpu").eval(), tokens("cpu", 3, 7)
    model.save_pretrained(tmp_path)
    model.set_experts_implementation("grouped_linear_fp8")
    loaded = type(model).from_pretrained(tmp_path, experts_implementation="grouped_linear_fp8")
    assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("family", "compiled"),
    [*((family, False) for family in FAMILIES if family not in NOT_IN_FP8), ("mixtral", True)],
)
def test_experts_that_are_kept_in_fp8(family: str, compiled: bool, device: str) -> None:
    """They compute what quantizing them in every call does, to the bit; nothing else does."""
    model, ids = model_of(family, device), tokens(device, 3, 7)
    convert(model, Float8BlockScaling())
    expected = train(model, model, ids)
    convert(model, weights="fp8")
    convert(model, weights="fp8")  # nothing is left to do
    frozen = {name for name, p in model.named_parameters() if p.dtype == torch.uint8}
    assert len(frozen) == 4  # numbers and scales
    call = model
    if compiled:
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
    calls = Calls()
    with nullcontext() if compiled else calls:
        actual = train(model, call, ids)
    assert not any("quantize_weight" in op for op in calls.counts)
    assert actual.keys() == expected.keys() - frozen
    for name, result in actual.items():
        assert torch.equal(result, expected[name]), name
    with torch.no_grad():
        assert torch.equal(call(input_ids=ids)[0], expected["logits"])
    model.set_experts_implementation("grouped_linear")  # reaches no experts that are converted
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids)[0], expected["logits"])


def in_fp8(model: nn.Module, experts: Any, device: str) -> tuple[Any, list[Tensor]]:
    """A copy whose experts are those of a checkpoint in FP8, and their weights."""
    others = ["lm_head", "model.layers.0.self_attn", "model.layers.0.mlp.gate"]
    config = FineGrainedFP8Config()
    copied = replace_with_fp8_linear(deepcopy(model), others, quantization_config=config)
    quantized = copied.model.layers[0].mlp.experts.to_empty(device=device)
    weights = []
    for name in ("gate_up_proj", "down_proj"):
        q, scale, _ = ops.quantize_weight(getattr(experts, name).detach(), columnwise=False)
        getattr(quantized, name).data.copy_(q)
        getattr(quantized, f"{name}_scale_inv").data.copy_(scale)
        weights.append(dequantize_blocks(q, scale, getattr(experts, name).dtype))
        getattr(experts, name).data.copy_(weights[-1])
    return copied, weights


@pytest.mark.parametrize(
    ("family", "recipe", "compiled"),
    [
        *((family, Float8BlockScaling(), False) for family in FAMILIES),
        ("gpt_oss", Float8BlockScaling(), True),
        *((family, Float8CurrentScaling(), False) for family in ("mixtral", "gpt_oss")),
    ],
    ids=str,
)
def test_trains_in_both_precisions(family: str, recipe: Any, compiled: bool, device: str) -> None:
    """Steps have the bits of quantizing in each call, and no call quantizes a weight."""
    torch._dynamo.reset()
    results = []
    torch.manual_seed(0)
    model = model_of(family, device)
    ids = [tokens(device, 2, 8) for _ in range(3)]
    for both in (False, True):
        learner = deepcopy(model)
        optimizer = torch.optim.SGD(learner.parameters(), lr=0.01)  # steps what convert makes
        convert(learner, recipe, weights="both" if both else None)
        assert learner.state_dict().keys() == model.state_dict().keys()
        call = learner
        if compiled and both:
            call = torch.compile(learner, backend="aot_eager", fullgraph=True)
        calls = Calls()
        with nullcontext() if compiled else calls:  # Dynamo traces under no mode
            for step in ids:
                results.append(train(learner, call, step))
                optimizer.step()
        if both and not compiled:
            assert not any(op.startswith("quantize_weight") for op in calls.counts)
    for expected, actual in zip(results[:3], results[3:], strict=True):
        for name, e in expected.items():
            if compiled:  # the rest of the model is compiled, too
                torch.testing.assert_close(actual[name], e, rtol=1e-3, atol=1e-3)
            else:
                assert torch.equal(actual[name], e), name


@pytest.mark.parametrize(("act", "compiled"), [("silu", True), ("silu", False), ("gelu", False)])
def test_a_checkpoint_in_fp8(compiled: bool, act: str, device: str) -> None:
    """Its weights are read as they are; the library's own kernels for them need a GPU."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 256}
    model = tiny("mixtral", **sizes, hidden_act=act).to(device)
    experts = model.model.layers[0].mlp.experts
    nn.init.normal_(experts.gate_up_proj, std=0.1)
    nn.init.normal_(experts.down_proj, std=0.1)
    quantized, weights = in_fp8(model, experts, device)
    quantized.set_experts_implementation("grouped_linear_fp8")
    ids, found = tokens(device, 3, 7), {}
    for name, one in (("exact", model), ("fp8", quantized)):
        call = one
        if compiled and name == "fp8":
            call = torch.compile(one, backend="aot_eager", fullgraph=True)
        logits = call(ids, use_cache=False).logits
        logits.logsumexp(dim=-1).sum().backward()
        found[name] = {"logits": logits.detach(), "embedding": one.model.embed_tokens.weight.grad}
    error = errors(found["fp8"], found["exact"])
    assert 0 < max(error.values()) < 0.1, error
    ours = quantized.model.layers[0].mlp.experts
    assert ours.down_proj.grad is None
    if act == "silu":
        assert ours.swiglu_alpha is ours.swiglu_limit is ours.limit is ours.gate_softcap is None
        x, scores = torch.randn(20, 128, device=device), torch.rand(20, 2, device=device)
        chosen = torch.stack([torch.randperm(5)[:2] for _ in range(20)]).to(device)
        for alpha, limit in ((None, None), (None, 0.5), (1.702, 0.5)):
            # As a model whose experts have another form of SwiGLU.
            ours.swiglu_alpha, ours.swiglu_limit, ours.limit = alpha, limit, limit
            form = SwiGLU(alpha or 1.0, 1.0 if alpha else 0.0, limit)
            gate_up = torch.randn(20, 512, device=device)
            h = reference.swiglu(gate_up, **asdict(form))
            torch.testing.assert_close(ours._apply_gate(gate_up), h)
            call = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
            expected = grouped_mlp(
                x, scores, chosen, *weights, Float8BlockScaling(), activation=form
            )
            assert torch.equal(call(x, chosen, scores), expected)
        ours.gate_softcap = ours.up_softcap = 0.5  # as Inkling2's
        assert not torch.equal(ours(x, chosen, scores), expected)


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        ("down_proj", torch.float8_e5m2),
        ("down_proj", torch.uint8),
        ("down_proj_scale_inv", torch.uint8),  # E8M0 as bytes, which are not their numbers
        ("down_proj_scale_inv", torch.float16),
    ],
)
def test_bytes_of_another_meaning(part: str, dtype: torch.dtype) -> None:
    model = tiny("mixtral", hidden_size=128, intermediate_size=128, moe_intermediate_size=128)
    others = ["lm_head", "model.layers.0.self_attn", "model.layers.0.mlp.gate"]
    model = replace_with_fp8_linear(model, others, quantization_config=FineGrainedFP8Config())
    experts = model.model.layers[0].mlp.experts.to_empty(device="cpu")
    other = torch.zeros(experts.get_parameter(part).shape, dtype=dtype)
    setattr(experts, part, nn.Parameter(other, requires_grad=False))
    name = str(dtype).removeprefix("torch.")
    for weights in (None, "fp8"):
        with pytest.raises(
            ValueError, match=rf"must be float8_e4m3fn with.* got down_proj .*{name}"
        ):
            convert(model, Float8BlockScaling(), weights=weights)


def every_experts_class() -> Iterator[Any]:
    """Module and name of each class with the experts interface; nothing is imported."""
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        decorated = r"^@use_experts_implementation.*\nclass (\w+)"
        for name in re.findall(decorated, file.read_text(), re.MULTILINE):
            module = f"transformers.models.{file.parent.name}.{file.stem}"
            yield pytest.param(module, name, id=name)


def compute(experts: Any, name: str, leaves: list[Tensor], chosen: Tensor) -> dict[int, Tensor]:
    """Output and gradients, of the leaves and then of what learns."""
    experts.config._experts_implementation = name
    y = experts(leaves[0], chosen, leaves[1])
    learning = [p for p in experts.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(y.square().sum(), [*leaves, *learning])
    return dict(enumerate((y.detach(), *gradients)))


@pytest.mark.parametrize(("module", "name"), list(every_experts_class()))
def test_every_experts_class_of_the_library(module: str, name: str, device: str) -> None:
    """Alone, without a model around; a class that asks for more than AnyConfig has is left out.

    Whatever form of SwiGLU one has, it is fused; what is kept in FP8 computes what quantizing it in
    each call does, what is kept in MXFP4 what its dequantized numbers do. A newer release may bring
    a gate that SWIGLU_FORMS does not know: that one is right, and not fused.
    """
    experts_class = getattr(importlib.import_module(module), name)
    try:
        experts: Any = experts_class(AnyConfig()).to(device)
    except AttributeError as error:
        pytest.skip(f"asks its configuration for more than sizes: {error}")
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(20)]).to(device)
    width = experts.down_proj.size(2 if experts.is_transposed else 1)
    leaves = [
        torch.randn(20, width, device=device, requires_grad=True),
        torch.rand(20, 2, device=device, requires_grad=True),
    ]
    eager, ours = (compute(experts, n, leaves, chosen) for n in ("eager", "grouped_linear"))
    assert max(errors(ours, eager).values()) < 1e-5  # float32
    with Calls() as calls:
        in_each_call = compute(experts, "grouped_linear_fp8", leaves, chosen)
    own_gate = "_apply_gate" in inspect.getsource(experts_class)
    swiglu = experts.has_gate and (not own_gate or name in SWIGLU_FORMS)
    fused = swiglu and not experts.has_post_expert_norm
    assert any("swiglu" in op for op in calls.counts) == fused
    packed, rounded = deepcopy(experts), deepcopy(experts)
    convert(packed, weights="mxfp4")
    with torch.no_grad():
        for weight in packed._frozen:
            rounded.get_parameter(weight).copy_(packed.dequantize(weight))
    if device == "cpu":  # GPUs sum in another order
        found, same = (compute(one, "grouped_linear", leaves, chosen) for one in (packed, rounded))
        assert all(torch.equal(found[i], same[i]) for i in range(1 + len(leaves)))
    if experts.is_transposed or experts.has_bias:
        with pytest.raises(ValueError, match=r"use weights='mxfp4', 'both' or None"):
            convert(experts, weights="fp8")
        return
    convert(experts, weights="fp8")
    kept = compute(experts, "grouped_linear_fp8", leaves, chosen)
    for i in range(1 + len(leaves)):
        assert torch.equal(kept[i], in_each_call[i])


SPECIAL = {  # an option of the interface, and docs/models.md's words
    "is_transposed=True": "transposed weights",
    "has_bias=True": "biases",
    "has_gate=False": "without a gate",
    "has_post_expert_norm=True": "a norm after each expert",
}


def test_the_page_of_models_has_every_family() -> None:
    """By name, and with the words that say how its experts differ from Mixtral's."""
    if not transformers.__version__.startswith("5.24."):
        pytest.skip("docs/models.md lists the models of transformers 5.24")
    said, families = models()[0], set()
    for case in every_experts_class():
        module, name = map(str, case.values)
        family = module.split(".")[2]
        families.add(family)
        file = Path(transformers.__file__).parent / f"models/{family}/{module.split('.')[-1]}.py"
        decorator = re.search(rf"(@use_experts_.*)\nclass {name}\b", file.read_text())
        assert decorator is not None
        for option, words in SPECIAL.items():
            assert (option in decorator[1]) == (words in said[family]), (family, words)
        limited = SWIGLU_FORMS.get(name, (None, None))[1] is not None
        assert limited == ("a gate with a limit" in said[family]), family
    assert said.keys() == families


OTHER_ACTIVATIONS = {
    "MixtralExperts": ("mixtral", "gelu", GeGLU()),
    "Gemma4TextExperts": ("gemma4", "gelu_pytorch_tanh", GeGLU("tanh")),
    "NemotronHExperts": ("nemotron_h", "relu2", SquaredReLU()),
}


@pytest.mark.parametrize("name", OTHER_ACTIVATIONS)
def test_other_activations_are_of_one_layer(name: str, device: str) -> None:
    """As SwiGLU is: gate_up is all that is kept of rows, in FP8 where that is asked for."""
    model, act, activation = OTHER_ACTIVATIONS[name]
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    config = AnyConfig()
    for option in ("hidden_act", "hidden_activation", "mlp_hidden_act"):
        setattr(config, option, act)
    experts = getattr(module, name)(config).to(device)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    assert activation_of(experts) == activation
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(20)]).to(device)
    width = experts.down_proj.size(1)
    leaves = [torch.randn(20, width, device=device), torch.rand(20, 2, device=device)]
    for leaf in leaves:
        leaf.requires_grad_()
    eager = compute(experts, "eager", leaves, chosen)
    with Calls() as calls:
        ours = compute(experts, "grouped_linear", leaves, chosen)
    assert max(errors(ours, eager).values()) < 1e-5  # float32
    assert any("swiglu" in op for op in calls.counts) == (activation == GeGLU("tanh"))
    convert(experts, save_gate_up_in_fp8=True)
    in_fp8 = compute(experts, experts.config._experts_implementation, leaves, chosen)
    assert torch.equal(in_fp8[0], ours[0])
    assert 0 < max(errors(in_fp8, ours).values()) < 0.08
    with saved_tensors() as kept:
        experts(leaves[0], chosen, leaves[1])
    of_rows = [t for t in kept if t.dim() == 2 and t.size(0) == 40]
    assert [(t.dtype, t.size(1)) for t in of_rows] == [
        (torch.float8_e4m3fn, 128 if activation.gated else 64)
    ]


def test_gate_up_in_fp8_needs_an_activation_of_ours() -> None:
    model = model_of("muse_spark", "cpu")  # a norm after each expert
    before = model.config._experts_implementation
    sentence = r"^convert: layers\.0\.\S+: save_gate_up_in_fp8 needs an activation of grouped_mlp"
    with pytest.raises(ValueError, match=sentence):
        convert(model, save_gate_up_in_fp8=True)
    assert model.config._experts_implementation == before
    register("in_fp8", save_gate_up_in_fp8=True)
    model.set_experts_implementation("in_fp8")
    with pytest.raises(ValueError, match=r"^grouped_linear: save_gate_up_in_fp8 needs an activ"):
        model(tokens("cpu", 1, 4))
    with pytest.raises(ValueError, match=r"^register: 'in_fp8' names another"):
        register("in_fp8")


@pytest.mark.parametrize(
    "name", ["grouped_linear_mxfp8", "grouped_mm", "eager", "deepgemm_megamoe"]
)
def test_a_name_stands_for_one_recipe(name: str) -> None:
    register("grouped_linear_mxfp8", MXFP8BlockScaling())
    register("grouped_linear_mxfp8", MXFP8BlockScaling())  # the same again is no change
    sentence = f"register: '{name}' names another experts implementation already"
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        register(name, Float8BlockScaling())


def test_a_name_that_another_library_takes() -> None:
    """It is not taken back, and experts that have it are not computed here."""
    model = model_of("mixtral", "cpu")
    register("taken", Float8BlockScaling())
    model.set_experts_implementation("taken")
    theirs = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    ALL_EXPERTS_FUNCTIONS.register("taken", theirs)
    assert options_of(model.model.layers[0].mlp.experts) is None
    with pytest.raises(ValueError, match=r"^register: 'taken' names another"):
        register("taken", Float8BlockScaling())
    assert ALL_EXPERTS_FUNCTIONS["taken"] is theirs


@pytest.mark.parametrize("call", ["register", "convert"])
@pytest.mark.parametrize("recipe", [Float8BlockScaling, "fp8"], ids=["class", "name"])
def test_what_is_no_recipe(recipe: Any, call: str) -> None:
    model = model_of("mixtral", "cpu")
    model.set_experts_implementation("grouped_linear_fp8")
    calls = {
        "register": lambda: register("grouped_linear_no_recipe", recipe=recipe),
        "convert": lambda: convert(model, recipe),
    }
    with pytest.raises(
        ValueError, match=f"^{call}: recipe (must be None or a groupe|is the class Float8B)"
    ):
        calls[call]()
    with pytest.raises(ValueError, match="is not supported"):
        model.set_experts_implementation("grouped_linear_no_recipe")


def test_recipes_with_a_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^register: DelayedScaling keeps scales from step"):
        register("grouped_linear_delayed", DelayedScaling())


def test_an_older_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "grouped_linear.integrations.transformers"
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.22.1")  # it replaces itself
    monkeypatch.delitem(sys.modules, module)
    sentence = rf"^{re.escape(module)}: transformers must be 5\.23 or newer, got 5\.22\.1$"
    with pytest.raises(ImportError, match=sentence):
        importlib.import_module(module)


def test_only_the_integration_needs_the_library() -> None:
    """A model of none of its classes is looked at and refused without it."""
    script = (
        "import grouped_linear, sys, torch\n"
        "try: grouped_linear.convert(torch.nn.Linear(16, 16))\n"
        "except ValueError: sys.exit('transformers' in sys.modules)"
    )
    assert run([sys.executable, "-c", script]).returncode == 0


# --- two processes -------------------------------------------------------------------------------


def spread(model: nn.Module, mesh: DeviceMesh, implementation: str) -> None:
    """Half of the experts to each process, as ``DistributedConfig(ep_size=2)`` does."""
    plan = {}
    for name, module in model.named_modules():
        if hasattr(module, "is_concatenated"):
            weights = [weight for weight, _ in module.named_parameters(recurse=False)]
            plan |= {f"{name}.{weight}": "grouped_gemm" for weight in weights}
            plan[name] = "ep_dispatch_experts"
    assert plan
    expert_parallel = importlib.import_module("transformers.distributed.expert_parallel")
    expert_parallel.apply_expert_parallelism(model, mesh, mesh, plan, implementation)


FOUR_EXPERTS = {
    "qwen3_moe": "num_experts",
    "gpt_oss": "num_local_experts",
    "nemotron_h": "n_routed_experts",
}


def check_expert_parallel(
    family: str, name: str, implementation: str, rank: int, directory: Path
) -> None:
    """Choices of the other process's experts add nothing.

    Under all_to_all the library weights rows outside of the experts, so that another gradient is
    quantized; a GEMM of e4m3 operands is off by 4%.
    """
    mesh = init_device_mesh("cpu", (PROCESSES,))
    register(name, NAMES[name])
    tolerance = 1e-5 if NAMES[name] is None else 0.15 if implementation == "all_to_all" else 1e-2
    FAMILIES[family][2][FOUR_EXPERTS[family]] = 4
    whole, ids = model_of(family, "cpu"), tokens("cpu", 3, 8)
    whole.set_experts_implementation(name)
    expected = train(whole, whole, ids)
    model = deepcopy(whole)
    spread(model, mesh, implementation)
    actual = {
        key: t.full_tensor() if isinstance(t, DTensor) else t
        for key, t in train(model, model, ids).items()
    }
    assert max(errors(actual, expected).values()) < tolerance
    if NAMES[name] is not None and family not in NOT_IN_FP8:
        check_frozen_where_they_are(model, rank, ids)


def check_frozen_where_they_are(model: Any, rank: int, ids: Tensor) -> None:
    """Each process quantizes its experts, whose blocks of scales reach into no other expert."""
    weights = {n: p.to_local() for n, p in model.named_parameters() if isinstance(p, DTensor)}
    with torch.no_grad():
        before = model(input_ids=ids)[0]
        convert(model, weights="fp8")
        assert torch.equal(model(input_ids=ids)[0], before)
    state, (_, down) = model.state_dict(), weights_of(model)
    key = next(n for n, p in model.named_parameters() if p is down)
    q, scale, _ = ops.quantize_weight(weights[key], columnwise=False)
    in_bytes = q.view(torch.uint8), scale.unsqueeze(-1).view(torch.uint8)
    for name, of_whole in zip((key, f"{key}_scale_inv"), in_bytes, strict=True):
        part = state[name]
        assert torch.equal(part.to_local(), of_whole)
        assert part.shape == (PROCESSES * of_whole.size(0), *of_whole.shape[1:])


def weights_of(model: nn.Module) -> list[Any]:
    """The weights of a model's first experts."""
    experts: Any = next(m for m in model.modules() if hasattr(m, "is_concatenated"))
    return [experts.gate_up_proj if experts.has_gate else experts.up_proj, experts.down_proj]


CHECKS: Checks = {
    f"{family}-{name}-{implementation}": partial(
        check_expert_parallel, family, name, implementation
    )
    for family in FOUR_EXPERTS
    for name in NAMES
    for implementation in ("all_reduce", "all_to_all")
}

test_two_processes = on_cpu(CHECKS)  # transformers' own expert parallelism
