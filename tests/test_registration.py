# SPDX-License-Identifier: Apache-2.0
"""What torch knows about the ops: kernels, schemas, versions, strides; how the package loads."""

import importlib.util
import inspect
import os
import subprocess
import sys
import textwrap
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.utils._pytree import tree_leaves

from grouped_linear import Float8BlockScaling, SwiGLU, ops
from grouped_linear.loading import host_module
from grouped_linear.meta_kernels import rules
from support import reference
from support.commands import run
from support.compare import assert_same_bits
from support.devices import HAS_GPU, needs_gpu
from support.errors import sentence
from support.groups import GROUPS
from support.op_info import overload
from support.ops import OPS
from support.samples import make
from support.tensors import BF16

ROOT = Path(__file__).parent.parent
IN_PLACE = [op for op in OPS if op.endswith("_")]


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_every_kernel(op: str) -> None:
    keys = ["CPU", "CUDA", "Meta"] + ["ADInplaceOrView"] * (op in IN_PLACE)
    missing = [
        key
        for key in keys
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"grouped_linear::{op}", key)
    ]
    assert not missing


@pytest.mark.skipif(
    getattr(host_module(), "CUDA_VERSION", None) is not None, reason="needs a build without CUDA"
)
def test_ops_without_a_cuda_kernel_say_so() -> None:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for op in OPS:
        call = partial(
            overload(op).redispatch, keys, **make(op, GROUPS["unaligned"], BF16).arguments
        )
        said = f"{op}: no CUDA kernel in this build, only CPU: build it again with nvcc"
        assert sentence(call) == said


@pytest.mark.skipif(
    not torch.cuda.is_available() or HAS_GPU, reason="needs a GPU of compute capability below 8.0"
)
def test_older_gpus_are_refused() -> None:
    for op in OPS:
        said = sentence(make(op, GROUPS["unaligned"], BF16).on("cuda"))
        assert "compute capability 8.0 and up" in said or "no CUDA kernel" in said


CALL_GEMMS = """
import torch
from grouped_linear import ops

offs = torch.tensor([3, 5], dtype=torch.int32, device="cuda")
x, w = torch.randn(5, 64, device="cuda"), torch.randn(2, 32, 64, device="cuda")
with torch.profiler.profile() as profile:
    ops.grouped_mm(x.bfloat16(), w.bfloat16().mT, offs)
print(*(event.name for event in profile.events() if "sm90" in event.name or "sm80" in event.name))
"""


NO_PORTABLE_KERNELS = (
    "grouped_mm: GROUPED_LINEAR_PORTABLE is 1, and this library has no portable kernels for "
    "Hopper: unset it, or build with GROUPED_LINEAR_BUILD_PORTABLE=1 in the environment"
)


@needs_gpu
@pytest.mark.parametrize("portable", ["0", "1"])
def test_environment_chooses_portable_kernels(portable: str) -> None:
    """On Hopper: elsewhere they run anyway."""
    environment = {**os.environ, "GROUPED_LINEAR_PORTABLE": portable}
    command = [sys.executable, "-c", CALL_GEMMS]
    said = run(command, env=environment)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    if said.returncode != 0:
        assert (hopper, portable) == (True, "1"), said.stderr
        assert NO_PORTABLE_KERNELS in said.stderr
        pytest.skip("needs a library that was built with GROUPED_LINEAR_BUILD_PORTABLE=1")
    assert ("sm90" if hopper and portable == "0" else "sm80") in said.stdout


def test_schemas() -> None:
    schemas = (str(overload(op)._schema).removeprefix("grouped_linear::") for op in OPS)
    lines = [textwrap.fill(schema, 96, subsequent_indent="    ") for schema in schemas]
    assert_expected_inline(
        "\n".join(lines),
        """\
adam_weight_(Tensor(a!) q, Tensor(b!) scale, Tensor(c!)? q_t, Tensor(d!) master, Tensor(e!)
    grad, Tensor(f!) exp_avg, Tensor(g!) exp_avg_sq, Tensor(h!)? max_exp_avg_sq, Tensor step,
    Tensor? lr_tensor, Tensor? grad_scale, Tensor? found_inf, float lr, float beta1, float
    beta2, float weight_decay, float eps, bool decoupled_weight_decay=True, bool maximize=False,
    float amax_epsilon=0., bool power_of_two_scales=True, int? mxfp4_dim=None) -> ()
addmm(Tensor c, Tensor a, Tensor b) -> Tensor
block_scaled_linear(Tensor x, Tensor w, Tensor m_splits, Tensor? bias=None, float
    amax_epsilon=0., bool power_of_two_scales=True, bool share_scales=False, bool
    columnwise_x=True, bool columnwise_w=True) -> (Tensor y, Tensor offs, Tensor x_t, Tensor
    scale_x_t, Tensor w_t, Tensor scale_w)
block_scaled_linear_grad(Tensor dy, Tensor offs, Tensor? x_t, Tensor? scale_x_t, Tensor? w_t,
    Tensor? scale_w, float amax_epsilon=0., bool power_of_two_scales=True, bool bias_grad=False,
    ScalarType? out_dtype=None) -> (Tensor dx, Tensor dw, Tensor db)
dequantize_mxfp4(Tensor q, Tensor scale, ScalarType out_dtype) -> Tensor
gather_dot(Tensor a, Tensor y, Tensor rows) -> Tensor
gather_sum(Tensor y, Tensor rows, Tensor? weight=None, Tensor? offs=None) -> Tensor
group_dequantize(Tensor q, Tensor scale, Tensor offs, ScalarType out_dtype) -> Tensor
group_dequantize_t(Tensor q_t, Tensor scale_t, Tensor offs, SymInt num_rows, ScalarType
    out_dtype) -> Tensor
group_quantize(Tensor x, Tensor offs, Tensor? rows=None, float amax_epsilon=0., bool
    power_of_two_scales=True, bool rowwise=True, bool columnwise=False, bool bias_grad=False,
    bool share_scales=False) -> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t, Tensor
    bias_grad)
group_quantize_current(Tensor x, Tensor offs, ScalarType out_dtype, float amax_epsilon=0., bool
    power_of_two_scales=False, bool rowwise=True, bool columnwise=False, bool bias_grad=False)
    -> (Tensor q, Tensor scale, Tensor q_t, Tensor bias_grad)
group_quantize_delayed(Tensor x, Tensor offs, Tensor scale, Tensor(a!)? amax, ScalarType
    out_dtype, bool rowwise=True, bool columnwise=False, bool bias_grad=False) -> (Tensor q,
    Tensor scale, Tensor q_t, Tensor bias_grad)
group_quantize_mx(Tensor x, Tensor offs, bool rowwise=True, bool columnwise=False, bool
    bias_grad=False) -> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t, Tensor bias_grad)
group_quantize_swiglu(Tensor gate_up, Tensor offs, float amax_epsilon=0., bool
    power_of_two_scales=True, bool rowwise=True, bool columnwise=False, bool keep_h=False, bool
    share_scales=False, float alpha=1., float beta=0., float? limit=None, bool
    interleaved=False, float cubic=0.) -> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t,
    Tensor h)
group_quantize_swiglu_grad(Tensor dh, Tensor gate_up, Tensor weight, Tensor offs, float
    amax_epsilon=0., bool power_of_two_scales=True, bool rowwise=True, bool columnwise=False,
    bool bias_grad=False, bool h_columnwise=False, bool keep_h=False, bool share_h_scales=False,
    float alpha=1., float beta=0., float? limit=None, bool interleaved=False, float cubic=0.) ->
    (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t, Tensor bias_grad, Tensor h_t, Tensor
    scale_h_t, Tensor h, Tensor d_weight)
group_round_mx(Tensor x, Tensor offs, bool rowwise=True, bool columnwise=False, bool
    bias_grad=False) -> (Tensor x_rowwise, Tensor x_columnwise, Tensor bias_grad)
grouped_bias_grad(Tensor dy, Tensor offs) -> Tensor
grouped_mm(Tensor a, Tensor b, Tensor offs, Tensor? bias=None, ScalarType? out_dtype=None,
    Tensor? rows=None, Tensor? a_low=None, Tensor? b_low=None) -> Tensor
grouped_mm_list(Tensor a, Tensor[] b, Tensor offs, Tensor? bias=None, ScalarType?
    out_dtype=None, bool transpose_b=False, Tensor? rows=None) -> Tensor
grouped_mm_mxfp4(Tensor a, Tensor b, Tensor scale_b, Tensor offs, Tensor? bias=None, Tensor?
    scale_a=None, ScalarType? out_dtype=None, bool transpose_b=True, Tensor? rows=None, Tensor?
    a_low=None, Tensor? b_low=None) -> Tensor
grouped_mm_swiglu(Tensor a, Tensor b, Tensor offs, Tensor? bias=None, Tensor? rows=None, bool
    keep_gate_up=True, float alpha=1., float beta=0., float? limit=None, bool interleaved=False,
    float cubic=0.) -> (Tensor gate_up, Tensor h)
grouped_mm_swiglu_grad(Tensor a, Tensor b, Tensor gate_up, Tensor weight, Tensor offs, Tensor?
    rows=None, float alpha=1., float beta=0., float? limit=None, bool interleaved=False, float
    cubic=0.) -> (Tensor d_gate_up, Tensor h, Tensor d_weight)
grouped_mm_wgrad(Tensor dy, Tensor x, Tensor offs, ScalarType? out_dtype=None, Tensor?
    dy_rows=None, Tensor? x_rows=None) -> Tensor
grouped_mm_wgrad_(Tensor(a!) main_grad, Tensor dy, Tensor x, Tensor offs, Tensor?
    overwrite=None, Tensor? dy_rows=None, Tensor? x_rows=None) -> ()
grouped_mm_wgrad_list_(Tensor(a!)[] main_grad, Tensor dy, Tensor x, Tensor offs, Tensor?
    overwrite=None, Tensor? dy_rows=None, Tensor? x_rows=None) -> ()
grouped_scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offs, Tensor?
    bias=None, ScalarType? out_dtype=None, Tensor? rows=None, Tensor? a_low=None, Tensor?
    b_low=None) -> Tensor
grouped_scaled_mm_wgrad(Tensor dy_t, Tensor x_t, Tensor scale_dy_t, Tensor scale_x_t, Tensor
    offs, ScalarType? out_dtype=None) -> Tensor
grouped_scaled_mm_wgrad_(Tensor(a!) main_grad, Tensor dy_t, Tensor x_t, Tensor scale_dy_t,
    Tensor scale_x_t, Tensor offs, Tensor? overwrite=None) -> ()
grouped_scaled_mm_wgrad_list_(Tensor(a!)[] main_grad, Tensor dy_t, Tensor x_t, Tensor
    scale_dy_t, Tensor scale_x_t, Tensor offs, Tensor? overwrite=None) -> ()
quantize_mxfp4(Tensor w) -> (Tensor q, Tensor scale)
quantize_weight(Tensor w, float amax_epsilon=0., bool power_of_two_scales=True, bool
    columnwise=True, bool rowwise=True, int? mxfp4_dim=None) -> (Tensor q, Tensor scale, Tensor
    q_t)
quantize_weight_current(Tensor w, float amax_epsilon=0., bool power_of_two_scales=False, bool
    columnwise=True) -> (Tensor q, Tensor scale, Tensor q_t)
quantize_weight_delayed(Tensor w, Tensor scale, Tensor(a!)? amax, bool columnwise=True) ->
    (Tensor q, Tensor scale, Tensor q_t)
quantize_weight_list(Tensor[] w, float amax_epsilon=0., bool power_of_two_scales=True, bool
    columnwise=True) -> (Tensor q, Tensor scale, Tensor q_t)
refresh_weight_(Tensor(a!) q, Tensor(b!) scale, Tensor(c!)? q_t, Tensor[] w, Tensor? refresh,
    float amax_epsilon=0., bool power_of_two_scales=True, int? mxfp4_dim=None) -> ()
refresh_weight_current_(Tensor(a!) q, Tensor(b!) scale, Tensor(c!)? q_t, Tensor[] w, Tensor?
    refresh, float amax_epsilon=0., bool power_of_two_scales=False) -> ()
refresh_weight_delayed_(Tensor(a!) q, Tensor(b!) scale, Tensor(c!)? q_t, Tensor(d!)? amax,
    Tensor[] w, Tensor state, Tensor? refresh) -> ()
refresh_weight_mx_(Tensor(a!) w_rowwise, Tensor(b!)? w_columnwise, Tensor[] w, Tensor? refresh)
    -> ()
scatter_rows(Tensor x, Tensor rows, SymInt num_rows) -> Tensor
sort_by_expert(Tensor experts, int num_experts) -> (Tensor choice, Tensor token, Tensor row,
    Tensor offs)
splits_to_offsets(Tensor m_splits, SymInt num_rows, int alignment=1, SymInt stride=1,
    ScalarType? out_dtype=None) -> Tensor
swiglu(Tensor gate_up, Tensor offs, float alpha=1., float beta=0., float? limit=None, bool
    interleaved=False, float cubic=0.) -> Tensor
swiglu_grad(Tensor dh, Tensor gate_up, Tensor weight, Tensor offs, float alpha=1., float
    beta=0., float? limit=None, bool interleaved=False, float cubic=0.) -> (Tensor d_gate_up,
    Tensor h, Tensor d_weight)
topk_experts(Tensor logits, int k, Tensor? expert_bias=None, str score_function="none", bool
    normalize=False, float scaling_factor=1.) -> (Tensor weights, Tensor experts)
topk_experts_grad(Tensor d_weights, Tensor logits, Tensor experts, str score_function="none",
    bool normalize=False, float scaling_factor=1.) -> Tensor
transpose_weight(Tensor q) -> Tensor
update_scales_(Tensor(a!)[] scale, Tensor(b!)[] amax, Tensor(c!)[] amax_history, float[]
    fp8_max, int margin=0, bool most_recent=False) -> ()""",
    )


# Defaults of functions where those of the schemas are None.
OUT_DTYPES = {
    **dict.fromkeys(("group_quantize_current", "group_quantize_delayed"), reference.E4M3),
    **dict.fromkeys(("grouped_scaled_mm", "grouped_scaled_mm_wgrad", "dequantize_mxfp4"), BF16),
}


@pytest.mark.parametrize("op", OPS)
def test_wrappers_take_what_the_schemas_take(op: str) -> None:
    parameters = inspect.signature(getattr(ops, op)).parameters
    form = [field.name for field in fields(SwiGLU)]
    taken = [name for p in parameters for name in (form if p == "activation" else [p])]
    arguments = overload(op)._schema.arguments
    assert taken == [a.name for a in arguments]
    for a in arguments:
        if a.has_default_value() and a.name in parameters and a.name != "out_dtype":
            assert parameters[a.name].default == a.default_value, a
    if "out_dtype" in parameters:
        assert parameters["out_dtype"].default in (OUT_DTYPES.get(op), inspect.Parameter.empty)


# --- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_only_what_is_written_gets_a_new_version(op: str, device: str) -> None:
    """By its version autograd knows that a tensor which a backward needs was written since."""
    flag = {"wgrad": "overwrite", "refresh": "refresh"}
    names = [name for word, name in flag.items() if word in op and op in IN_PLACE]
    for options in ({}, *({name: value} for name in names for value in (True, False))):
        sample = make(op, GROUPS["unaligned"], BF16, **options).on(device)
        assert sample.written or op not in IN_PLACE
        tensors = {
            (name, i): t
            for name, argument in sample.arguments.items()
            for i, t in enumerate(tree_leaves(argument))
            if isinstance(t, Tensor)
        }
        before = {key: t._version for key, t in tensors.items()}
        sample()
        after = {key: t._version > before[key] for key, t in tensors.items()}
        assert after == {key: key[0] in sample.written for key in tensors}


def test_a_main_grad_that_requires_grad_is_refused() -> None:
    main_grad = torch.zeros(1, 16, 16, requires_grad=True)
    ones, offs = torch.ones(2, 16), torch.tensor([2], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"^grouped_mm_wgrad_: main_grad must not require grad$"):
        overload("grouped_mm_wgrad_")(main_grad, ones, ones, offs)
    with torch.no_grad():
        overload("grouped_mm_wgrad_")(main_grad, ones, ones, offs)
    assert (main_grad == 2).all()


# --- strides -------------------------------------------------------------------------------------


def test_inductor_keeps_strides(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Untagged custom ops get the strides they are called with, whatever made the tensors."""
    groups = GROUPS["empty_middle"]
    sample = make("grouped_mm", groups, BF16).on(device)
    arguments, offs = (sample["a"], sample["b"]), sample["offs"]

    def call(x: Tensor, w: Tensor) -> Tensor:
        strided = torch.cat([x + 1, x * 2], 1)[:, : groups.K]  # Inductor's own kernels make these
        view = (w * 2).contiguous()
        return grouped_mm(strided, view, offs) + grouped_mm(x, w, offs)

    grouped_mm = torch.ops.grouped_linear.grouped_mm.default
    compiled = torch.compile(call, fullgraph=True)
    compiled(*arguments)
    seen: list[tuple[tuple[int, ...], ...]] = []
    original = torch._ops.OpOverload.__call__

    def recording(op: torch._ops.OpOverload, /, *args: Any, **kwargs: Any) -> Any:
        if op is grouped_mm:
            seen.append((args[0].stride(), args[1].stride()))
        return original(op, *args, **kwargs)

    monkeypatch.setattr(torch._ops.OpOverload, "__call__", recording)
    actual = compiled(*arguments)
    from_inductor, seen = seen, []
    expected = call(*arguments)
    assert from_inductor == seen
    assert seen[0] == ((2 * groups.K, 1), (groups.N * groups.K, groups.N, 1))
    assert_same_bits(actual, expected)


# --- one truth -----------------------------------------------------------------------------------


def test_host_module_agrees() -> None:
    host = pytest.importorskip(
        "grouped_linear._host", reason="the optional pybind11 module was not built"
    )
    for num_groups in (1, 2, 3, 127, 128, 129, 1000, 1024):
        for num_rows in (0, 1, 2, 127, 128, 129, 255, 256, 1000, 2**31, 2**40):
            expected = rules.padded_rows(num_rows, num_groups)
            assert host.padded_rows(num_rows, num_groups) == expected
    assert host.BLOCK == rules.BLOCK == reference.BLOCK
    assert host.FEATURE_MULTIPLE == rules.FEATURE_MULTIPLE
    assert host.MAX_GROUPS == rules.MAX_GROUPS


def test_host_module_tells_tiles() -> None:
    host = pytest.importorskip(
        "grouped_linear._host", reason="the optional pybind11 module was not built"
    )
    stage = {"rows": 128, "cluster": 2, "narrow_cols": 64}
    assert host.gemm_tile(fp8=True) == {**stage, "cols": 192, "depth": 128, "stages": 4}
    assert host.gemm_tile(fp8=False) == {**stage, "cols": 256, "depth": 64, "stages": 3}


def test_padded_rows_is_enough_and_no_more_than_it_must_be() -> None:
    """The bound is reached: as many groups as rows allow, each a row past a block's end."""
    for num_groups in (1, 2, 5):
        for num_rows in range(0, 700, 7):
            worst = 0
            for small in range(min(num_groups, num_rows) + 1):  # groups of one row, then one large
                rest = num_rows - small
                large = -(-rest // 128) if small < num_groups else 0
                if small < num_groups or rest == 0:
                    worst = max(worst, small + large)
            bound = rules.padded_rows(num_rows, num_groups) // 128
            assert worst == bound, (num_rows, num_groups)


# --- loading -------------------------------------------------------------------------------------


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-c", code], cwd=folder)


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        (
            "custom_ops",
            "ImportError: import grouped_linear, not custom_ops: its ops can be registered only "
            "once, by that name",
        ),
        ("meta_kernels", "ImportError: import grouped_linear.meta_kernels, not meta_kernels"),
    ],
)
def test_folders_are_no_packages(folder: str, said: str) -> None:
    done = run_python(f"import {folder}", ROOT)
    assert done.stderr.strip().splitlines()[-1] == said


def test_recipes_are_values() -> None:
    recipe = Float8BlockScaling(amax_epsilon=0.5)
    assert recipe == Float8BlockScaling(amax_epsilon=0.5)
    assert len({recipe, Float8BlockScaling(amax_epsilon=0.5), Float8BlockScaling()}) == 2
    with pytest.raises(AttributeError, match="cannot assign"):
        recipe.amax_epsilon = 1.0  # type: ignore[misc]


def test_the_library_needs_no_python() -> None:
    spec = importlib.util.find_spec("grouped_linear")
    assert spec is not None
    libraries = [Path(p) / "_C.so" for p in spec.submodule_search_locations or []]
    library = next(path for path in libraries if path.exists())
    content = library.read_bytes()
    assert b"PyObject" not in content
    assert b"libtorch_python" not in content


# --- names ---------------------------------------------------------------------------------------


def test_an_underscore_says_that_the_first_argument_is_written() -> None:
    """As in torch, and as there batch_norm records into running_mean, two ops record into amax."""
    recorded = {"group_quantize_delayed": ["amax"], "quantize_weight_delayed": ["amax"]}
    for op in OPS:
        arguments = overload(op)._schema.arguments
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        if op.endswith("_"):
            assert arguments[0].name in written, op
        else:
            assert written == recorded.get(op, []), op


def test_a_dtype_argument_is_the_results() -> None:
    """And has the name that it has in torch.nn.functional.grouped_mm."""
    for op in OPS:
        for argument in overload(op)._schema.arguments:
            assert ("dtype" in argument.name) == (argument.name == "out_dtype"), op
