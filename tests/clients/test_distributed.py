# SPDX-License-Identifier: Apache-2.0
"""transformers' DistributedConfig on two processes: FSDP2, tensor and expert parallelism.

It loads models where accelerate is installed. It takes a GPU where there is one.
"""

import json
import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from grouped_linear import Float8BlockScaling, convert
from support import deepseek_v4
from support.compare import assert_same_tensors, bits
from support.devices import HAS_GPU
from support.errors import sentence
from support.four_bits import learns_in_mxfp4
from support.gpt_oss import packed, write_checkpoint
from support.processes import PROCESSES, Checks, device, on_cpu, on_gpus

pytest.importorskip("accelerate")
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, set_seed
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from grouped_linear.integrations.checkpoints.quantizer import GroupedLinearConfig
from grouped_linear.integrations.checkpoints.tensors import CheckpointTensors
from grouped_linear.integrations.transformers import register
from grouped_linear.parallel import AllGather
from grouped_linear.quantized.keep import local_part

T, VOCABULARY, STEPS = 24, 64, 4
NAMES = {"grouped_linear": None, "grouped_linear_fp8": Float8BlockScaling()}
# FSDP2 gives each process a batch of its own, and tensor parallelism the same to all.
FSDP, SHARED = {"fsdp_size": PROCESSES}, {"tp_size": PROCESSES}
EP = {"ep_size": PROCESSES}
WAYS: dict[str, dict[str, Any]] = {
    "fsdp": FSDP,
    "fsdp_ep": {**FSDP, **EP},
    "tp": SHARED,
    "tp_ep": {**SHARED, **EP},
    "tp_ep_all_to_all": {**SHARED, **EP, "ep_implementation": "all_to_all"},
}


def prepare(rank: int, directory: Path) -> str:
    """Registers names, and has the first process save a model for all checks."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(PROCESSES))
    for name, recipe in NAMES.items():
        register(name, recipe)
    path = directory.parent / "model"
    if rank == 0 and not path.exists():
        set_seed(0)
        config = MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
        )
        MixtralForCausalLM(config).save_pretrained(path)
    dist.barrier()
    return str(path)


def load(path: str, name: str, **how: Any) -> Any:
    """A model, on all processes together, or with no way of its own on this one alone."""
    options = {"distributed_config": DistributedConfig(**how)} if how else {}
    model = MixtralForCausalLM.from_pretrained(path, experts_implementation=name, **options)
    return model if how else model.to(device())


def ids(rank: int | None = None) -> Tensor:
    """Tokens of one process, or of all."""
    generator = torch.Generator().manual_seed(1)
    each = torch.randint(VOCABULARY, (PROCESSES, 2, T), generator=generator).to(device())
    return each.flatten(0, 1) if rank is None else each[rank]


def train(model: Any, tokens: Tensor) -> Tensor:
    """The losses of some steps."""
    # foreach, the default on GPUs, takes no plain tensor beside a DTensor (torch 2.11 to 2.13).
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return torch.stack(losses)


@cache
def losses_alone(path: str, name: str) -> Tensor:
    return train(load(path, name), ids())


def check_losses(name: str, way: str, rank: int, directory: Path) -> None:
    """Those of one process with all tokens; FP8 rounds what is summed in another order."""
    path = prepare(rank, directory)
    model = load(path, name, **WAYS[way])
    losses = train(model, ids(rank if "fsdp_size" in WAYS[way] else None))
    dist.all_reduce(losses)
    tolerance = 1e-5 if NAMES[name] is None and device().type == "cpu" else 1e-2
    alone = losses_alone(path, name)
    assert alone[-1] < 0.9 * alone[0]
    torch.testing.assert_close(losses / PROCESSES, alone, rtol=tolerance, atol=0)


class ByAllGather(EPImplementation):
    """As docs/transformers.md has it."""

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        assert tp_mesh.size() == 1
        self.dispatcher = AllGather(ep_mesh, self.num_local_experts * ep_mesh.size(), fp8=True)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        sent = self.dispatcher.dispatch(hidden_states, top_k_weights, top_k_index)
        y = self.experts_forward(sent.x, sent.top_k_index, sent.top_k_weights)
        return self.dispatcher.combine(y, sent)


def check_own_dispatch(rank: int, directory: Path) -> None:
    """transformers' expert parallelism with tokens in FP8 and no size read by the host."""
    path, name = prepare(rank, directory), "grouped_linear_fp8"
    EPImplementationInterface.register("fp8_all_gather", ByAllGather)
    losses = train(load(path, name, **FSDP, **EP, ep_implementation="fp8_all_gather"), ids(rank))
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / PROCESSES, losses_alone(path, name), rtol=1e-2, atol=0)


def check_convert(rank: int, directory: Path) -> None:
    """After the model is distributed; weights in FP8 alone where whole experts are."""
    path, name = prepare(rank, directory), "grouped_linear_fp8"
    with torch.no_grad():
        expected = load(path, name)(input_ids=ids()).logits
    for weights in (None, "fp8"):
        model = load(path, "grouped_mm", **SHARED, **EP)
        conversion = convert(model, NAMES[name], weights=weights)
        assert [c.num_experts for c in conversion.converted] == [4 // PROCESSES] * 2
        compare_logits(model, expected)
    model.save_pretrained(directory)
    dist.barrier()
    assert "quantization_config" in json.loads((directory / "config.json").read_text())
    compare_logits(load(str(directory), name), expected)


def check_quantized(rank: int, directory: Path) -> None:
    """To MXFP4, after the model is distributed: what one process quantizes and saves."""
    path, name = prepare(rank, directory), "grouped_linear"
    model, whole = load(path, name, **SHARED, **EP), load(path, name)
    errors = [convert(one, weights="mxfp4").converted[0].error for one in (model, whole)]
    assert 0.1 < errors[0] < 0.12 > errors[1] > 0.1  # of these experts, of all
    with torch.no_grad():
        compare_logits(model, whole(input_ids=ids()).logits)
    model.save_pretrained(directory / "ours")
    if rank == 0:
        whole.save_pretrained(directory / "whole")
    dist.barrier()
    files = [load_file(directory / d / "model.safetensors") for d in ("ours", "whole")]
    assert_same_tensors(files[0], files[1])


def check_from_pretrained(rank: int, directory: Path) -> None:
    """Quantized while each process reads its experts, of 16 bits and FP8, or bytes for FSDP2."""
    path, name = prepare(rank, directory), "grouped_linear"
    for weights in ("mxfp4", "fp8"):
        config = GroupedLinearConfig(weights)
        whole, model = load(path, name), load(path, name, **SHARED, **EP)
        for one in (whole, model):
            convert(one, weights=weights)
        with torch.no_grad():
            expected = whole(input_ids=ids()).logits
        read = partial(MixtralForCausalLM.from_pretrained, path, quantization_config=config)
        by_experts = read(distributed_config=DistributedConfig(**SHARED, **EP))
        for key, t in by_experts.state_dict().items():
            own = model.state_dict()[key]
            assert torch.equal(local_part(t), local_part(own))
            assert t.shape == own.shape
        for one in (by_experts, read(distributed_config=DistributedConfig(**FSDP))):
            with torch.no_grad():
                compare_logits(one, expected)
        by_experts.save_pretrained(directory / weights)
        dist.barrier()
        said = sentence(partial(read, distributed_config=DistributedConfig(**SHARED)))
        assert "is split inside of each expert" in said
    with pytest.MonkeyPatch.context() as patch:  # as on a GPU: transformers keeps few bits
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
        models = [
            MixtralForCausalLM.from_pretrained(
                directory / "fp8", quantization_config=GroupedLinearConfig("mxfp4"), **options
            )
            for options in ({}, {"distributed_config": DistributedConfig(**SHARED, **EP)})
        ]
    with torch.no_grad():
        compare_logits(models[1], models[0].to(device())(input_ids=ids()).logits)


def check_fp8_checkpoint(rank: int, directory: Path) -> None:
    """Saved by one process, loaded with whole experts on each."""
    path, name = prepare(rank, directory), "grouped_linear_fp8"
    saved = str(directory / "saved")
    whole = load(path, name)
    convert(whole, weights="fp8")
    with torch.no_grad():
        expected = whole(input_ids=ids()).logits
    if rank == 0:
        whole.save_pretrained(saved)
    dist.barrier()
    compare_logits(load(saved, name, **SHARED, **EP), expected)


def check_mxfp4_checkpoint(rank: int, directory: Path) -> None:
    """GPT-OSS: whole experts on each process, or packed bytes that FSDP2 gathers; saved again."""
    source = directory / "gpt_oss"
    if rank == 0:
        write_checkpoint(source)
    dist.barrier()
    tokens = ids()
    with torch.no_grad():
        expected = packed(source).to(device())(input_ids=tokens).logits
    for way in ({**SHARED, **EP}, FSDP):
        model = packed(source, distributed_config=DistributedConfig(**way))
        with torch.no_grad():
            logits = model(input_ids=tokens).logits
        assert (logits - expected).norm() < 2e-2 * expected.norm()
        saved = directory / f"saved_{len(way)}"
        model.save_pretrained(saved)
        dist.barrier()
        files = load_file(saved / "model.safetensors"), load_file(source / "model.safetensors")
        assert_same_tensors(files[0], files[1])


def check_deepseek_v4_checkpoint(rank: int, directory: Path) -> None:
    """Whole experts in MXFP4 on each process, as loaded and frozen; saved again."""
    source = directory / "deepseek_v4"
    if rank == 0:
        deepseek_v4.write_checkpoint(source)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:  # as on a GPU: transformers keeps few bits
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
        whole, model = (
            AutoModelForCausalLM.from_pretrained(source, **options)
            for options in ({}, {"distributed_config": DistributedConfig(**SHARED, **EP)})
        )
    convert(whole.to(device()))
    with torch.no_grad():
        expected = whole(input_ids=ids()).logits
    for weights in (None, "mxfp4"):
        report = convert(model, weights=weights)
        assert [c.num_experts for c in report.converted] == [4 // PROCESSES] * 2
        compare_logits(model, expected)
    model.save_pretrained(directory / "saved")  # gloo gathers bytes alone
    dist.barrier()
    files = [load_file(folder / "model.safetensors") for folder in (directory / "saved", source)]
    assert_same_tensors(*({n: bits(t) for n, t in file.items()} for file in files))


def check_handed_over(rank: int, directory: Path) -> None:
    """Whole tensors on every process, in each way and form, as one process has them."""
    path, name = prepare(rank, directory), "grouped_linear"
    forms = [(None, None), (Float8BlockScaling(), None), (learns_in_mxfp4(), None)]
    for way, how in WAYS.items():
        frozen = [(Float8BlockScaling(), "fp8"), (None, "mxfp4")] if way.startswith("tp_ep") else []
        for recipe, weights in (*forms, *frozen):
            model, whole = load(path, name, **how), load(path, name)
            for one in (model, whole):
                convert(one, recipe, weights=weights)
            source, expected = CheckpointTensors(model), CheckpointTensors(whole)
            assert source.metadata() == expected.metadata()
            assert source.quantization_config == expected.quantization_config
            tensors = dict(source)
            assert list(tensors) == [meta.name for meta in source.metadata()]
            assert_same_tensors(tensors, dict(expected))


def check_saved_as_it_learns(rank: int, directory: Path) -> None:
    """``save_pretrained`` of distributed weights that learn in MXFP4: one process's files."""
    path, name = prepare(rank, directory), "grouped_linear"
    whole = load(path, name)
    convert(whole, learns_in_mxfp4())
    if rank == 0:
        whole.save_pretrained(directory / "whole")
    for way in ("fsdp", "fsdp_ep", "tp_ep"):
        model = load(path, name, **WAYS[way])
        convert(model, learns_in_mxfp4())
        model.save_pretrained(directory / way)
        dist.barrier()
        folders = directory / way, directory / "whole"
        files = [load_file(folder / "model.safetensors") for folder in folders]
        assert_same_tensors(files[0], files[1])
        configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
        assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def compare_logits(model: Any, expected: Tensor) -> None:
    with torch.no_grad():
        logits = model(input_ids=ids()).logits
    assert (logits - expected).norm() < 1e-2 * expected.norm()


def check_refused(rank: int, directory: Path) -> None:
    path, name = prepare(rank, directory), "grouped_linear_fp8"
    sharded = load(path, name, **FSDP, **EP)
    for weights in ("fp8", "both"):
        with pytest.raises(ValueError, match="is sharded: load it whole and convert it before"):
            convert(sharded, Float8BlockScaling(), weights=weights)
    inside = load(path, name, **SHARED)
    with pytest.raises(ValueError, match=r"is split inside of each expert.* whole experts instead"):
        convert(inside, weights="fp8")


CHECKS: Checks = {
    **{f"{name}_{way}": partial(check_losses, name, way) for name in NAMES for way in WAYS},
    "own_dispatch": check_own_dispatch,
    "convert": check_convert,
    "quantized": check_quantized,
    "from_pretrained": check_from_pretrained,
    "fp8_checkpoint": check_fp8_checkpoint,
    "mxfp4_checkpoint": check_mxfp4_checkpoint,
    "deepseek_v4_checkpoint": check_deepseek_v4_checkpoint,
    "handed_over": check_handed_over,
    "saved_as_it_learns": check_saved_as_it_learns,
    "refused": check_refused,
}

no_gpu = pytest.mark.skipif(HAS_GPU, reason="transformers takes the GPU: test_two_gpus")
test_two_processes, test_two_gpus = no_gpu(on_cpu(CHECKS)), on_gpus(CHECKS)
