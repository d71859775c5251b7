"""Arguments for every op. Opcheck, the comparisons of numbers and the error tests use them.

T rows, E groups, K in_features, N out_features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from support import reference
from support.devices import overload
from support.groups import Groups
from support.reference import Scaling
from support.tensors import (
    BF16,
    FP32,
    gathered,
    lay_out,
    listed,
    on,
    per_expert,
    per_group_rows,
    per_group_weight,
    per_row,
    quantized_columns,
    quantized_rows,
    rows,
    weight,
)


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
        """The argument, or its default in the schema."""
        default = {a.name: a.default_value for a in self.schema.arguments}[name]
        return self.arguments.get(name, default)

    def on(self, device: str) -> "Sample":
        return Sample(self.op, {name: on(device, v) for name, v in self.arguments.items()})

    def but(self, **changed: Any) -> "Sample":
        return Sample(self.op, {**self.arguments, **changed})

    @property
    def written(self) -> list[str]:
        """Names of the given arguments that the op writes, by its schema."""
        marked = [a.name for a in self.schema.arguments if a.alias_info and a.alias_info.is_write]
        return [name for name in marked if self.arguments.get(name) is not None]

    def __call__(self) -> Any:
        return self.overload(**self.arguments)

    def results(self, device: str) -> list[Tensor]:
        """The tensors that the call returns, then those that it writes. All on the CPU."""
        there = self.on(device)
        there = there.but(**{n: tree_map(torch.clone, there[n]) for n in self.written})
        results = tree_leaves([there(), [there[n] for n in self.written]])
        return [t.detach().cpu() for t in results if t is not None]


def specified(sample: Sample, results: list[Tensor]) -> list[Tensor]:
    """The results, with zeros in the bytes that the contract leaves unspecified."""
    return keep(results, specified_masks(sample, results))


# Of the outputs of an op that quantizes rows: what is unspecified past the last group's rows
# ("rows", or "columns" where a column is a row's) and past the last used block ("blocks").
UNSPECIFIED = {
    "group_quantize": ("rows", "columns", "blocks", "blocks"),
    "group_quantize_swiglu": ("rows", "columns", "blocks", "blocks"),
    "group_quantize_swiglu_grad": (
        *("rows", "columns", "blocks", "blocks"),
        None,  # bias_grad
        *("blocks", "blocks"),  # of h
    ),
    "group_quantize_current": ("rows", None, "blocks"),
    "group_quantize_delayed": ("rows", "blocks"),
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
    """The results, with zeros where a mask is false. float8 becomes the numbers of its bytes."""
    numbers = [t.view(torch.uint8).float() if t.itemsize == 1 else t for t in results]
    return [torch.where(mask, t, 0) for mask, t in zip(masks, numbers, strict=True)]


def make(
    op: str, groups: Groups, dtype: torch.dtype, /, layout: str = "dense", **options: Any
) -> Sample:
    """A sample on the CPU.

    Options are further arguments by name. `bias=True` makes a bias, `overwrite=True` a flag tensor,
    `gathers="rows"` the numbers of an operand's rows.
    """
    offs, (K, N) = groups.offs(), (groups.K, groups.N)
    tensors: dict[str, Any]
    match op:
        case "splits_to_offsets":
            tensors = {"m_splits": torch.tensor(groups.m_splits), "num_rows": groups.T}
        case "group_quantize":
            tensors = {"x": rows(groups, K, dtype, layout), "offs": offs}
            if index := options.pop("index", None):
                tensors |= gathered(groups, K, dtype, layout, index)
        case "topk_experts":
            scores = torch.randn(groups.T, options.pop("E", 40)).to(dtype)
            tensors = {"scores": lay_out(scores, layout), "k": options.pop("k", 3)}
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
        case "scatter_rows":
            C, index = options.pop("C", 3), options.pop("index", torch.int64)
            places = torch.randperm(groups.T * C).view(groups.T, C).to(index)
            tensors = {"x": lay_out(torch.randn(groups.T, K).to(dtype), layout), "rows": places}
            tensors |= {"num_rows": groups.T * C}
        case "group_quantize_current":
            tensors = {"x": rows(groups, K, dtype, layout), "offs": offs}
            tensors |= {"out_dtype": options.pop("fp8", reference.E4M3)}
        case "group_quantize_delayed":
            amax = torch.rand(groups.E) if options.pop("amax", True) else None
            tensors = {"amax": amax, "x": rows(groups, K, dtype, layout), "offs": offs}
            tensors |= {"scale": 0.005 + 0.01 * torch.rand(groups.E)}
            tensors |= {"out_dtype": options.pop("fp8", reference.E4M3)}
        case "group_quantize_mx" | "group_round_mx":
            tensors = {"x": rows(groups, K, dtype, layout), "offs": offs}
        case "swiglu" | "group_quantize_swiglu":
            tensors = {"gate_up": rows(groups, 2 * K, dtype, layout), "offs": offs}
        case "swiglu_grad" | "group_quantize_swiglu_grad":
            tensors = {"dh": rows(groups, K, dtype, layout)}
            tensors |= {"gate_up": rows(groups, 2 * K, dtype, layout)}
            tensors |= {"weight": per_row(groups, layout), "offs": offs}
        case "group_dequantize":
            q, scale = quantized_rows(groups, K)
            tensors = {"q": q, "scale": scale, "offs": offs, "out_dtype": dtype}
        case "group_dequantize_t":
            q_t, scale_t = quantized_columns(groups, K, options.pop("share_scales", False))
            tensors = {"q_t": q_t, "scale_t": scale_t, "offs": offs}
            tensors |= {"num_rows": groups.T, "out_dtype": dtype}
        case "grouped_bias_grad":
            tensors = {"dy": rows(groups, N, dtype, layout), "offs": offs}
        case "quantize_weight" | "quantize_weight_current":
            tensors = {"w": weight(groups, dtype, layout)}
        case "transpose_weight":
            q = weight(groups, FP32, layout).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors = {"q": q if layout == "dense" else lay_out(q, layout)}
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
        case "quantize_weight_delayed":
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
        case "adam_weight_":
            q, scale, q_t = reference.quantize_weight(weight(groups, FP32), reference.Scaling())
            grad, exp_avg, exp_avg_sq, max_exp_avg_sq = (weight(groups, dtype) for _ in range(4))
            tensors = {
                "q": q,
                "scale": scale,
                "q_t": q_t if options.pop("columnwise", True) else None,
            }
            tensors |= {"grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq.square()}
            amsgrad = options.pop("amsgrad", False)
            tensors |= {"max_exp_avg_sq": max_exp_avg_sq.square() if amsgrad else None}
            tensors |= {"step": torch.tensor(3.0), "lr_tensor": None, "grad_scale": None}
            tensors |= {"found_inf": None, "lr": 0.1, "beta1": 0.9, "beta2": 0.99}
            tensors |= {"weight_decay": 0.1, "eps": 1e-6}
            for name in ("lr_tensor", "grad_scale", "found_inf"):
                if name in options:
                    tensors[name] = torch.tensor(options.pop(name))
        case "grouped_mm":
            tensors = {"a": rows(groups, K, dtype, layout), "b": weight(groups, dtype, layout).mT}
            tensors |= {"offs": offs}
        case "grouped_mm_swiglu":
            N = 2 * options.pop("F", 64)
            tensors = {"a": rows(groups, K, dtype, layout)}
            b = weight(replace(groups, N=N), dtype, layout).mT
            if options.pop("transposed_b", False):  # as GPT-OSS stores it
                b = b.contiguous()
            tensors |= {"b": b, "offs": offs}
        case "grouped_mm_swiglu_grad":
            features = options.pop("F", 64)
            b = weight(replace(groups, K=features, N=K), dtype, layout)
            if options.pop("transposed_b", False):
                b = b.mT.contiguous().mT
            tensors = {"a": rows(groups, K, dtype, layout), "b": b}
            tensors |= {"gate_up": rows(groups, 2 * features, dtype, layout)}
            tensors |= {"weight": per_row(groups, layout), "offs": offs}
        case "grouped_mm_list":
            b = listed(groups, dtype, layout, options)
            if not options.setdefault("transpose_b", True):
                b = [b_e.t().contiguous() for b_e in b]
            tensors = {"a": rows(groups, K, dtype, layout), "b": b, "offs": offs}
        case "grouped_scaled_mm":
            per_group = options.pop("per_group", None)
            if per_group is None:
                a, scale_a = quantized_rows(groups, K)
                b, scale_b, _ = reference.quantize_weight(
                    weight(groups, FP32), reference.Scaling(False)
                )
                scale_b = scale_b.mT
            else:
                a, _, scale_a = per_group_rows(groups, K, per_group)
                b, scale_b = per_group_weight(groups)
            tensors = {"a": a, "b": b.mT, "scale_a": scale_a, "scale_b": scale_b, "offs": offs}
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
    if gathers := options.pop("gathers", None):
        tensors |= gathering(groups, tensors, gathers, options.pop("index", torch.int32), layout)
    if op.endswith(("wgrad_", "wgrad_list_")):
        grad_dtype = options.pop("grad_dtype", FP32)
        main_grad = torch.randn(groups.E, N, K).to(grad_dtype)
        main_grad[:, 0, 0] = -0.0  # adding zero would make it 0.0
        if op.endswith("list_"):
            main_grad = (
                per_expert(main_grad) if options.pop("per_expert", True) else list(main_grad)
            )
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


# By the name of the numbers: the operand whose rows they are.
GATHERED = {"rows": "a", "dy_rows": "dy", "x_rows": "x"}


def gathering(
    groups: Groups, tensors: dict[str, Any], numbers: str, index: torch.dtype, layout: str
) -> dict[str, Any]:
    """A GEMM's operand of other rows, and the numbers of those to gather.

    Past the last group's rows they are no numbers of rows.
    """
    operand = tensors[GATHERED[numbers]]
    source = Groups((groups.T + 3,), groups.T + 3)
    numbers_T = torch.randint(source.T, (groups.T,)).to(index)
    numbers_T[groups.valid :] = torch.iinfo(index).min
    if "scale_a" in tensors:
        a, scale_a = quantized_rows(source, operand.size(1))
        return {"a": a, "scale_a": scale_a, numbers: numbers_T}
    own = rows(source, operand.size(1), operand.dtype, layout)
    return {GATHERED[numbers]: own, numbers: numbers_T}


def gathered_before(sample: Sample) -> Sample:
    """The same GEMM of rows that were gathered before it."""
    for numbers, operand in GATHERED.items():
        rows_T = sample.arguments.get(numbers)
        if rows_T is None or sample.op == "group_quantize":
            continue
        rows_T = rows_T.long().clamp(min=0)
        changed = {operand: sample[operand][rows_T], numbers: None}
        if "scale_a" in sample.arguments:
            changed["scale_a"] = F.pad(sample["scale_a"][:, rows_T], (0, -len(rows_T) % 4))
        return sample.but(**changed)
    return sample


def scaling_of(sample: Sample) -> Scaling:
    return Scaling(sample.get("power_of_two_scales"), sample.get("amax_epsilon"))
