"""Inputs for every op: used by opcheck, by the numbers and by the errors.

T rows, E groups, K in_features, N out_features, Tp = padded_rows(T, E). Quantized operands come
from the reference, with NaN wherever bytes of a layout are unspecified, so that no leak hides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

import grouped_linear  # noqa: F401  registers the ops

OPS = (
    "splits_to_offsets",
    "group_quantize",
    "swiglu",
    "swiglu_grad",
    "group_quantize_swiglu",
    "group_quantize_swiglu_grad",
    "group_dequantize",
    "group_dequantize_t",
    "grouped_bias_grad",
    "quantize_weight",
    "grouped_mm",
    "grouped_scaled_mm",
    "grouped_mm_wgrad",
    "grouped_scaled_mm_wgrad",
    "grouped_mm_wgrad_",
    "grouped_scaled_mm_wgrad_",
)
QUANTIZERS = ("group_quantize", "group_quantize_swiglu", "group_quantize_swiglu_grad")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
try:
    from grouped_linear._host import CUDA_VERSION  # None where no CUDA compiler was found
except ImportError:  # the module is optional
    CUDA_VERSION = torch.version.cuda
CUDA_OPS = set() if CUDA_VERSION is None else set(OPS)  # the ops that have a CUDA kernel
needs_hopper = pytest.mark.skipif(
    not (HOPPER and CUDA_OPS),
    reason="needs a GPU of compute capability 9.0 (Hopper), and nvcc when it was built",
)


def devices(*ops: str) -> list[Any]:
    """The devices that all of these ops run on, for parametrize."""
    cpu, cuda = pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=needs_hopper)
    return [cpu, cuda] if CUDA_OPS.issuperset(ops) else [cpu]


def overload(op: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.grouped_linear, op).default


# --- group sizes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """m_splits and the rows there are; K and N to go with them."""

    m_splits: tuple[int, ...]
    T: int
    K: int = 144
    N: int = 272

    @property
    def E(self) -> int:
        return len(self.m_splits)

    @property
    def valid(self) -> int:
        return sum(self.m_splits)

    @property
    def blocks(self) -> int:
        """The blocks of columnwise data there is room for: Tp / 128."""
        return (self.T + 127 * min(self.E, self.T)) // 128

    def offs(self) -> Tensor:
        return torch.tensor(self.m_splits).cumsum(0).int()


GROUPS = {
    "unaligned": Groups((3, 130, 40), 173),
    "empty_first": Groups((0, 5, 9), 14),
    "empty_middle": Groups((130, 0, 0, 9), 139),
    "empty_last": Groups((7, 6, 0), 13),
    "all_empty": Groups((0, 0, 0), 6),
    "no_rows": Groups((0, 0), 0),
    "one_takes_all": Groups((0, 257, 0), 257),
    "capacity": Groups((10, 0, 131), 202),
    "one_group": Groups((129,), 129),
    "two_groups": Groups((128, 256), 384),
    "17_groups": Groups(tuple(e * 7 % 13 for e in range(17)), 120, K=48, N=32),
    "200_groups": Groups(tuple(e % 3 for e in range(200)), 210, K=16, N=32),
}
WIDE = {
    "wide_in": Groups((5, 0, 12), 20, K=2880, N=144),
    "wide_out": Groups((5, 0, 12), 20, K=144, N=2880),
}


# --- tensors -------------------------------------------------------------------------------------


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides."""
    if layout == "dense":
        return x
    if layout == "strided":  # rows further apart than they are long
        wide = x.new_full((*x.shape[:-1], x.size(-1) + 24), torch.nan)
        wide[..., 8:-16] = x
        return wide[..., 8:-16]
    if layout == "transposed":  # the inner dimension is not dense
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    raise ValueError(layout)


def rows(groups: Groups, features: int, dtype: torch.dtype, layout: str = "dense") -> Tensor:
    """Normal numbers for each group's rows, NaN after them."""
    if layout == "expanded":  # y.sum().backward() makes such a dy
        return torch.full((), 0.3, dtype=dtype).expand(groups.T, features)
    x = torch.randn(groups.T, features)
    x[groups.valid :] = torch.nan
    return lay_out(x.to(dtype), layout)


def gathered(
    groups: Groups, features: int, dtype: torch.dtype, layout: str, index: torch.dtype
) -> dict[str, Tensor]:
    """x, and rows of it for each group's; what rows hold after them is no index."""
    S = groups.valid + 3
    x = lay_out(torch.randn(S, features).to(dtype), layout)
    taken = torch.randint(S, (groups.T,)).to(index)
    taken[groups.valid :] = torch.iinfo(index).min
    return {"x": x, "rows": taken}


def weight(groups: Groups, dtype: torch.dtype, layout: str = "dense") -> Tensor:
    return lay_out(torch.randn(groups.E, groups.N, groups.K).to(dtype), layout)


def quantized_rows(groups: Groups, features: int) -> tuple[Tensor, Tensor]:
    """q [T, features] and scale [blocks, round_up(T, 4)] in the op's layout."""
    q, scale_T = reference.quantize_rowwise(rows(groups, features, FP32), reference.Scaling(False))
    scale = torch.full((scale_T.size(0), -(-groups.T // 4) * 4), torch.nan)
    scale[:, : groups.valid] = scale_T[:, : groups.valid]
    return q, scale


def quantized_columns(groups: Groups, features: int) -> tuple[Tensor, Tensor]:
    """q_t [Tp / 128, features, 128] and scale_t [Tp / 128, features] in the op's layout."""
    used, scales = reference.quantize_columnwise(
        rows(groups, features, FP32), groups.offs(), reference.Scaling(False)
    )
    shape = (groups.blocks, features)
    q_t = torch.full((*shape, 128), reference.E4M3_NAN, dtype=torch.uint8)
    scale_t = torch.full(shape, torch.nan)
    q_t[: len(used)], scale_t[: len(used)] = used.view(torch.uint8), scales
    return q_t.view(reference.E4M3), scale_t


def on(device: str, value: Any) -> Any:
    """A tensor on a device with the strides it has here; other values as they are."""
    if not isinstance(value, Tensor) or value.device.type == device:
        return value
    flat = value.detach().as_strided((value.untyped_storage().nbytes() // value.itemsize,), (1,), 0)
    there = flat.to(device).as_strided(value.size(), value.stride(), value.storage_offset())
    return there.requires_grad_(value.requires_grad)


def bits(t: Tensor) -> Tensor:
    """The bytes of a tensor, to compare NaN and signs of zero too."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(bits(actual), bits(expected))


# --- samples -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One call of one op, its arguments by name."""

    op: str
    arguments: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def overload(self) -> torch._ops.OpOverload:
        return overload(self.op)

    @property
    def schema(self) -> torch._C.FunctionSchema:
        return self.overload._schema

    def get(self, name: str) -> Any:
        """The argument, or what the schema says it is by default."""
        default = {a.name: a.default_value for a in self.schema.arguments}[name]
        return self.arguments.get(name, default)

    def on(self, device: str) -> "Sample":
        return Sample(self.op, {name: on(device, v) for name, v in self.arguments.items()})

    def but(self, **changed: Any) -> "Sample":
        return Sample(self.op, {**self.arguments, **changed})

    def __call__(self) -> Any:
        return self.overload(**self.arguments)

    def results(self, device: str) -> list[Tensor]:
        """What the call on a device returns or writes, on CPU."""
        there = self.on(device)
        if "main_grad" in there.arguments:
            there = there.but(main_grad=there["main_grad"].clone())
        outputs = there()
        if "main_grad" in there.arguments:
            outputs = there["main_grad"]
        return [t.detach().cpu() for t in (outputs if isinstance(outputs, tuple) else (outputs,))]


def specified(sample: Sample, results: list[Tensor]) -> list[Tensor]:
    """Results as the contract specifies them: other bytes of quantized data zeroed."""
    return keep(results, specified_masks(sample, results))


def specified_masks(sample: Sample, results: list[Tensor]) -> list[Tensor]:
    masks = [torch.ones(t.shape, dtype=torch.bool) for t in results]
    if sample.op in QUANTIZERS:
        inputs = (sample.arguments.get(name) for name in ("rows", "x", "gate_up"))
        T = next(t.size(0) for t in inputs if t is not None)
        offs = sample["offs"]
        valid = reference.groups(offs, T)[-1].stop
        blocks = len(reference.row_blocks(offs, T))
        q, scale, q_t, scale_t, _ = masks
        q[valid:], scale[..., valid:], q_t[blocks:], scale_t[blocks:] = 4 * (False,)
    return masks


def keep(results: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """Results with zero where a mask is false, float8 as numbers of its bytes."""
    numbers = [t.view(torch.uint8).float() if t.itemsize == 1 else t for t in results]
    return [torch.where(mask, t, 0) for mask, t in zip(masks, numbers, strict=True)]


def sentence(call: Callable[[], Any]) -> str:
    """What a call that should fail says."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


def make(
    op: str, groups: Groups, dtype: torch.dtype, /, layout: str = "dense", **options: Any
) -> Sample:
    """A sample on CPU. Options are further arguments by name; bias and overwrite: True for one."""
    offs, (K, N) = groups.offs(), (groups.K, groups.N)
    tensors: dict[str, Any]
    match op:
        case "splits_to_offsets":
            tensors = {"m_splits": torch.tensor(groups.m_splits), "num_rows": groups.T}
        case "group_quantize":
            tensors = {"x": rows(groups, K, dtype, layout), "offs": offs}
            if index := options.pop("index", None):
                tensors |= gathered(groups, K, dtype, layout, index)
        case "swiglu" | "group_quantize_swiglu":
            tensors = {"gate_up": rows(groups, 2 * K, dtype, layout), "offs": offs}
        case "swiglu_grad" | "group_quantize_swiglu_grad":
            tensors = {"dh": rows(groups, K, dtype, layout)}
            tensors |= {"gate_up": rows(groups, 2 * K, dtype, layout), "offs": offs}
        case "group_dequantize":
            q, scale = quantized_rows(groups, K)
            tensors = {"q": q, "scale": scale, "offs": offs, "dtype": dtype}
        case "group_dequantize_t":
            q_t, scale_t = quantized_columns(groups, K)
            tensors = {"q_t": q_t, "scale_t": scale_t, "offs": offs}
            tensors |= {"num_rows": groups.T, "dtype": dtype}
        case "grouped_bias_grad":
            tensors = {"dy": rows(groups, N, dtype, layout), "offs": offs}
        case "quantize_weight":
            tensors = {"w": weight(groups, dtype, layout)}
        case "grouped_mm":
            tensors = {"a": rows(groups, K, dtype, layout), "b": weight(groups, dtype, layout)}
            tensors |= {"offs": offs}
        case "grouped_scaled_mm":
            a, scale_a = quantized_rows(groups, K)
            b, scale_b, _ = reference.quantize_weight(
                weight(groups, FP32), reference.Scaling(False)
            )
            tensors = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "offs": offs}
            tensors |= {"out_dtype": dtype}
        case "grouped_mm_wgrad" | "grouped_mm_wgrad_":
            tensors = {"dy": rows(groups, N, dtype, layout), "x": rows(groups, K, dtype, layout)}
            tensors |= {"offs": offs}
        case "grouped_scaled_mm_wgrad" | "grouped_scaled_mm_wgrad_":
            (dy_t, scale_dy_t), (x_t, scale_x_t) = (quantized_columns(groups, f) for f in (N, K))
            tensors = {"dy_t": dy_t, "x_t": x_t, "scale_dy_t": scale_dy_t, "scale_x_t": scale_x_t}
            tensors |= {"offs": offs}
            if op == "grouped_scaled_mm_wgrad":
                tensors |= {"out_dtype": dtype}
        case _:
            raise ValueError(op)
    if op.endswith("_"):
        grad_dtype = options.pop("grad_dtype", FP32)
        main_grad = torch.randn(groups.E, N, K).to(grad_dtype)
        main_grad[:, 0, 0] = -0.0  # adding zero would make it 0.0
        tensors = {"main_grad": main_grad, **tensors}
    if options.pop("bias", False):
        bias_dtype = options.get("out_dtype", tensors.get("out_dtype", dtype))
        options["bias"] = torch.randn(groups.E, N).to(bias_dtype)
    if "overwrite" in options:
        options["overwrite"] = torch.tensor(options["overwrite"])
    for name in options.pop("requires_grad", ()):
        (options if name in options else tensors)[name].requires_grad_()
    return Sample(op, {**tensors, **options})


_LAYOUTS: dict[str, Any] = {x: {"layout": x} for x in ("strided", "transposed", "expanded")}
_OUT: dict[str, Any] = {
    f"out_{name}": {"out_dtype": d} for name, d in (("bf16", BF16), ("fp32", FP32))
}
_MAIN_GRAD: dict[str, Any] = {
    "overwrite": {"overwrite": True},
    "add": {"overwrite": False},
    "bf16": {"grad_dtype": BF16},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "splits_to_offsets": {
        "aligned": {"alignment": 128},
        "scaled": {"stride": 144, "dtype": torch.int64},
    },
    "group_quantize": {
        "both": {"columnwise": True, "bias_grad": True},
        "columnwise": {"rowwise": False, "columnwise": True},
        "exact_scales": {"columnwise": True, "power_of_two_scales": False, "amax_epsilon": 0.5},
        **{name: {"columnwise": True, **v} for name, v in _LAYOUTS.items()},
        "gathered": {"columnwise": True, "bias_grad": True, "index": torch.int32},
        "gathered_strided": {"columnwise": True, "index": torch.int64, "layout": "strided"},
    },
    "swiglu": _LAYOUTS,
    "swiglu_grad": _LAYOUTS,
    "group_quantize_swiglu": {
        "both": {"columnwise": True, "keep_h": True},
        "columnwise": {"rowwise": False, "columnwise": True},
        "exact_scales": {"columnwise": True, "power_of_two_scales": False, "amax_epsilon": 0.5},
        **{name: {"columnwise": True, **v} for name, v in _LAYOUTS.items()},
    },
    "group_quantize_swiglu_grad": {
        "both": {"columnwise": True, "bias_grad": True},
        "columnwise": {"rowwise": False, "columnwise": True},
        "exact_scales": {"columnwise": True, "power_of_two_scales": False, "amax_epsilon": 0.5},
        **{name: {"columnwise": True, **v} for name, v in _LAYOUTS.items()},
    },
    "grouped_bias_grad": _LAYOUTS,
    "quantize_weight": {
        "rowwise": {"columnwise": False},
        "exact_scales": {"power_of_two_scales": False, "amax_epsilon": 0.5},
        "strided": {"layout": "strided"},
        "transposed": {"layout": "transposed"},
    },
    "grouped_mm": {
        "bias": {"bias": True},
        "grad": {"bias": True, "requires_grad": ("a", "b", "bias")},
        "grad_of_a": {"requires_grad": ("a",)},
        "grad_of_b": {"requires_grad": ("b",)},
        "strided": {"layout": "strided"},
        "transposed": {"layout": "transposed"},
        "bias_fp32": {"bias": True, "out_dtype": FP32},
        **_OUT,
    },
    "grouped_scaled_mm": {"bias": {"bias": True}},
    "grouped_mm_wgrad": {**_LAYOUTS, **_OUT},
    "grouped_mm_wgrad_": {**_MAIN_GRAD, **_LAYOUTS},
    "grouped_scaled_mm_wgrad_": _MAIN_GRAD,
}


def variant_of(op: str, groups: Groups, variant: str, dtype: torch.dtype) -> Sample:
    """The sample of one of `cases`, on CPU."""
    return make(op, groups, dtype, **VARIANTS.get(op, {}).get(variant, {}))


def cases(*ops: str) -> list[Any]:
    """Every sample of these ops, for parametrize(("op", "groups", "variant", "device"), ...)."""
    params = []
    for op in ops:
        plans = [(name, "plain") for name in GROUPS]
        plans += [(name, v) for v in VARIANTS.get(op, {}) for name in ("unaligned", "capacity")]
        for device in devices(op):
            for name, variant in plans:
                case = pytest.param(
                    op,
                    GROUPS[name],
                    variant,
                    device.values[0],
                    marks=device.marks,
                    id=f"{op}-{name}-{variant}-{device.id}",
                )
                params.append(case)
    return params
