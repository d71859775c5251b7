"""Experts' weights in safetensors files, in the format of public checkpoints.

The format has one tensor an expert, either in high precision or block-quantized as DeepSeek-V3 was
published (https://huggingface.co/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md): float8_e4m3fn data
``<name>`` and float32 scales ``<name>_scale_inv``, one for each 128x128 block, that multiply to
dequantize. This module needs safetensors: ``pip install --no-build-isolation '.[checkpoints]'``.

E experts, K in_features, N out_features.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from grouped_linear.meta_kernels.rules import BLOCK, ceil_div
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import quantized_as
from grouped_linear.quantized.with_master import GroupedTensorWithMaster

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SCALE = "_scale_inv"
QUANTIZED = "F8_E4M3"
HIGH_PRECISION = ("BF16", "F16", "F32")


def expert_tensors(
    weight: Tensor, names: str | Sequence[str], *, experts: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Each expert's tensors under their names in a checkpoint; views, not copies.

    Args:
        weight: [E, N, K], a layer's weight.
        names: one name or several, with ``{}`` in place of the expert's number. Several names split
            the rows of each expert evenly, in order, for example
            ``["...{}.gate_proj.weight", "...{}.up_proj.weight"]`` for a layer that computes both.
        experts: the experts' numbers in the checkpoint; 0 to E - 1 by default.

    Returns:
        Tensors by name. A :class:`grouped_linear.GroupedTensor` gives for each name the e4m3 data
        and, under the name with ``_scale_inv`` appended, the scales. Any other weight gives its
        data.

    Raises:
        ValueError: if `experts` has not E numbers, or the rows cannot be split evenly.
        RuntimeError: for a quantized weight that is viewed in another shape.

    >>> w = GroupedTensor.quantize(torch.ones(2, 32, 16))
    >>> {name: list(t.shape) for name, t in expert_tensors(w, "experts.{}.weight").items()}
    {'experts.0.weight': [32, 16], 'experts.0.weight_scale_inv': [1, 1],
     'experts.1.weight': [32, 16], 'experts.1.weight_scale_inv': [1, 1]}
    """
    names, numbers, rows = _expert_rows("expert_tensors", weight, names, experts)
    weight = weight.detach()
    quantized = isinstance(weight, (GroupedTensor, GroupedTensorWithMaster))
    if quantized and len(names) > 1:
        _check_whole_blocks("expert_tensors", rows)
    tensors = {}
    for e, number in enumerate(numbers):
        for i, name in enumerate(names):
            if isinstance(weight, (GroupedTensor, GroupedTensorWithMaster)):
                blocks = ceil_div(rows, BLOCK)
                tensors[name.format(number)] = weight.q[e, i * rows : (i + 1) * rows]
                scale = weight.scale[e, i * blocks : (i + 1) * blocks]
                tensors[name.format(number) + SCALE] = scale
            else:
                tensors[name.format(number)] = weight[e, i * rows : (i + 1) * rows]
    return tensors


def save_sharded(
    tensors: Mapping[str, Tensor], directory: str | Path, *, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write tensors to ``model-*-of-*.safetensors`` and their index.

    Args:
        tensors: by name, for example those of :func:`expert_tensors`.
        directory: created if it does not exist.
        max_shard_bytes: the largest size of a file; a larger tensor gets a file of its own.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    room = max_shard_bytes
    for name, t in tensors.items():
        if t.nbytes > room and shards[-1]:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = t
        room -= t.nbytes
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def load_experts(
    weight: Tensor,
    directory: str | Path,
    names: str | Sequence[str],
    *,
    experts: Sequence[int] | None = None,
) -> None:
    """Fill a layer's weight from the experts' tensors of a checkpoint.

    A :class:`grouped_linear.GroupedTensor` takes quantized experts bit for bit, and quantizes
    experts in high precision. Any other weight takes the dequantized numbers. Names, shapes and
    dtypes are checked first, so an error leaves the weight unchanged.

    Args:
        weight: [E, N, K], written: a layer's weight.
        directory: has ``model.safetensors.index.json`` and the files that it names, or one
            ``model.safetensors``.
        names, experts: see :func:`expert_tensors`. With expert parallelism, those of this process.

    Raises:
        ValueError: for a tensor that is missing or has a wrong shape or dtype, and as
            :func:`expert_tensors`.
        FileNotFoundError: if the directory has neither file.

    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> w = GroupedTensor.quantize(torch.randn(2, 32, 16))
    >>> save_sharded(expert_tensors(w, "experts.{}.weight"), directory)
    >>> other = GroupedTensor.quantize(torch.zeros(2, 32, 16))
    >>> load_experts(other, directory, "experts.{}.weight")
    >>> torch.equal(other, w)
    True
    """
    names, numbers, rows = _expert_rows("load_experts", weight, names, experts)
    shape = [rows, weight.size(2)]
    with ExitStack() as stack:
        checkpoint = _Checkpoint(Path(directory), stack)
        dtype = checkpoint.dtype(names[0].format(numbers[0]))
        if dtype != QUANTIZED and dtype not in HIGH_PRECISION:
            known = ", ".join((QUANTIZED, *HIGH_PRECISION))
            raise ValueError(
                f"load_experts: {names[0].format(numbers[0])} must be one of {known}, got {dtype}"
            )
        if dtype == QUANTIZED and len(names) > 1:
            _check_whole_blocks("load_experts", rows)
        for number in numbers:
            for name in names:
                checkpoint.check(name.format(number), shape, (dtype,))
                if dtype == QUANTIZED:
                    blocks = [ceil_div(size, BLOCK) for size in shape]
                    # Some checkpoints have scales in BF16. They convert to float32 exactly.
                    checkpoint.check(name.format(number) + SCALE, blocks, ("F32", "BF16"))
        for e, number in enumerate(numbers):
            w = torch.cat([checkpoint.read(name.format(number)) for name in names])
            if dtype == QUANTIZED:
                scales = [checkpoint.read(name.format(number) + SCALE).float() for name in names]
                w = GroupedTensor.from_parts(w, torch.cat(scales), columnwise=False)
            weight[e].copy_(quantized_as(weight[e], w.to(weight.device)))


class _Checkpoint:
    """The files of a directory, each opened on its first use."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self.stack = directory, stack
        self.open: dict[str, Any] = {}
        index = directory / INDEX
        if index.exists():
            self.file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (directory / SINGLE).exists():
            self.file_of = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise FileNotFoundError(f"load_experts: {directory} has neither {INDEX} nor {SINGLE}")

    def _file(self, file: str) -> Any:
        if file not in self.open:
            opened = safe_open(self.directory / file, framework="pt")
            self.open[file] = self.stack.enter_context(opened)
        return self.open[file]

    def _slice(self, name: str) -> Any:
        if name not in self.file_of:
            raise ValueError(f"load_experts: {self.directory} has no tensor {name}")
        return self._file(self.file_of[name]).get_slice(name)

    def dtype(self, name: str) -> str:
        return self._slice(name).get_dtype()

    def check(self, name: str, shape: list[int], dtypes: tuple[str, ...]) -> None:
        dtype, found = self.dtype(name), self._slice(name).get_shape()
        if dtype not in dtypes:
            raise ValueError(f"load_experts: {name} must be {' or '.join(dtypes)}, got {dtype}")
        if found != shape:
            raise ValueError(f"load_experts: {name} must be {shape}, got {found}")

    def read(self, name: str) -> Tensor:
        return self._file(self.file_of[name]).get_tensor(name)


def _expert_rows(
    function: str, weight: Tensor, names: str | Sequence[str], experts: Sequence[int] | None
) -> tuple[list[str], list[int], int]:
    """The names, the experts' numbers, and how many rows of an expert each name has."""
    if isinstance(weight, (GroupedTensor, GroupedTensorWithMaster)):
        weight.check_whole()
    names = [names] if isinstance(names, str) else list(names)
    E, N, _ = weight.shape
    numbers = list(range(E)) if experts is None else list(experts)
    if len(numbers) != E:
        raise ValueError(
            f"{function}: the weight has {E} experts, got the numbers of {len(numbers)}"
        )
    for name in names:
        if "{}" not in name:
            raise ValueError(f"{function}: a name needs {{}} for the expert's number, got {name}")
    if N % len(names):
        raise ValueError(f"{function}: {N} rows cannot be shared by {len(names)} names")
    return names, numbers, N // len(names)


def _check_whole_blocks(function: str, rows: int) -> None:
    if rows % BLOCK:
        raise ValueError(
            f"{function}: names that share a quantized expert must each have a multiple of "
            f"{BLOCK} rows, got {rows}"
        )
