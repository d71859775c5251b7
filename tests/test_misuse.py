# SPDX-License-Identifier: Apache-2.0
"""Tensors on several devices, group sizes that cannot be, layers that no call could run."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedLinear,
    GroupedMLP,
    MXFP8BlockScaling,
    Recipe,
    grouped_linear,
    grouped_mlp,
    grouped_mlp_sorted,
    ops,
)
from grouped_linear.recipes import DelayedScalingState
from support.compare import assert_all_same_bits, assert_same_bits
from support.devices import needs_gpu
from support.errors import sentence
from support.groups import Groups
from support.layers import linear_of
from support.op_info import Sample
from support.ops import OPS
from support.samples import make, with_every_tensor
from support.tensors import BF16, on

GROUPS = Groups((3, 0, 7), 12, K=144, N=32)


# --- devices -------------------------------------------------------------------------------------


def samples_with_every_tensor() -> list[Sample]:
    return [with_every_tensor(op, GROUPS, BF16) for op in OPS]


def tensors_in(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def put(place: Callable[[str, Any], Any], device: str, value: Any) -> Any:
    """Place a tensor, or a list's last: the others stay on the CPU."""
    if not isinstance(value, list):
        return place(device, value)
    return [*(place("cpu", v) for v in value[:-1]), place(device, value[-1])]


def misplaced(
    samples: list[Sample], place: Callable[[str, Any], Any], other: str
) -> list[tuple[str, str]]:
    """The arguments of ops that are on another device than the rest, with the sentences."""
    said = []
    for sample in samples:
        names = [name for name, v in sample.arguments.items() if tensors_in(v)]
        moves = [[name] for name in names] + [["x_t", "scale_x_t"]] * ("x_t" in names)
        for moved in moves if len(tensors_in(sample.arguments)) > 1 else []:
            placed = {
                n: put(place, other if n in moved else "cpu", v)
                for n, v in sample.arguments.items()
            }
            said.append((f"{sample.op}: {moved[0]}", sentence(Sample(sample.op, placed))))
    return said


def fake_on(device: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def test_fake_tensors_on_other_devices() -> None:
    """One sentence names what is elsewhere, and an argument that is not."""
    samples = samples_with_every_tensor()
    with FakeTensorMode():
        said = misplaced(samples, fake_on, "cuda")
    for moved, actual in said:
        op, name = moved.split(": ")
        elsewhere, other = f"{name} is on cuda:0", r"(?:the first )?\w+ is on cpu"
        assert re.fullmatch(f"{op}: (?:{elsewhere}, {other}|{other}, {elsewhere})", actual)


def test_meta_tensors_among_cpu_tensors() -> None:
    samples = samples_with_every_tensor()
    with FakeTensorMode():
        expected = misplaced(samples, fake_on, "cuda")
    on_meta = [(moved, said.replace("cuda:0", "meta")) for moved, said in expected]
    assert misplaced(samples, on, "meta") == on_meta


@needs_gpu
def test_cpu_tensors_among_cuda_tensors() -> None:
    samples = samples_with_every_tensor()
    with FakeTensorMode():
        expected = misplaced(samples, fake_on, "cuda")

    def swap(device: str, value: Any) -> Any:
        return on("cuda" if device == "cpu" else "cpu", value)

    swapped = [
        (moved, said.replace("cuda:0", "other").replace("cpu", "cuda:0").replace("other", "cpu"))
        for moved, said in misplaced(samples, swap, "cuda")
    ]
    assert swapped == expected


# --- data that only the CPU looks at -------------------------------------------------------------


def test_group_sizes_on_cpu() -> None:
    lines = [
        sentence(lambda m=m: ops.splits_to_offsets(torch.tensor(m), 10))
        for m in ([3, -1, 2], [3, 8], [2**62, 2**62, 2**62], [-(2**63), 1])
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
splits_to_offsets: m_splits must not be negative, got -1 at group 1
splits_to_offsets: m_splits, the rows of each group, must sum to at most num_rows 10, got 3 + 8 at group 1
splits_to_offsets: m_splits, the rows of each group, must sum to at most num_rows 10, got 0 + 4611686018427387904 at group 0
splits_to_offsets: m_splits must not be negative, got -9223372036854775808 at group 0""",  # noqa: E501
    )


def test_rows_on_cpu() -> None:
    x, offs = torch.ones(4, 16), torch.tensor([2, 3], dtype=torch.int32)
    rows = torch.tensor([[3, 0, 4, 0], [3, -1, 0, 0], [3, 3, 0, 2**31]])
    lines = [sentence(lambda r=r: ops.group_quantize(x, offs, r)) for r in rows]  # type: ignore[misc]
    lines.append(sentence(lambda: ops.group_quantize(x[:0], offs, rows[0].int())))
    experts = torch.tensor([[1, 0], [0, 16]] * 2)
    lines.append(sentence(lambda: ops.topk_experts_grad(torch.ones(4, 2), x, experts)))
    assert_expected_inline(
        "\n".join(lines),
        """\
group_quantize: rows must index the 4 rows of x, got 4 at row 2
group_quantize: rows must index the 4 rows of x, got -1 at row 1
no error
group_quantize: rows must index the 0 rows of x, got 3 at row 0
topk_experts_grad: experts must index the 16 experts of logits, got 16 at row 1""",
    )


def test_offsets_on_cpu() -> None:
    for sample in samples_with_every_tensor():
        rows = 384 if "dy_t" in sample.arguments else 12
        for ends, expected in (
            ([5, 3, 10], "must not decrease, got 3 after 5 at group 1"),
            ([-1, 3, 10], "must not decrease, got -1 after 0 at group 0"),
            ([3, 3, 1300], f"must not exceed the number of rows {rows}, got 1300 at group 2"),
        ):
            if "offs" in sample.arguments:
                said = sentence(sample.but(offs=torch.tensor(ends, dtype=torch.int32)))
                assert said.endswith(f": offs {expected}")


def test_a_failed_write_in_place_leaves_main_grad_alone() -> None:
    sample = make("grouped_mm_wgrad_", GROUPS, BF16)
    before = sample["main_grad"].clone()
    sentence(sample.but(offs=torch.tensor([3, 2, 10], dtype=torch.int32)))
    assert_same_bits(sample["main_grad"], before)


# --- Python --------------------------------------------------------------------------------------


def test_configurations() -> None:
    def layer(**options: Any) -> Callable[[], Any]:
        sizes = {"num_experts": 2, "in_features": 16, "out_features": 16}
        return lambda: GroupedLinear(**(sizes | options))

    mistakes = [
        lambda: Float8BlockScaling(amax_epsilon=-1.0),
        lambda: Float8BlockScaling(amax_epsilon=float("nan")),
        lambda: Float8BlockScaling(wgrad=torch.float32),
        lambda: Float8CurrentScaling(gradient_dtype=torch.bfloat16),
        lambda: Float8BlockScaling(share_x_scales="no"),  # type: ignore[arg-type]
        lambda: Float8CurrentScaling(requantize_weights="no"),  # type: ignore[arg-type]
        lambda: DelayedScaling(margin="1"),  # type: ignore[arg-type]
        lambda: DelayedScaling(amax_history_len=2.5),  # type: ignore[arg-type]
        lambda: DelayedScaling(margin=65),
        lambda: DelayedScaling(amax_history_len=0),
        lambda: DelayedScaling(amax_compute_algo="mean"),  # type: ignore[arg-type]
        layer(num_experts=0),
        layer(in_features=24),
        layer(out_features=-16),
    ]
    for mistake in mistakes:
        with pytest.raises(ValueError, match=":"):
            mistake()
    assert_expected_inline(
        "\n".join(map(sentence, mistakes)),
        """\
Float8BlockScaling: amax_epsilon must be finite and not negative, got -1
Float8BlockScaling: amax_epsilon must be finite and not negative, got nan
Float8BlockScaling: wgrad must be float8_e4m3fn, bfloat16 or float16, got float32
Float8CurrentScaling: gradient_dtype must be float8_e4m3fn or float8_e5m2, got bfloat16
Float8BlockScaling: share_x_scales must be True or False, got 'no'
Float8CurrentScaling: requantize_weights must be True or False, got 'no'
DelayedScaling: margin must be an integer, got '1'
DelayedScaling: amax_history_len must be an integer, got 2.5
DelayedScaling: margin must be between 0 and 64, got 65
DelayedScaling: amax_history_len must be positive, got 0
DelayedScaling: amax_compute_algo must be 'max' or 'most_recent', got 'mean'
GroupedLinear: num_experts must be between 1 and 1024, got 0
GroupedLinear: in_features must be a positive multiple of 16, got 24
GroupedLinear: out_features must be a positive multiple of 16, got -16""",
    )


def test_calls_of_the_layer() -> None:
    layer = GroupedLinear(2, 16, 32)
    x, m_splits = torch.randn(5, 16), torch.tensor([2, 3])
    recipe = GroupedLinear(2, 16, 32, recipe=Float8BlockScaling())
    mistakes = [
        lambda: layer(x, [2, 4]),
        lambda: grouped_linear(x, layer.weight[0], m_splits),
        lambda: grouped_linear(x, layer.weight, m_splits, torch.zeros(2, 16)),
        lambda: grouped_linear(x, layer.weight, m_splits, torch.zeros(2, 32, device="meta")),
        lambda: grouped_linear(x, layer.weight[:0], []),
        lambda: grouped_linear(x, layer.weight, m_splits, None, DelayedScaling()),
        lambda: grouped_linear(x, layer.weight, m_splits, state=DelayedScaling()),
        lambda: grouped_linear(
            x, layer.weight, m_splits, state=DelayedScalingState(DelayedScaling(), 2)
        ),
        lambda: grouped_linear(
            x,
            layer.weight,
            m_splits,
            recipe=DelayedScaling(),
            state=DelayedScalingState(DelayedScaling(), 3),
        ),
        lambda: DelayedScalingState(Float8BlockScaling(), 2),  # type: ignore[arg-type]
        lambda: DelayedScalingState(DelayedScaling(), 0),
    ]
    assert_expected_inline(
        "\n".join(map(sentence, mistakes)),
        """\
splits_to_offsets: m_splits, the rows of each group, must sum to at most num_rows 5, got 2 + 4 at group 1
grouped_linear: weight must be [E, N, K], got [32, 16]
grouped_linear: bias must be [2, 32], as weight is [2, 32, 16], got [2, 16]
grouped_linear: bias is on meta, x is on cpu
grouped_linear: E must be between 1 and 1024, got 0
grouped_linear: DelayedScaling has a state: pass state, or use GroupedLinear
grouped_linear: state must be a grouped_linear.recipes.DelayedScalingState, got DelayedScaling()
grouped_linear: state needs a recipe that has one, got recipe None
group_quantize_delayed: E differs: scale has 3, offs has 2
DelayedScalingState: recipe must be DelayedScaling, got Float8BlockScaling()
DelayedScalingState: num_groups must be between 1 and 1024, got 0""",  # noqa: E501
    )
    with pytest.raises(TypeError, match="weight must be a tensor, got NoneType"):
        grouped_linear(x, None, m_splits)  # type: ignore[arg-type]
    assert layer(x, m_splits).shape == (5, 32)
    assert recipe(x, m_splits).shape == (5, 32)


@pytest.mark.parametrize("kind", ["sparse", "csr", "nested", "jagged"])
def test_tensors_that_are_not_dense(kind: str) -> None:
    """Each argument is named: torch would speak of its own internals, or of a backend of an op."""

    def other(t: Tensor) -> Tensor:
        if kind in ("nested", "jagged"):
            layout = torch.jagged if kind == "jagged" else torch.strided
            return torch.nested.nested_tensor([t, t], layout=layout)
        return t.to_sparse() if kind == "sparse" else t.to_sparse_csr()

    x, w = torch.randn(5, 16), torch.randn(2, 32, 16)
    weights, chosen, sizes = torch.ones(5, 1), torch.zeros(5, 1).long(), torch.tensor([2, 3])
    gate_up, down, of_rows = torch.randn(2, 64, 16), torch.randn(2, 16, 32), torch.ones(5)
    calls: list[tuple[Any, list[str], list[Tensor]]] = [
        (grouped_linear, ["x", "weight", "m_splits", "bias"], [x, w, sizes, torch.ones(2, 32)]),
        (
            grouped_mlp,
            ["x", "top_k_weights", "top_k_index", "gate_up_proj", "down_proj"],
            [x, weights, chosen, gate_up, down],
        ),
        (
            grouped_mlp_sorted,
            ["x", "m_splits", "gate_up_proj", "down_proj", "row_weights"],
            [x, sizes, gate_up, down, of_rows],
        ),
    ]
    for call, names, given in calls:
        for i, name in enumerate(names):
            if kind == "csr" and given[i].dim() != 2:
                continue
            changed = [*given[:i], other(given[i]), *given[i + 1 :]]
            with pytest.raises(TypeError, match=f"^{call.__name__}: {name} must be a dense tensor"):
                call(*changed)


RECIPES = (None, Float8BlockScaling(), Float8CurrentScaling(), MXFP8BlockScaling())


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_features_are_named_as_the_caller_names_them(recipe: Recipe | None) -> None:
    """Not as the first op does that reads them: K, N / 2 or H, whichever it was."""
    x, m_splits = torch.randn(5, 16), [2, 3]
    x_24 = torch.randn(5, 24)
    routing = torch.ones(5, 1), torch.zeros(5, 1, dtype=torch.int64)

    def w(*shape: int) -> Tensor:
        return torch.randn(2, *shape)

    mistakes = [
        lambda: grouped_linear(x_24, w(32, 24), m_splits, recipe=recipe),
        lambda: grouped_linear(x, w(24, 16), m_splits, recipe=recipe),
        lambda: grouped_mlp(x_24, *routing, w(64, 24), w(24, 32), recipe),
        lambda: grouped_mlp(x, *routing, w(48, 16), w(16, 24), recipe),
        lambda: grouped_mlp_sorted(x_24, m_splits, w(64, 24), w(24, 32), recipe=recipe),
        lambda: grouped_mlp_sorted(x, m_splits, w(48, 16), w(16, 24), recipe=recipe),
    ]
    assert_expected_inline(
        "\n".join(map(sentence, mistakes)),
        """\
grouped_linear: K must be a positive multiple of 16, got 24: weight is [2, 32, 24]
grouped_linear: N must be a positive multiple of 16, got 24: weight is [2, 24, 16]
grouped_mlp: H must be a positive multiple of 16, got 24: gate_up_proj is [2, 64, 24]
grouped_mlp: F must be a positive multiple of 16, got 24: down_proj is [2, 16, 24]
grouped_mlp_sorted: H must be a positive multiple of 16, got 24: gate_up_proj is [2, 64, 24]
grouped_mlp_sorted: F must be a positive multiple of 16, got 24: down_proj is [2, 16, 24]""",
    )


def accumulating(layer: type[nn.Module], main_grad: Callable[[Tensor], Tensor]) -> str:
    """The sentence of a forward; nothing may be written where it is one."""
    sizes = (2, 16, 32)
    options: dict[str, Any] = {"bias": False, "fuse_wgrad_accumulation": True}
    made = layer(*sizes, **options)
    for p in made.parameters():
        p.main_grad = main_grad(p)  # type: ignore[attr-defined]
        p.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    x = torch.randn(5, 16)
    call = {
        GroupedLinear: lambda: made(x, [2, 3]),
        GroupedMLP: lambda: made(x, torch.ones(5, 1), torch.zeros(5, 1, dtype=torch.int64)),
    }[layer]
    said = sentence(call)
    assert (said == "no error") == any(p.grad_added_to_main_grad for p in made.parameters())  # type: ignore[attr-defined]
    return said


def test_main_grads_that_no_gemm_could_add_to() -> None:
    """Seen in the forward: the backward of the step's last layer comes seconds later."""
    makes: list[Callable[[Tensor], Tensor]] = [
        lambda p: torch.zeros(2, 32, 48),
        lambda p: torch.zeros_like(p).mT.contiguous()[:1],
        lambda p: torch.zeros_like(p, dtype=torch.float16),
        lambda p: torch.zeros_like(p, device="meta"),
        lambda p: torch.zeros_like(p, dtype=BF16),
    ]
    lines = [accumulating(layer, make) for make in makes for layer in (GroupedLinear, GroupedMLP)]
    assert_expected_inline(
        "\n".join(lines),
        """\
GroupedLinear: weight.main_grad must be [2, 32, 16] float32 or bfloat16 on cpu, as weight is, got [2, 32, 48] float32 on cpu
GroupedMLP: gate_up_proj.main_grad must be [2, 64, 16] float32 or bfloat16 on cpu, as gate_up_proj is, got [2, 32, 48] float32 on cpu
GroupedLinear: weight.main_grad must be [2, 32, 16] float32 or bfloat16 on cpu, as weight is, got [1, 16, 32] float32 on cpu
GroupedMLP: gate_up_proj.main_grad must be [2, 64, 16] float32 or bfloat16 on cpu, as gate_up_proj is, got [1, 16, 64] float32 on cpu
GroupedLinear: weight.main_grad must be [2, 32, 16] float32 or bfloat16 on cpu, as weight is, got [2, 32, 16] float16 on cpu
GroupedMLP: gate_up_proj.main_grad must be [2, 64, 16] float32 or bfloat16 on cpu, as gate_up_proj is, got [2, 64, 16] float16 on cpu
GroupedLinear: weight.main_grad must be [2, 32, 16] float32 or bfloat16 on cpu, as weight is, got [2, 32, 16] float32 on meta
GroupedMLP: gate_up_proj.main_grad must be [2, 64, 16] float32 or bfloat16 on cpu, as gate_up_proj is, got [2, 64, 16] float32 on meta
no error
no error""",  # noqa: E501
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_step_without_the_gradients_that_wait(compiled: bool) -> None:
    """Without the sentence, the optimizer skips the weight, or steps it by gradients of before."""
    layer = linear_of(2, 16, 32, delay_wgrad_compute=True)
    other = torch.nn.Linear(16, 16)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (layer, other)]
    x = torch.randn(5, 16)
    layer(other(x), [2, 3]).sum().backward()
    optimizers[1].step()  # another's
    before = [p.detach().clone() for p in layer.parameters()]
    step = optimizers[0].step
    if compiled:
        step = torch.compile(step, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"^GroupedLinear: AdamW steps a weight .*backward_dw"):
        step()
    assert_all_same_bits(layer.parameters(), before)
    layer.backward_dw()
    step()
    assert not torch.equal(layer.weight, before[0])


def test_gradients_that_wait_for_ever() -> None:
    """For optimizers that are not torch's: the operands of each backward stay in memory."""
    layer = linear_of(2, 16, 32, delay_wgrad_compute=True)
    x = torch.randn(5, 16)
    for _ in range(64):
        layer(x, [2, 3]).sum().backward()
    with pytest.warns(
        UserWarning, match=r"^GroupedLinear: 64 backwards .* once for each"
    ) as warned:
        layer(x, [2, 3])
    assert warned[0].filename == __file__
    for _ in range(64):
        layer.backward_dw()
