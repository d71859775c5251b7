"""Experts' weights in safetensors files in the layout of public checkpoints.

E experts, K in_features, N out_features.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from safetensors.torch import load_file, save_file
from torch import Tensor

from grouped_linear import GroupedTensor
from grouped_linear.quantized.checkpoints import expert_tensors, load_experts, save_sharded
from support.compare import assert_same_bits
from support.devices import devices
from support.tensors import BF16, DTYPES, FP32

E, N, K = 4, 256, 144
PREFIX = "layers.3.mlp.experts.{}."
GATE, UP, DOWN = (PREFIX + f"{name}_proj.weight" for name in ("gate", "up", "down"))
DEVICES = pytest.mark.parametrize("device", devices("quantize_weight", "refresh_weight_"))


def published_expert(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Data and scales as they were published: any scales, and blocks that do not reach 448."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    q[q & 0x7F == 0x7F] = 0  # no NaN
    blocks = (-(-rows // 128), -(-columns // 128))
    return q.view(torch.float8_e4m3fn), torch.rand(blocks, generator=generator) / 300


def published() -> dict[str, Tensor]:
    tensors = {"model.norm.weight": torch.ones(K, dtype=BF16)}
    for i, (name, rows, columns) in enumerate([(GATE, 128, K), (UP, 128, K), (DOWN, K, 128)]):
        for e in range(E):
            q, scale = published_expert(rows, columns, 10 * i + e)
            tensors[name.format(e)], tensors[name.format(e) + "_scale_inv"] = q, scale
    return tensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Three shards and their index; an expert's data and scales may be in different shards."""
    tensors, weight_map = published(), {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        shard = {name: tensors[name] for name in list(tensors)[i::3]}
        save_file(shard, tmp_path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def quantized(device: str = "cpu", rows: int = N, columns: int = K) -> GroupedTensor:
    w = torch.randn(E, rows, columns, device=device, dtype=BF16)
    return GroupedTensor.quantize(w)


def assert_holds(weight: GroupedTensor, names: list[str], numbers: list[int]) -> None:
    tensors = published()
    for e, number in enumerate(numbers):
        q = torch.cat([tensors[name.format(number)].view(torch.uint8) for name in names])
        scale = torch.cat([tensors[name.format(number) + "_scale_inv"] for name in names])
        assert_same_bits(weight.q[e].cpu().view(torch.uint8), q)
        assert_same_bits(weight.scale[e].cpu(), scale)
        assert_same_bits(weight.q_t[e], weight.q[e].t())


@DEVICES
def test_load_bit_for_bit(checkpoint: Path, device: str) -> None:
    down = quantized(device, K, 128)
    load_experts(down, checkpoint, DOWN)
    assert_holds(down, [DOWN], [0, 1, 2, 3])
    # Two projections in one layer; and some of the experts, in any order.
    gate_up = quantized(device)
    load_experts(torch.nn.Parameter(gate_up), checkpoint, [GATE, UP])
    assert_holds(gate_up, [GATE, UP], [0, 1, 2, 3])
    load_experts(gate_up[1:3], checkpoint, [GATE, UP], experts=[3, 0])
    assert_holds(gate_up, [GATE, UP], [0, 3, 0, 3])


def test_one_file(tmp_path: Path) -> None:
    save_file(published(), tmp_path / "model.safetensors")
    down = quantized("cpu", K, 128)
    load_experts(down, tmp_path, DOWN)
    assert_holds(down, [DOWN], [0, 1, 2, 3])


def test_bf16_scales(tmp_path: Path) -> None:
    tensors = published()
    for name in tensors:
        if name.endswith("_scale_inv"):
            tensors[name] = tensors[name].to(BF16)
    save_file(tensors, tmp_path / "model.safetensors")
    down = quantized("cpu", K, 128)
    load_experts(down, tmp_path, DOWN)
    for e in range(E):
        assert_same_bits(down.scale[e], tensors[DOWN.format(e) + "_scale_inv"].float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_into_high_precision(checkpoint: Path, dtype: torch.dtype) -> None:
    plain = torch.empty(E, N, K, dtype=dtype)
    load_experts(plain, checkpoint, [GATE, UP])
    gate_up = quantized()
    load_experts(gate_up, checkpoint, [GATE, UP])
    assert_same_bits(plain, gate_up.dequantize(dtype))


@DEVICES
def test_write_back_bit_for_bit(checkpoint: Path, tmp_path: Path, device: str) -> None:
    gate_up, down = quantized(device), quantized(device, K, 128)
    load_experts(gate_up, checkpoint, [GATE, UP])
    load_experts(down, checkpoint, DOWN)
    tensors = expert_tensors(gate_up, [GATE, UP]) | expert_tensors(down, DOWN)
    for e, name in ((0, GATE), (3, UP)):  # nothing is copied
        row = 0 if name is GATE else 128
        assert tensors[name.format(e)].data_ptr() == gate_up.q[e, row].data_ptr()
    norm = {"model.norm.weight": torch.ones(K, dtype=BF16)}
    save_sharded({**norm, **tensors}, tmp_path / "out", max_shard_bytes=50_000)

    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    written = {}
    for file in files:
        assert (tmp_path / "out" / file).stat().st_size < 50_000 + 10_000  # and the header
        shard = load_file(tmp_path / "out" / file)
        assert {index["weight_map"][name] for name in shard} == {file}
        written.update(shard)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in written.values())
    assert written.keys() == published().keys()
    for name, t in published().items():
        assert_same_bits(written[name].view(torch.uint8), t.view(torch.uint8))


@pytest.mark.parametrize("to_quantized", [True, False])
@pytest.mark.parametrize("from_quantized", [True, False])
def test_conversions(tmp_path: Path, from_quantized: bool, to_quantized: bool) -> None:
    """Between weights of either kind, through a file with one tensor an expert."""
    w = torch.randn(E, N, K, dtype=BF16)
    source = GroupedTensor.quantize(w) if from_quantized else w
    save_sharded(expert_tensors(source, [GATE, UP]), tmp_path)
    target = quantized() if to_quantized else torch.empty(E, N, K, dtype=BF16)
    load_experts(target, tmp_path, [GATE, UP])
    if to_quantized:
        expected = GroupedTensor.quantize(w)
        assert_same_bits(target.q, expected.q)
        assert_same_bits(target.scale, expected.scale)
    else:
        assert_same_bits(target, source.dequantize() if from_quantized else w)


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def _replaced(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


LAST = DOWN.format(3)
DAMAGE = {
    "missing expert": _without(LAST),
    "missing scale": _without(LAST + "_scale_inv"),
    "fewer rows": _replaced(LAST, lambda t: t[:128]),
    "other blocks": _replaced(LAST + "_scale_inv", lambda t: t.repeat_interleave(2, 1)),
    "other dtype": _replaced(LAST, lambda t: t.view(torch.uint8).view(torch.float8_e5m2)),
    "every other dtype": lambda tensors: [
        _replaced(name, lambda t: t.view(torch.int8))(tensors) for name in tensors
    ],
    "mixed dtypes": _replaced(LAST, lambda t: t.to(BF16)),
    "scale dtype": _replaced(LAST + "_scale_inv", lambda t: t.half()),
}


def test_damaged_checkpoints(tmp_path: Path) -> None:
    """One sentence each, and the weight as it was."""
    sentences = []
    for i, damage in enumerate(DAMAGE.values()):
        tensors = published()
        damage(tensors)
        directory = tmp_path / str(i)
        directory.mkdir()
        save_file(tensors, directory / "model.safetensors")
        weight = quantized("cpu", K, 128)
        before, version = weight.clone(), weight.q._version
        with pytest.raises(ValueError, match=r"^load_experts: ") as error:
            load_experts(weight, directory, DOWN)
        assert_same_bits(weight.q, before.q)
        assert weight.q._version == version
        sentences.append(str(error.value).replace(str(tmp_path), "..."))
    assert_expected_inline(
        "\n".join(sentences),
        """\
load_experts: .../0 has no tensor layers.3.mlp.experts.3.down_proj.weight
load_experts: .../1 has no tensor layers.3.mlp.experts.3.down_proj.weight_scale_inv
load_experts: layers.3.mlp.experts.3.down_proj.weight must be [144, 128], got [128, 128]
load_experts: layers.3.mlp.experts.3.down_proj.weight_scale_inv must be [2, 1], got [2, 2]
load_experts: layers.3.mlp.experts.3.down_proj.weight must be F8_E4M3, got F8_E5M2
load_experts: layers.3.mlp.experts.0.down_proj.weight must be one of F8_E4M3, BF16, F16, F32, got I8
load_experts: layers.3.mlp.experts.3.down_proj.weight must be F8_E4M3, got BF16
load_experts: layers.3.mlp.experts.3.down_proj.weight_scale_inv must be F32 or BF16, got F16""",
    )


def test_wrong_requests(checkpoint: Path, tmp_path: Path) -> None:
    weight = quantized()
    requests = {
        "numbers": lambda: load_experts(weight, checkpoint, [GATE, UP], experts=range(3)),
        "template": lambda: load_experts(weight, checkpoint, GATE.format(0)),
        "rows": lambda: load_experts(weight, checkpoint, [GATE, UP, DOWN]),
        "blocks": lambda: load_experts(quantized("cpu", 288), checkpoint, [GATE, UP]),
        "blocks of tensors": lambda: expert_tensors(quantized("cpu", 288), [GATE, UP]),
        "directory": lambda: load_experts(weight, tmp_path / "nowhere", [GATE, UP]),
    }
    sentences = []
    for request in requests.values():
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            request()
        sentences.append(str(error.value).replace(str(tmp_path), "..."))
    assert_expected_inline(
        "\n".join(sentences),
        """\
load_experts: the weight has 4 experts, got the numbers of 3
load_experts: a name needs {} for the expert's number, got layers.3.mlp.experts.0.gate_proj.weight
load_experts: 256 rows cannot be shared by 3 names
load_experts: names that share a quantized expert must each have a multiple of 128 rows, got 144
expert_tensors: names that share a quantized expert must each have a multiple of 128 rows, got 144
load_experts: .../nowhere has neither model.safetensors.index.json nor model.safetensors""",
    )


def test_whole_experts_of_any_size() -> None:
    """Only names that share an expert need whole blocks."""
    w = GroupedTensor.quantize(torch.randn(2, 288, 16, dtype=FP32))
    assert len(expert_tensors(w, "{}")) == 4
    assert len(expert_tensors(w.dequantize(), ["a{}", "b{}"])) == 4
