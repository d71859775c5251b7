"""Calls of the GEMMs.

T rows, E groups, K in_features, N out_features. Arguments are on the CPU. Operands hold NaN past
the last group's rows, and row numbers there are none.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from grouped_linear.selftest import expected as must
from grouped_linear.selftest import reference
from grouped_linear.selftest.case import (
    BF16,
    FP32,
    POWERS,
    Arguments,
    Case,
    numbers,
)
from grouped_linear.selftest.expected import Output, Outputs
from grouped_linear.selftest.operands import (
    Groups,
    per_group_rows,
    per_group_weight,
    quantized_columns,
    quantized_rows,
    rows,
    weight,
)
from grouped_linear.selftest.reference import E4M3, E5M2, Scaling


def gemms(groups: Groups, dtype: torch.dtype) -> Iterator[Case]:
    """GEMMs of operands that are not FP8: fprop, dgrad, wgrad, gathered rows."""
    x, dy, w_ENK = (
        rows(groups, groups.K, dtype),
        rows(groups, groups.N, dtype),
        weight(groups, dtype),
    )
    offs, bias = groups.offs(), torch.randn(groups.E, groups.N)
    w_EKN, w_list = w_ENK.transpose(1, 2), [w.clone() for w in w_ENK]
    y = must.gemm(x, w_EKN, groups, dtype, bias.to(dtype))
    dx = must.gemm(dy, w_ENK, groups, dtype)
    fprop = {"a": x, "offs": offs, "bias": bias.to(dtype)}
    yield Case("grouped_mm", {**fprop, "b": w_EKN}, [y])
    yield Case("grouped_mm", {"a": dy, "b": w_ENK, "offs": offs}, [dx], "dgrad")
    yield Case("grouped_mm_list", {**fprop, "b": w_list, "transpose_b": True}, [y])
    yield Case("grouped_mm_list", {"a": dy, "b": w_list, "offs": offs}, [dx], "dgrad")
    in_float32 = must.gemm(x, w_EKN, groups, FP32, bias)
    arguments: Arguments = {"a": x, "b": w_EKN, "offs": offs, "bias": bias, "out_dtype": FP32}
    yield Case("grouped_mm", arguments, [in_float32], "into float32")

    source, index = torch.randn(groups.valid + 3, groups.K).to(dtype), numbers(groups)
    gathered = reference.gather(source, index, offs)
    y = must.gemm(gathered, w_EKN, groups, dtype)
    arguments = {"a": source, "b": w_EKN, "offs": offs, "rows": index}
    yield Case("grouped_mm", arguments, [y], "gathered")
    dw = must.wgrad(dy, gathered, groups, dtype)
    arguments = {"dy": dy, "x": source, "offs": offs, "x_rows": index}
    yield Case("grouped_mm_wgrad", arguments, [dw], "gathered")

    given: Arguments = {"dy": dy, "x": x, "offs": offs}
    yield Case("grouped_mm_wgrad", given, [must.wgrad(dy, x, groups, dtype)])
    arguments = {**given, "out_dtype": FP32}
    yield Case("grouped_mm_wgrad", arguments, [must.wgrad(dy, x, groups, FP32)], "into float32")
    yield from accumulated("grouped_mm_wgrad", given, dy, x, groups, scaled=False)


def swiglu_gemms(groups: Groups, dtype: torch.dtype) -> Iterator[Case]:
    """GEMMs that go on with SwiGLU or its gradient. Every sum of the GEMMs is exact."""
    F, offs, index = 64, groups.offs(), numbers(groups)

    def small(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape).to(dtype) / 4

    source, weight_T = small(groups.valid + 3, groups.K), torch.rand(groups.T)
    weight_T[groups.valid :] = torch.nan
    a = reference.gather(source, index, offs)
    a[groups.valid :] = torch.nan
    up = 4 * small(groups.E, 2 * F, groups.K)
    b, down = up.mT, 4 * small(groups.E, groups.K, F)
    gate_up = must.gemm(a, b, groups, dtype).expected.to(dtype)
    dh = must.gemm(a, down, groups, dtype).expected.to(dtype)
    forms: tuple[Arguments, ...] = (
        {},
        {"limit": 1.5, "beta": 1.0},
        {"interleaved": True},
        {"cubic": 0.25},
    )
    for form in forms:
        outputs: Outputs = [Output(gate_up), must.swiglu(gate_up, groups, form)]
        grads = must.swiglu_grad(dh, gate_up, weight_T, groups, form)
        given = {"gate_up": gate_up, "weight": weight_T, "offs": offs, **form}
        given["b"] = down
        what = ", ".join(form)
        sources: tuple[tuple[Tensor, Arguments], ...] = ((a, {}), (source, {"rows": index}))
        for rows_of, more in sources:
            gathered = f"{what} gathered" if more else what
            arguments = {"a": rows_of, "b": b, "offs": offs, **more, **form}
            yield Case("grouped_mm_swiglu", arguments, outputs, gathered)
            arguments = {"a": rows_of, **given, **more}
            yield Case("grouped_mm_swiglu_grad", arguments, [*grads], gathered)


def accumulated(
    op: str, given: Arguments, dy_TN: Tensor, x_TK: Tensor, groups: Groups, scaled: bool
) -> Iterator[Case]:
    """wgrad that is added to float32, and written over bfloat16; a tensor and one an expert."""
    for dtype, overwrite in ((FP32, None), (BF16, torch.tensor(True))):
        before = torch.randn(groups.E, groups.N, groups.K).to(dtype)
        added_to = before if overwrite is None else None
        dw = must.wgrad(dy_TN, x_TK, groups, dtype, scaled, added_to)
        arguments = {**given, "overwrite": overwrite}
        yield Case(f"{op}_", {"main_grad": before, **arguments}, [dw])
        assert dw.allowed is not None
        parts: Outputs = [Output(*both) for both in zip(dw.expected, dw.allowed, strict=True)]
        yield Case(f"{op}_list_", {"main_grad": [g.clone() for g in before], **arguments}, parts)


def scaled_gemms(groups: Groups, dtype: torch.dtype) -> Iterator[Case]:
    """FP8 GEMMs with scales of blocks, and with scales of groups in both formats."""
    offs, bias = groups.offs(), torch.randn(groups.E, groups.N).to(dtype)
    q, scale = quantized_rows(groups, groups.K)
    x = reference.dequantize_rowwise(q, scale, offs)
    w_q, w_scale, w_q_t = reference.quantize_weight(weight(groups, FP32), Scaling(False))
    w = reference.dequantize_weight(w_q, w_scale)
    arguments: Arguments = {"a": q, "b": w_q.mT, "scale_a": scale, "scale_b": w_scale.mT}
    arguments |= {"offs": offs, "out_dtype": dtype}
    y = must.gemm(x, w.mT, groups, dtype, bias, scaled=True)
    yield Case("grouped_scaled_mm", {**arguments, "bias": bias}, [y])
    d, d_scale = quantized_rows(groups, groups.N)
    dy = reference.dequantize_rowwise(d, d_scale, offs)
    dx = must.gemm(dy, w, groups, dtype, scaled=True)
    of_dgrad = {"a": d, "b": w_q_t.mT, "scale_a": d_scale, "scale_b": w_scale}
    yield Case("grouped_scaled_mm", {**arguments, **of_dgrad}, [dx], "dgrad")

    index = numbers(groups)
    source = Groups((groups.valid + 3,), groups.valid + 3)
    q, scale = quantized_rows(source, groups.K)
    whole = reference.dequantize_rowwise(q, scale, source.offs())
    y = must.gemm(reference.gather(whole, index, offs), w.mT, groups, dtype, scaled=True)
    gathered = {**arguments, "a": q, "scale_a": scale, "rows": index}
    yield Case("grouped_scaled_mm", gathered, [y], "gathered")

    dy_t, x_t = quantized_columns(groups, groups.N), quantized_columns(groups, groups.K, True)
    dy, x = (reference.dequantize_columnwise(*t, offs, groups.T) for t in (dy_t, x_t))
    given: Arguments = {"dy_t": dy_t[0], "x_t": x_t[0], "scale_dy_t": dy_t[1], "scale_x_t": x_t[1]}
    given |= {"offs": offs}
    dw = must.wgrad(dy, x, groups, dtype, scaled=True)
    yield Case("grouped_scaled_mm_wgrad", {**given, "out_dtype": dtype}, [dw])
    yield from accumulated("grouped_scaled_mm_wgrad", given, dy, x, groups, scaled=True)

    w_q, w_scale = per_group_weight(groups)
    w = w_q.double() * w_scale.double().view(-1, 1, 1)
    x_q, x_q_t, x_scale = per_group_rows(groups, groups.K, E4M3)
    x = reference.scale_groups(x_q, x_scale, offs)
    for fp8 in (E4M3, E5M2):
        a, _, scale = per_group_rows(groups, groups.K, fp8)
        of_groups: Arguments = {
            "a": a,
            "b": w_q.mT,
            "scale_a": scale,
            "scale_b": w_scale,
            "offs": offs,
        }
        of_groups |= {"out_dtype": dtype}
        y = must.gemm(reference.scale_groups(a, scale, offs), w.mT, groups, dtype, scaled=True)
        yield Case("grouped_scaled_mm", of_groups, [y], "scales of groups")
        d, d_t, scale = per_group_rows(groups, groups.N, fp8)
        of_groups = {
            "dy_t": d_t,
            "x_t": x_q_t,
            "scale_dy_t": scale,
            "scale_x_t": x_scale,
        }
        of_groups |= {"offs": offs, "out_dtype": dtype}
        dw = must.wgrad(reference.scale_groups(d, scale, offs), x, groups, dtype, scaled=True)
        yield Case("grouped_scaled_mm_wgrad", of_groups, [dw], "scales of groups")


def layer(groups: Groups, dtype: torch.dtype) -> Iterator[Case]:
    """A layer's forward and its backward under block scaling, as one op each."""
    x, dy, w_ENK = (
        rows(groups, groups.K, dtype),
        rows(groups, groups.N, dtype),
        weight(groups, dtype),
    )
    offs, bias = groups.offs(), torch.randn(groups.E, groups.N).to(dtype)

    def of_rows(t: Tensor) -> Tensor:
        return reference.dequantize_rowwise(*reference.quantize_rowwise(t, POWERS), offs)

    def of_columns(t: Tensor) -> Tensor:
        columns = reference.quantize_columnwise(t, offs, POWERS)
        return reference.dequantize_columnwise(*columns, offs, groups.T)

    q, scale, q_t = reference.quantize_weight(w_ENK, POWERS)
    w = reference.dequantize_weight(q, scale)
    x_t = must.columnwise(x, groups, POWERS)
    outputs: Outputs = [
        must.gemm(of_rows(x), w.mT, groups, dtype, bias, scaled=True),
        Output(offs),
        *x_t,
        Output(q_t),
        Output(scale),
    ]
    arguments: Arguments = {
        "x": x,
        "w": w_ENK,
        "m_splits": torch.tensor(groups.m_splits),
        "bias": bias,
    }
    yield Case("block_scaled_linear", arguments, outputs)
    outputs = [
        must.gemm(of_rows(dy), w, groups, dtype, scaled=True),
        must.wgrad(of_columns(dy), of_columns(x), groups, dtype, scaled=True),
        must.bias_grad(dy, groups),
    ]
    x_q_t, x_scale_t = (padded(output, groups.blocks) for output in x_t if output)
    arguments = {
        "dy": dy,
        "offs": offs,
        "x_t": x_q_t,
        "scale_x_t": x_scale_t,
        "w_t": q_t,
    }
    arguments |= {"scale_w": scale, "bias_grad": True}
    yield Case("block_scaled_linear_grad", arguments, outputs)


def padded(output: Output, blocks: int) -> Tensor:
    """Columnwise data with blocks of NaN after those that are used."""
    used = output.expected
    size = (blocks - len(used), *used.shape[1:])
    if used.itemsize == 1:
        nan = torch.full(size, reference.E4M3_NAN, dtype=torch.uint8)
        return torch.cat([used.view(torch.uint8), nan]).view(used.dtype)
    return torch.cat([used, used.new_full(size, torch.nan)])
