# SPDX-License-Identifier: Apache-2.0
"""State dicts and pickles of models whose experts were converted: one process and two.

T tokens, E experts, H features of a token, F features of an expert.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from grouped_linear import Float8BlockScaling, convert
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from support.commands import run
from support.compare import assert_same_bits, assert_same_tensors, bits
from support.experts import GroupedExperts
from support.fresh import assert_fresh
from support.hugging_face import logits, tiny
from support.processes import (
    CHECK_SECONDS,
    PROCESSES,
    Checks,
    device,
    join,
    on_cpu,
    on_gpus,
    started,
)

E, H, F = 3, 32, 64  # experts do not divide by processes


def mixtral() -> Any:
    sizes = {"num_hidden_layers": 2, "num_local_experts": E, "intermediate_size": F}
    return tiny("mixtral", **sizes).eval()


def gpt_oss() -> Any:
    config = {"layer_types": ["full_attention"] * 2, "rope_parameters": {"rope_type": "default"}}
    sizes = {"num_hidden_layers": 2, "num_local_experts": E, "intermediate_size": F}
    return tiny("gpt_oss", **sizes, **config).eval()


def titan() -> nn.Module:
    return nn.Sequential(GroupedExperts(E, H, F), nn.Linear(H, H))


FORMS = {"mixtral": mixtral, "titan": titan, "gpt_oss in MXFP4": gpt_oss}
FORM = pytest.mark.parametrize("form", FORMS)


def converted(form: str, weights: Any = "fp8") -> Any:
    torch.manual_seed(0)
    model = FORMS[form]()
    weights = "mxfp4" if weights == "fp8" and "MXFP4" in form else weights
    convert(model, Float8BlockScaling(), weights=weights)
    return model


def cleared(form: str) -> Any:
    """Another model of the same form, with other numbers."""
    model = converted(form)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model


@FORM
def test_distributed_state_dicts(form: str, tmp_path: Path) -> None:
    """torch looks up each key as an attribute of its module; copies and compiled models, too."""
    model = converted(form)
    state = get_model_state_dict(model)
    assert_same_tensors(state, model.state_dict())
    assert_same_tensors(get_model_state_dict(torch.compile(model)), state)
    other = cleared(form)
    set_model_state_dict(other, state)
    assert_same_tensors(other.state_dict(), state)
    dcp.save(state, checkpoint_id=tmp_path)
    read = get_model_state_dict(cleared(form))
    dcp.load(read, checkpoint_id=tmp_path)
    assert_same_tensors(read, state)


@FORM
def test_both_precisions_are_saved_as_plain_weights(form: str, tmp_path: Path) -> None:
    """An unconverted model reads them, and the other way round."""
    model, plain = converted(form, "both"), FORMS[form]()
    expected = {name: p.detach().clone().dequantize() for name, p in model.named_parameters()}
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_same_tensors(dict(plain.named_parameters()), expected)
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(2)
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for name, p in model.named_parameters():
        assert_same_bits(p.detach().clone().dequantize(), 2 * expected[name])
        if isinstance(p, GroupedTensorWithMaster):
            assert_fresh(p)


@pytest.mark.parametrize("weights", [None, "both", "fp8"])
def test_experts_that_a_state_names_one_by_one(weights: Any, tmp_path: Path) -> None:
    """As transformers' Trainer resumes: it loads the files that save_pretrained wrote."""
    sizes = {"intermediate_size": 128, "moe_intermediate_size": 128}
    model, other = (tiny("mixtral", **sizes).eval() for _ in range(2))
    for one in (model, other):
        convert(one, Float8BlockScaling(), weights=weights)
    names = list(model.state_dict())
    model.save_pretrained(tmp_path / "one_by_one")
    before = other.state_dict()
    state = load_file(tmp_path / "one_by_one" / "model.safetensors")
    refusal = r"experts\.down_proj is missing, and the state has model\."
    with pytest.raises(RuntimeError, match=refusal):
        other.load_state_dict(state, strict=False)
    experts = [name for name in names if "experts" in name]
    for name in experts:
        assert_same_bits(bits(other.state_dict()[name]), bits(before[name]))
    other.load_state_dict(
        {"lm_head.weight": model.lm_head.weight}, strict=False
    )  # no layer of ours
    save = partial(model.save_pretrained, save_original_format=False)
    save(tmp_path / "as_it_is")
    other.load_state_dict(load_file(tmp_path / "as_it_is" / "model.safetensors"), strict=False)
    assert torch.equal(logits(other), logits(model))
    if weights != "fp8":
        model.save_pretrained(tmp_path / "in_parts", max_shard_size="40KB")
        assert len([*(tmp_path / "in_parts").glob("*.safetensors")]) > 1
        for path in ("one_by_one", "as_it_is", "in_parts"):
            loaded = type(model).from_pretrained(tmp_path / path).state_dict()
            for name in experts:
                assert torch.equal(loaded[name], model.state_dict()[name]), name


# --- other processes -----------------------------------------------------------------------------

ELSEWHERE = """
import sys, torch
for path in sys.argv[1:]:
    model, expected = torch.load(path, weights_only=False)
    with torch.no_grad():
        assert torch.equal(model(torch.arange(14).reshape(2, 7)).logits, expected)
"""


def test_loaded_in_another_process(tmp_path: Path) -> None:
    """It computes there, without a second conversion."""
    paths = [tmp_path / "as_it_is", tmp_path / "fp8", tmp_path / "both"]
    for path, weights in zip(paths, (None, "fp8", "both"), strict=True):
        model = converted("mixtral", weights)
        torch.save((model, logits(model)), path)
    run([sys.executable, "-c", ELSEWHERE, *map(str, paths)], check=True)


def compute(rank: int, model: Any, expected: Tensor) -> None:
    assert torch.equal(logits(model), expected)


def test_started_workers() -> None:
    model = converted("mixtral", "fp8")
    with started(compute, (model, logits(model)), "gloo", 1) as context:
        join(context, CHECK_SECONDS)


# --- two processes -------------------------------------------------------------------------------


def check_sharded(form: str, rank: int, directory: Path) -> None:
    """What FSDP2 has is saved sharded and whole, over gloo, which knows no float8."""
    whole, sharded = converted(form), converted(form)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (PROCESSES,)))
    state = get_model_state_dict(sharded)
    expected = whole.state_dict()
    assert state.keys() == expected.keys()
    full = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    assert_same_tensors(full, expected)
    for name, t in state.items():
        assert_same_bits(bits(t.full_tensor()), bits(expected[name]))
    on_rank_0 = get_model_state_dict(
        sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert_same_tensors(on_rank_0, expected if rank == 0 else {})
    dcp.save(state, checkpoint_id=directory / "checkpoint")
    dist.barrier()
    other = cleared(form)
    read = get_model_state_dict(other)
    dcp.load(read, checkpoint_id=directory / "checkpoint", no_dist=True)
    assert_same_tensors(read, expected)
    fully_shard(other, mesh=init_device_mesh("cpu", (PROCESSES,)))
    read = get_model_state_dict(other)
    dcp.load(read, checkpoint_id=directory / "checkpoint")
    set_model_state_dict(other, read)
    again = get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))
    assert_same_tensors(again, expected)


WHOLE = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def sharded(model: Any) -> Any:
    fully_shard(model, mesh=init_device_mesh(device().type, (PROCESSES,)))
    return model


def check_whole(form: str, rank: int, directory: Path) -> None:
    """A whole state that each process has: it takes its parts; where torch can, it sends them."""
    expected = {name: t.to(device()) for name, t in converted(form).state_dict().items()}
    other = sharded(cleared(form).to(device()))
    state = {
        name: distribute_tensor(expected[name], t.device_mesh, t.placements)
        for name, t in get_model_state_dict(other).items()
    }
    set_model_state_dict(other, state)
    assert_same_tensors(get_model_state_dict(other, options=WHOLE), expected)
    for options in (WHOLE, FROM_RANK_0):
        other = sharded(cleared(form).to(device()))
        given = expected if rank == 0 or options is WHOLE else {}
        set_model_state_dict(other, dict(given), options=options)
        assert_same_tensors(get_model_state_dict(other, options=WHOLE), expected)


ON_GPUS: Checks = {f"{form}_whole": partial(check_whole, form) for form in FORMS}
CHECKS: Checks = {
    **{form: partial(check_sharded, form) for form in FORMS},
    **ON_GPUS,
}

test_two_processes = on_cpu(CHECKS)
test_two_gpus = on_gpus(ON_GPUS)
