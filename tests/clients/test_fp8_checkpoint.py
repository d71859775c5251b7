"""A checkpoint in FP8, linear layers too: adapters on it, and experts that learn."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations import finegrained_fp8

from grouped_linear import Float8BlockScaling, GroupedTensor, convert
from support.compare import assert_same_bits, bits

pytest.importorskip("accelerate")  # what loads in FP8 needs it
pytest.importorskip("peft")
import peft

from grouped_linear.integrations.peft import use_grouped_adapters
from grouped_linear.integrations.transformers import fp8_tensors
from support.adapters import IDS, SIZES, assert_close, config_of, fp8_checkpoints_on_cpu, logits

RECIPE = Float8BlockScaling()
SCALE = "_scale_inv"
ADAPTERS = {"target_modules": ["q_proj", "v_proj"], "r": 4}


def from_pretrained(folder: Path, **options: Any) -> Any:
    with fp8_checkpoints_on_cpu():
        return transformers.Qwen3MoeForCausalLM.from_pretrained(folder, device_map="cpu", **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As DeepSeek's and Qwen's: all in FP8 but norms, router and ends, scales of any size."""
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 128, "head_dim": 64}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, num_experts=4))
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder / "plain")
    config = transformers.FineGrainedFP8Config()
    from_pretrained(folder / "plain", quantization_config=config).save_pretrained(folder / "fp8")
    file = folder / "fp8" / "model.safetensors"
    state = load_file(file)
    for name in [name for name in state if ".experts." in name and name.endswith(SCALE)]:
        prefix, weight = name.removesuffix(SCALE).rsplit(".", 1)  # transformers leaves them stacked
        parts = ("gate_proj", "up_proj") if weight == "gate_up_proj" else (weight,)
        for expert, scale in enumerate(state.pop(name)):
            for part, own in zip(parts, scale.chunk(len(parts)), strict=True):
                state[f"{prefix}.{expert}.{part}.weight{SCALE}"] = own.contiguous()
    save_file(state, file, {"format": "pt"})
    scales = [t for name, t in state.items() if name.endswith(f".weight{SCALE}")]
    assert len(scales) == 2 * (4 + 4 * 3)
    assert any((scale.log2() % 1).any() for scale in scales)
    return folder / "fp8"


@pytest.fixture(autouse=True)
def linear_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes linear layers in FP8 with a kernel for GPUs."""

    def fp8_linear(x: Tensor, w: Tensor, scale: Tensor, block_size: Any, *_: Any) -> Tensor:
        w = finegrained_fp8._dequantize_fp8_weight(w, scale, block_size, x.dtype)
        return nn.functional.linear(x, w)

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", fp8_linear)


def trainer_of(model: Any, dataset: Any, directory: Path, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=2,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    return transformers.Trainer(model, arguments, train_dataset=dataset)


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def experts_of(model: Any) -> Iterator[Any]:
    return (layer.mlp.experts for layer in model.model.layers)


def assert_same_file(one: Path, other: Path) -> None:
    files = [load_file(folder / "model.safetensors") for folder in (one, other)]
    assert files[0].keys() == files[1].keys()
    for name, t in files[0].items():
        assert_same_bits(bits(files[1][name]), bits(t))


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_adapters_by_trainer(folder: Path, weights: Any, dataset: Any, tmp_path: Path) -> None:
    """On attention and experts: they learn, are saved, loaded, and generate."""
    base = from_pretrained(folder)
    convert(base, RECIPE, weights=weights)
    plain = logits(base)
    before = {name: bits(t).clone() for name, t in base.state_dict().items()}
    model = peft.get_peft_model(base, config_of(**ADAPTERS))
    assert len(use_grouped_adapters(model)) == 4
    trainer = trainer_of(model, dataset, tmp_path, max_steps=3, learning_rate=1e-2)
    trainer.train()
    assert torch.tensor(losses(trainer)).isfinite().all()
    learned = {n: p for n, p in model.named_parameters() if ".lora_B." in n}
    assert len(learned) == 2 * (2 + 2)
    assert all(p.any() for p in learned.values())
    model.save_pretrained(tmp_path / "adapter")
    expected, tokens = logits(model.eval()), model.generate(input_ids=IDS, max_new_tokens=4)
    assert not torch.allclose(expected, plain, atol=1e-3)

    after = model.unload().state_dict()
    assert after.keys() == before.keys()
    for name, t in after.items():
        assert_same_bits(bits(t), before[name])

    loaded = from_pretrained(folder)
    convert(loaded, RECIPE, weights=weights)
    loaded = peft.PeftModel.from_pretrained(loaded, tmp_path / "adapter")
    use_grouped_adapters(loaded)
    assert torch.equal(logits(loaded.eval()), expected)
    assert torch.equal(loaded.generate(input_ids=IDS, max_new_tokens=4), tokens)


def test_trainer_asks_for_adapters_or_experts_that_learn(
    folder: Path, dataset: Any, tmp_path: Path
) -> None:
    model = from_pretrained(folder)
    convert(model, RECIPE)
    with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):
        trainer_of(model, dataset, tmp_path)
    assert "weights in FP8 as loaded" in str(convert(model, RECIPE))
    assert ", weights in FP8\n" in str(convert(model, RECIPE, weights="fp8"))
    trainer_of(model, dataset, tmp_path)


def test_nothing_stepped_saves_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Bit for bit, and the numbers in memory are those that were loaded, not a copy."""
    model = from_pretrained(folder)
    addresses = [experts.down_proj.data_ptr() for experts in experts_of(model)]
    convert(model, RECIPE)
    expected = logits(model)
    done = convert(model, RECIPE, weights="fp8")
    assert repr(convert(model, RECIPE, weights="fp8")) == repr(done)
    for experts, address in zip(experts_of(model), addresses, strict=True):
        assert [type(p.data) for p in experts.parameters()] == [GroupedTensor] * 2
        assert experts.down_proj.q.data_ptr() == address
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "saved")
    assert_same_file(tmp_path / "saved", folder)


def test_weights_kept_transposed(folder: Path) -> None:
    """A second byte an element, and the same bits."""
    found = []
    for columnwise in (False, True):
        model = from_pretrained(folder)
        convert(model, RECIPE, weights="fp8", columnwise=columnwise)
        experts = [p for one in experts_of(model) for p in one.parameters()]
        assert all((p.q_t is not None) == columnwise for p in experts)
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        found.append([p.grad for p in experts])
    for own, other in zip(*found, strict=True):
        assert_same_bits(own, other)


def test_weights_to_a_sampler(folder: Path) -> None:
    """All tensors of the checkpoint, under its names, as it was loaded and once it learns."""
    model, expected = from_pretrained(folder), load_file(folder / "model.safetensors")
    for weights in (None, "fp8"):
        convert(model, RECIPE, weights=weights)
        tensors = dict(fp8_tensors(model))
        assert tensors.keys() == expected.keys()
        for name, t in expected.items():
            assert_same_bits(tensors[name].detach(), t)


def test_experts_learn(folder: Path, tmp_path: Path) -> None:
    """All of them, in FP8 alone, by fused AdamW; what is saved is a checkpoint in FP8 again."""
    model = from_pretrained(folder)
    convert(model, RECIPE, weights="fp8")
    experts = [p for one in experts_of(model) for p in one.parameters()]
    assert all(p.requires_grad for p in experts)
    before = [p.detach().dequantize() for p in experts]
    plain = from_pretrained(
        folder, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    plain.float()(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    expected = [p.grad for one in experts_of(plain) for p in one.parameters()]
    optimizer = torch.optim.AdamW(experts, lr=3e-3, fused=True)
    found = []
    for _ in range(12):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        if not found:
            for p, grad in zip(experts, expected, strict=True):
                assert_close({"": p.grad}, {"": grad}, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found[-1] < 0.8 * found[0], found
    for p, old in zip(experts, before, strict=True):
        assert isinstance(p, GroupedTensor)
        assert not torch.equal(p.detach().dequantize(), old)
    model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    for ours, theirs in zip(experts_of(model), experts_of(again), strict=True):
        assert_same_bits(bits(theirs.down_proj), bits(ours.down_proj.q))
        assert_same_bits(theirs.down_proj_scale_inv, ours.down_proj.scale)
    convert(again, RECIPE)
    assert torch.equal(logits(again), logits(model))


def test_experts_learn_by_trainer(folder: Path, dataset: Any, tmp_path: Path) -> None:
    """Without adapters; a run that goes on from its first checkpoint ends where the whole run does.

    Trainer itself loads no experts of a checkpoint that has one tensor for each of them.
    """
    options = {"max_steps": 4, "save_steps": 2, "learning_rate": 3e-3}
    middle = tmp_path / "whole" / "checkpoint-2"
    found = []
    for run, source in (("whole", folder), ("resumed", middle)):
        model = from_pretrained(source)
        convert(model, RECIPE, weights="fp8")
        trainer = trainer_of(model, dataset, tmp_path / run, **options)
        trainer.train(resume_from_checkpoint=str(middle) if source is middle else None)
        found.append(losses(trainer))
    assert found[1] == found[0]
    ends = [tmp_path / run / "checkpoint-4" for run in ("whole", "resumed")]
    assert_same_file(*ends)
