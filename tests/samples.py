"""Inputs for every op: used by opcheck, by the numbers and by the errors.

T rows, E groups, K in_features, N out_features, Tp = padded_rows(T, E). Quantized operands come
from the reference, with NaN wherever bytes of a layout are unspecified, so that no leak hides.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import reference
import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves, tree_map

from grouped_linear import (
    DelayedScaling,
    DelayedScalingState,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
    SwiGLU,
    ops,
)

OPS = (
    "splits_to_offsets",
    "group_quantize",
    "group_quantize_current",
    "group_quantize_delayed_",
    "group_quantize_mx",
    "group_round_mx",
    "sort_by_expert",
    "gather_sum",
    "gather_dot",
    "swiglu",
    "swiglu_grad",
    "group_quantize_swiglu",
    "group_quantize_swiglu_grad",
    "group_dequantize",
    "group_dequantize_t",
    "grouped_bias_grad",
    "quantize_weight",
    "quantize_weight_list",
    "quantize_weight_current",
    "quantize_weight_delayed_",
    "refresh_weight_",
    "refresh_weight_current_",
    "refresh_weight_delayed_",
    "refresh_weight_mx_",
    "update_scales_",
    "grouped_mm",
    "grouped_mm_list",
    "grouped_scaled_mm",
    "grouped_mm_wgrad",
    "grouped_scaled_mm_wgrad",
    "grouped_mm_wgrad_",
    "grouped_scaled_mm_wgrad_",
    "grouped_mm_wgrad_list_",
    "grouped_scaled_mm_wgrad_list_",
    "block_scaled_linear",
    "block_scaled_linear_grad",
)
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


AOTI_READS_DTYPES = TorchVersion(torch.__version__) >= (2, 12)
aoti_reads_dtypes = pytest.mark.skipif(
    not AOTI_READS_DTYPES,
    reason="AOTInductor of torch 2.11 takes the dtype that an op is given for another one",
)


def devices(*ops: str) -> list[Any]:
    """The devices that all of these ops run on, for parametrize."""
    cpu, cuda = pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=needs_hopper)
    return [cpu, cuda] if CUDA_OPS.issuperset(ops) else [cpu]


@contextmanager
def skipping_for_old_transformers() -> Iterator[None]:
    """Around what imports the integration: skips where the installed library is too old for it."""
    try:
        yield
    except ImportError as error:
        if "transformers must be" not in str(error):
            raise
        pytest.skip(str(error), allow_module_level=True)


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
SHAPES = ("unaligned", "one_group", "200_groups")
WIDE = {
    "wide_in": Groups((5, 0, 12), 20, K=2880, N=144),
    "wide_out": Groups((5, 0, 12), 20, K=144, N=2880),
}


# Inductor's options for reduce-overhead mode that may not give up in silence.
STRICT_GRAPHS = {
    "triton.cudagraph_or_error": True,
    "graph_partition": False,  # which splits in silence what one graph cannot hold
    "force_disable_caches": True,
}


class Swiglu(torch.autograd.Function):
    """Our ops, unfused."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, offs: Tensor, activation: SwiGLU) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate_up, offs)
        return ops.swiglu(gate_up, offs, activation)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None, None]:
        return ops.swiglu_grad(dh, *ctx.saved_tensors, ctx.activation), None, None


# --- tensors -------------------------------------------------------------------------------------


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides."""
    if layout == "dense":
        return x
    if layout == "strided":  # rows further apart than they are long
        wide = x.new_full((*x.shape[:-1], x.size(-1) + 24), torch.nan)
        wide[..., 8:-16] = x
        return wide[..., 8:-16]
    if layout == "odd":  # rows that are not aligned
        wide = x.new_full((*x.shape[:-1], x.size(-1) + 3), torch.nan)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
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


def apart(experts: Tensor) -> list[Tensor]:
    """Tensors of their own for each expert; `list` would give views, one after the other."""
    return [expert.clone() for expert in experts]


def listed(
    groups: Groups, dtype: torch.dtype, layout: str, options: dict[str, Any]
) -> list[Tensor]:
    """A weight as one tensor, as views of one, or (by default) as tensors apart."""
    w_ENK = weight(groups, dtype, layout)
    match options.pop("experts", "apart"):
        case "packed":
            return [w_ENK]
        case "views":
            return list(w_ENK)
    return apart(w_ENK)


def quantized_rows(groups: Groups, features: int) -> tuple[Tensor, Tensor]:
    """q [T, features] and scale [blocks, round_up(T, 4)] in the op's layout."""
    q, scale_T = reference.quantize_rowwise(rows(groups, features, FP32), reference.Scaling(False))
    scale = torch.full((scale_T.size(0), -(-groups.T // 4) * 4), torch.nan)
    scale[:, : groups.valid] = scale_T[:, : groups.valid]
    return q, scale


def per_group_rows(
    groups: Groups, features: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, features], q_t [Tp / 128, features, 128] and scale [E] in the op's layout."""
    offs, scaling = groups.offs(), reference.Scaling(False)
    q, scale = reference.quantize_groups(rows(groups, features, FP32), offs, scaling, dtype)
    used = reference.in_column_blocks(q, offs)
    q_t = torch.full((groups.blocks, features, 128), reference.E4M3_NAN, dtype=torch.uint8)
    q_t[: len(used)] = used.view(torch.uint8)
    return q, q_t.view(dtype), scale


def per_group_weight(groups: Groups) -> tuple[Tensor, Tensor]:
    """q [E, N, K] and scale [E]."""
    w_ENK = weight(groups, FP32)
    q, scale = reference.quantize(w_ENK, (1, 2), reference.Scaling(False))
    return q, scale.flatten()


def quantized_columns(
    groups: Groups, features: int, share_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """q_t [Tp / 128, features, 128] and scale_t [Tp / 128, features] in the op's layout."""
    used, scales = reference.quantize_columnwise(
        rows(groups, features, FP32), groups.offs(), reference.Scaling(False), share_scales
    )
    q_t = torch.full((groups.blocks, features, 128), reference.E4M3_NAN, dtype=torch.uint8)
    scale_t = torch.full((groups.blocks, scales.size(1)), torch.nan)
    q_t[: len(used)], scale_t[: len(used)] = used.view(torch.uint8), scales
    return q_t.view(reference.E4M3), scale_t


def on(device: str, value: Any) -> Any:
    """A tensor on a device with the strides it has here; other values as they are."""
    if isinstance(value, list):
        return [on(device, v) for v in value]
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


# --- recipes -------------------------------------------------------------------------------------

RECIPES: dict[str, Recipe] = {
    "none": None,
    "block": Float8BlockScaling(),
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=3),
    "mxfp8": MXFP8BlockScaling(),
}
MORE_RECIPES: dict[str, Recipe] = {
    **RECIPES,
    "block_exact": Float8BlockScaling(False, 1e-4),
    "block_own": Float8BlockScaling(share_x_scales=False),
    "current_e5m2": Float8CurrentScaling(True, 1e-4, reference.E5M2),
}


def state_for(recipe: Recipe, E: int, device: str) -> DelayedScalingState | None:
    """Scales as some steps might have left them, where the recipe keeps any."""
    if not isinstance(recipe, DelayedScaling):
        return None
    state = DelayedScalingState(recipe, E)
    for operand, scale in zip(state.operands, (0.008, 0.009, 0.0001), strict=True):
        operand.scale.copy_(scale * (1 + torch.arange(E) % 5 / 7))
    return state.to(device)


def scheme_of(recipe: Recipe, E: int) -> reference.Scheme:
    """The recipe as the reference knows it; the state's scales where it keeps a state."""
    match recipe:
        case Float8BlockScaling(pow2, epsilon, share_x_scales):
            return reference.Scaling(pow2, epsilon, share_x_scales)
        case Float8CurrentScaling(pow2, epsilon, gradient_dtype):
            return reference.Current(reference.Scaling(pow2, epsilon), gradient_dtype)
        case MXFP8BlockScaling():
            return reference.Mx()
        case DelayedScaling():
            state = state_for(recipe, E, "cpu")
            assert state is not None
            return reference.Delayed(*(operand.scale for operand in state.operands))
    return None


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

    @property
    def written(self) -> list[str]:
        """The arguments that the schema marks as written and that are there."""
        marked = [a.name for a in self.schema.arguments if a.alias_info and a.alias_info.is_write]
        return [name for name in marked if self.arguments.get(name) is not None]

    def __call__(self) -> Any:
        return self.overload(**self.arguments)

    def results(self, device: str) -> list[Tensor]:
        """What the call on a device returns and then what it writes, on CPU."""
        there = self.on(device)
        there = there.but(**{n: tree_map(torch.clone, there[n]) for n in self.written})
        results = tree_leaves([there(), [there[n] for n in self.written]])
        return [t.detach().cpu() for t in results if t is not None]


def specified(sample: Sample, results: list[Tensor]) -> list[Tensor]:
    """Results as the contract specifies them: other bytes of quantized data zeroed."""
    return keep(results, specified_masks(sample, results))


# Of the outputs of an op that quantizes rows: what is unspecified past the last group's rows
# ("rows", or "columns" where a column is a row's) and past the last used block ("blocks").
UNSPECIFIED = {
    "group_quantize": ("rows", "columns", "blocks", "blocks"),
    "group_quantize_swiglu": ("rows", "columns", "blocks", "blocks"),
    "group_quantize_swiglu_grad": ("rows", "columns", "blocks", "blocks"),
    "group_quantize_current": ("rows", None, "blocks"),
    "group_quantize_delayed_": ("rows", "blocks"),
    "group_quantize_mx": ("rows", "rows", "blocks", "blocks"),
    "group_round_mx": ("rows", "rows"),
    "block_scaled_linear": (None, None, "blocks", "blocks"),
}


def specified_masks(sample: Sample, results: list[Tensor]) -> list[Tensor]:
    masks = [torch.ones(t.shape, dtype=torch.bool) for t in results]
    if sample.op in UNSPECIFIED:
        inputs = (sample.arguments.get(name) for name in ("rows", "x", "gate_up"))
        T = next(t.size(0) for t in inputs if t is not None)
        splits = sample.arguments.get("m_splits")
        offs = sample["offs"] if splits is None else splits.cumsum(0)
        valid = reference.groups(offs, T)[-1].stop
        blocks = len(reference.row_blocks(offs, T))
        for mask, kind in zip(masks, UNSPECIFIED[sample.op], strict=False):
            if kind == "columns":
                mask[..., valid:] = False
            elif kind is not None:
                mask[valid if kind == "rows" else blocks :] = False
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
            if options.pop("factor", False):
                tensors |= {"factor": torch.randn(groups.T)}
                tensors["factor"][groups.valid :] = torch.nan
        case "sort_by_expert":
            E, shape = len(groups.m_splits), (groups.T, options.pop("C", 3))
            experts = torch.randint(-2, E + 2, shape).to(options.pop("index", torch.int64))
            if layout == "transposed":
                experts = experts.t().contiguous().t()
            tensors = {"experts": experts, "num_experts": E}
        case "gather_sum" | "gather_dot":
            R, C = groups.T + 3, options.pop("C", 3)
            index = options.pop("index", torch.int64)
            tensors = {"y": lay_out(torch.randn(R, K).to(dtype), layout)}
            tensors |= {"rows": torch.randint(R, (groups.T, C)).to(index)}
            if op == "gather_dot":
                a = lay_out(torch.randn(groups.T, K).to(dtype), layout)
                tensors = {"a": a, **tensors}
            elif options.pop("weight", True):
                tensors |= {"weight": torch.randn(groups.T, C)}
        case "group_quantize_current":
            tensors = {"x": rows(groups, K, dtype, layout), "offs": offs}
            tensors |= {"dtype": options.pop("fp8", reference.E4M3)}
        case "group_quantize_delayed_":
            amax = torch.rand(groups.E) if options.pop("amax", True) else None
            tensors = {"amax": amax, "x": rows(groups, K, dtype, layout), "offs": offs}
            tensors |= {"scale": 0.005 + 0.01 * torch.rand(groups.E)}
            tensors |= {"dtype": options.pop("fp8", reference.E4M3)}
        case "group_quantize_mx" | "group_round_mx":
            tensors = {"x": rows(groups, K, dtype, layout), "offs": offs}
        case "swiglu" | "group_quantize_swiglu":
            tensors = {"gate_up": rows(groups, 2 * K, dtype, layout), "offs": offs}
        case "swiglu_grad" | "group_quantize_swiglu_grad":
            tensors = {"dh": rows(groups, K, dtype, layout)}
            tensors |= {"gate_up": rows(groups, 2 * K, dtype, layout), "offs": offs}
        case "group_dequantize":
            q, scale = quantized_rows(groups, K)
            tensors = {"q": q, "scale": scale, "offs": offs, "dtype": dtype}
        case "group_dequantize_t":
            q_t, scale_t = quantized_columns(groups, K, options.pop("share_scales", False))
            tensors = {"q_t": q_t, "scale_t": scale_t, "offs": offs}
            tensors |= {"num_rows": groups.T, "dtype": dtype}
        case "grouped_bias_grad":
            tensors = {"dy": rows(groups, N, dtype, layout), "offs": offs}
        case "quantize_weight" | "quantize_weight_current":
            tensors = {"w": weight(groups, dtype, layout)}
        case "quantize_weight_list":
            tensors = {"w": list(weight(groups, dtype, layout))}
        case "refresh_weight_" | "refresh_weight_current_" | "refresh_weight_delayed_":
            if op == "refresh_weight_":
                q, scale, q_t = reference.quantize_weight(weight(groups, FP32), reference.Scaling())
            else:
                q, scale = per_group_weight(groups)
                q_t = q.view(torch.uint8).transpose(1, 2).contiguous().view(q.dtype)
            tensors = {"w": listed(groups, dtype, layout, options), "refresh": None}
            if op == "refresh_weight_delayed_":
                amax = torch.rand(groups.E) if options.pop("amax", True) else None
                state = 0.005 + 0.01 * torch.rand(groups.E)
                tensors = {"amax": amax, "w": tensors["w"], "state": state, "refresh": None}
            tensors |= {"q": q, "scale": scale}
            tensors |= {"q_t": q_t if options.pop("columnwise", True) else None}
        case "refresh_weight_mx_":
            tensors = {"w": listed(groups, dtype, layout, options), "refresh": None}
            tensors |= {"w_rowwise": weight(groups, BF16)}
            columnwise = options.pop("columnwise", True)
            tensors |= {"w_columnwise": weight(groups, BF16) if columnwise else None}
        case "quantize_weight_delayed_":
            amax = torch.rand(groups.E) if options.pop("amax", True) else None
            tensors = {"amax": amax, "w": weight(groups, dtype, layout)}
            tensors |= {"scale": 0.005 + 0.01 * torch.rand(groups.E)}
        case "update_scales_":
            steps = options.pop("steps", (4, 1))
            sizes = (groups.E, 2 * groups.E)
            tensors = {
                "scale": [torch.rand(E) + 0.1 for E in sizes],
                "amax": [torch.randn(E).clamp(min=0) for E in sizes],
                "amax_history": [
                    torch.randn(h, E).clamp(min=0) for h, E in zip(steps, sizes, strict=True)
                ],
                "fp8_max": [448.0, 57344.0],
            }
        case "grouped_mm":
            tensors = {"a": rows(groups, K, dtype, layout), "b": weight(groups, dtype, layout)}
            tensors |= {"offs": offs}
        case "grouped_mm_list":
            b = listed(groups, dtype, layout, options)
            if options.get("transpose_b"):
                b = [b_e.t().contiguous() for b_e in b]
            tensors = {"a": rows(groups, K, dtype, layout), "b": b, "offs": offs}
        case "grouped_scaled_mm":
            per_group = options.pop("per_group", None)
            if per_group is None:
                a, scale_a = quantized_rows(groups, K)
                b, scale_b, _ = reference.quantize_weight(
                    weight(groups, FP32), reference.Scaling(False)
                )
            else:
                a, _, scale_a = per_group_rows(groups, K, per_group)
                b, scale_b = per_group_weight(groups)
            tensors = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "offs": offs}
            tensors |= {"out_dtype": dtype}
        case "grouped_mm_wgrad" | "grouped_mm_wgrad_" | "grouped_mm_wgrad_list_":
            tensors = {"dy": rows(groups, N, dtype, layout), "x": rows(groups, K, dtype, layout)}
            tensors |= {"offs": offs}
        case (
            "grouped_scaled_mm_wgrad" | "grouped_scaled_mm_wgrad_" | "grouped_scaled_mm_wgrad_list_"
        ):
            per_group = options.pop("per_group", None)
            if per_group is None:
                dy_t, scale_dy_t = quantized_columns(groups, N)
                x_t, scale_x_t = quantized_columns(groups, K, options.pop("share_scales", False))
            else:
                _, dy_t, scale_dy_t = per_group_rows(groups, N, per_group)
                _, x_t, scale_x_t = per_group_rows(groups, K, reference.E4M3)
            tensors = {"dy_t": dy_t, "x_t": x_t, "scale_dy_t": scale_dy_t, "scale_x_t": scale_x_t}
            tensors |= {"offs": offs}
            if op == "grouped_scaled_mm_wgrad":
                tensors |= {"out_dtype": dtype}
        case "block_scaled_linear":
            tensors = {"x": rows(groups, K, dtype, layout), "w": weight(groups, dtype, layout)}
            tensors |= {"m_splits": torch.tensor(groups.m_splits)}
        case "block_scaled_linear_grad":
            _, scale_w, w_t = reference.quantize_weight(weight(groups, FP32), reference.Scaling())
            x_t, scale_x_t = quantized_columns(groups, K, options.pop("share_scales", False))
            tensors = {"dy": rows(groups, N, dtype, layout), "offs": offs}
            tensors |= {"x_t": x_t, "scale_x_t": scale_x_t, "w_t": w_t, "scale_w": scale_w}
        case _:
            raise ValueError(op)
    if op.endswith(("wgrad_", "wgrad_list_")):
        grad_dtype = options.pop("grad_dtype", FP32)
        main_grad = torch.randn(groups.E, N, K).to(grad_dtype)
        main_grad[:, 0, 0] = -0.0  # adding zero would make it 0.0
        if op.endswith("list_"):
            main_grad = apart(main_grad) if options.pop("apart", True) else list(main_grad)
        tensors = {"main_grad": main_grad, **tensors}
    if options.pop("bias", False):
        bias_dtype = options.get("out_dtype", tensors.get("out_dtype", dtype))
        options["bias"] = torch.randn(groups.E, N).to(bias_dtype)
    for flag in ("overwrite", "refresh"):
        if flag in options:
            options[flag] = torch.tensor(options[flag])
    for name in options.pop("requires_grad", ()):
        (options if name in options else tensors)[name].requires_grad_()
    return Sample(op, {**tensors, **options})


# What SwiGLU is made of in models. No row of the samples is far from 1: limits are near it, too.
FORMS: dict[str, dict[str, Any]] = {
    "limit": {"limit": 0.75},
    "alpha_beta": {"alpha": 1.702, "beta": 1.0},
    "interleaved": {"interleaved": True},
    "all_of_it": {"alpha": 1.702, "beta": 1.0, "limit": 1.5, "interleaved": True},
    "negative": {"alpha": -1.5, "beta": -0.5},
}
_LAYOUTS: dict[str, Any] = {x: {"layout": x} for x in ("strided", "transposed", "expanded")}
_SWIGLU: dict[str, Any] = {
    **_LAYOUTS,
    **FORMS,
    "odd": {"layout": "odd"},
    "odd_limit": {"layout": "odd", "limit": 0.75},
    "odd_interleaved": {"layout": "odd", "interleaved": True},
}
_OUT: dict[str, Any] = {
    f"out_{name}": {"out_dtype": d} for name, d in (("bf16", BF16), ("fp32", FP32))
}
_MAIN_GRAD: dict[str, Any] = {
    "overwrite": {"overwrite": True},
    "add": {"overwrite": False},
    "bf16": {"grad_dtype": BF16},
}
_PER_GROUP: dict[str, Any] = {
    "per_group": {"per_group": reference.E4M3},
    "per_group_e5m2": {"per_group": reference.E5M2},
}
_SHARED: dict[str, Any] = {"shared": {"share_scales": True}}
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
        "shared": {"columnwise": True, "bias_grad": True, "share_scales": True},
        "gathered": {"columnwise": True, "bias_grad": True, "index": torch.int32},
        "scaled": {"columnwise": True, "bias_grad": True, "index": torch.int64, "factor": True},
        "scaled_strided": {
            "columnwise": True,
            "index": torch.int32,
            "layout": "strided",
            "factor": True,
        },
        "gathered_strided": {
            "columnwise": True,
            "index": torch.int64,
            "layout": "strided",
            "share_scales": True,
        },
    },
    "sort_by_expert": {
        "many": {"C": 11, "index": torch.int32},
        "none": {"C": 0},
        "transposed": {"layout": "transposed"},
    },
    "gather_sum": {
        "unweighted": {"weight": False},
        "many": {"C": 11, "index": torch.int32},
        "none": {"C": 0},
        "strided": {"layout": "strided"},
        "transposed": {"layout": "transposed"},
    },
    "gather_dot": {
        "many": {"C": 11, "index": torch.int32},
        "none": {"C": 0},
        "strided": {"layout": "strided"},
        "transposed": {"layout": "transposed"},
    },
    "swiglu": _SWIGLU,
    "swiglu_grad": _SWIGLU,
    "group_quantize_swiglu": {
        "both": {"columnwise": True, "keep_h": True},
        "shared": {"columnwise": True, "share_scales": True},
        "columnwise": {"rowwise": False, "columnwise": True},
        "exact_scales": {"columnwise": True, "power_of_two_scales": False, "amax_epsilon": 0.5},
        **{name: {"columnwise": True, **v} for name, v in _SWIGLU.items()},
    },
    "group_quantize_swiglu_grad": {
        "both": {"columnwise": True, "bias_grad": True},
        "columnwise": {"rowwise": False, "columnwise": True},
        "exact_scales": {"columnwise": True, "power_of_two_scales": False, "amax_epsilon": 0.5},
        **{name: {"columnwise": True, **v} for name, v in _SWIGLU.items()},
    },
    "group_quantize_current": {
        "both": {"columnwise": True, "bias_grad": True},
        "columnwise": {"rowwise": False, "columnwise": True},
        "e5m2": {"fp8": reference.E5M2, "columnwise": True, "bias_grad": True},
        "powers_of_two": {"columnwise": True, "power_of_two_scales": True, "amax_epsilon": 5.0},
        **{name: {"columnwise": True, **v} for name, v in _LAYOUTS.items()},
    },
    "group_quantize_delayed_": {
        "both": {"columnwise": True, "bias_grad": True},
        "columnwise": {"rowwise": False, "columnwise": True},
        "e5m2": {"fp8": reference.E5M2, "columnwise": True, "bias_grad": True},
        "no_amax": {"amax": False, "columnwise": True},
        **{name: {"columnwise": True, **v} for name, v in _LAYOUTS.items()},
    },
    **{
        op: {
            "both": {"columnwise": True, "bias_grad": True},
            "columnwise": {"rowwise": False, "columnwise": True},
            **{name: {"columnwise": True, **v} for name, v in _LAYOUTS.items()},
        }
        for op in ("group_quantize_mx", "group_round_mx")
    },
    "grouped_bias_grad": _LAYOUTS,
    "quantize_weight_list": {
        "rowwise": {"columnwise": False},
        "exact_scales": {"power_of_two_scales": False, "amax_epsilon": 0.5},
        "strided": {"layout": "strided"},
        "transposed": {"layout": "transposed"},
    },
    **{
        op: {
            "yes": {"refresh": True, "experts": "views"},
            "no": {"refresh": False},
            "packed": {"experts": "packed", "refresh": True},
            "rowwise": {"columnwise": False, **options},
            "transposed": {"layout": "transposed", "experts": "packed"},
        }
        for op, options in (
            ("refresh_weight_", {"power_of_two_scales": False}),
            ("refresh_weight_current_", {"power_of_two_scales": True, "amax_epsilon": 5.0}),
            ("refresh_weight_delayed_", {"amax": False}),
            ("refresh_weight_mx_", {}),
        )
    },
    "quantize_weight_current": {
        "rowwise": {"columnwise": False},
        "powers_of_two": {"power_of_two_scales": True, "amax_epsilon": 5.0},
        "transposed": {"layout": "transposed"},
    },
    "quantize_weight_delayed_": {
        "rowwise": {"columnwise": False},
        "no_amax": {"amax": False},
        "transposed": {"layout": "transposed"},
    },
    "update_scales_": {
        "most_recent": {"most_recent": True},
        "margin": {"margin": 3},
        "long": {"steps": (1024, 1500)},
    },
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
    "grouped_mm_list": {
        "views": {"experts": "views", "bias": True},
        "transposed": {"transpose_b": True, "out_dtype": FP32},
    },
    "grouped_scaled_mm": {"bias": {"bias": True}, **_PER_GROUP},
    "grouped_mm_wgrad": {**_LAYOUTS, **_OUT},
    "grouped_mm_wgrad_": {**_MAIN_GRAD, **_LAYOUTS},
    "grouped_mm_wgrad_list_": {**_MAIN_GRAD, "views": {"apart": False}},
    "grouped_scaled_mm_wgrad_list_": {**_MAIN_GRAD, "views": {"apart": False, "overwrite": True}},
    "group_dequantize_t": _SHARED,
    "grouped_scaled_mm_wgrad": {**_PER_GROUP, **_SHARED},
    "grouped_scaled_mm_wgrad_": {**_MAIN_GRAD, **_PER_GROUP, **_SHARED},
    "block_scaled_linear": {
        "bias": {"bias": True},
        "rowwise": {"columnwise_x": False, "columnwise_w": False},
        "exact_scales": {"power_of_two_scales": False, "amax_epsilon": 0.5},
        "strided": {"layout": "strided"},
        **_SHARED,
    },
    "block_scaled_linear_grad": {
        "bias": {"bias_grad": True, "out_dtype": FP32},
        "of_x": {"x_t": None, "scale_x_t": None},
        "of_w": {"w_t": None, "scale_w": None, "power_of_two_scales": False, "amax_epsilon": 0.5},
        "expanded": {"layout": "expanded"},
        **_SHARED,
    },
}


def variant_of(op: str, groups: Groups, variant: str, dtype: torch.dtype) -> Sample:
    """The sample of one of `cases`, on CPU."""
    return make(op, groups, dtype, **VARIANTS.get(op, {}).get(variant, {}))


def cases(*ops: str) -> list[Any]:
    """Every sample of these ops, for parametrize(("op", "groups", "variant", "device"), ...)."""
    params = []
    for op in ops:
        # The kernels of these are those of other ops, which meet all group sizes.
        shared = "_list" in op or op.startswith(("refresh_weight_", "block_scaled_linear"))
        plans = [(name, "plain") for name in (SHAPES if shared else GROUPS)]
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
