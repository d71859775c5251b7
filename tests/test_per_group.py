"""Current and delayed scaling, MXFP8, and what keeps quantized weights: bit for bit.

T rows, E groups, K in_features, N out_features.
"""

from collections.abc import Callable

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from support import reference
from support.cases import cases, variant_of
from support.compare import assert_bias_grad, assert_same_bits
from support.devices import devices
from support.groups import GROUPS, WIDE, Groups
from support.reference import E4M3, E5M2, Scaling
from support.samples import Sample, make, scaling_of
from support.tensors import BF16, DTYPES, FP16, FP32, special_rows

FP8 = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def check_rows(sample: Sample, q: Tensor, q_t: Tensor, expected: Tensor) -> None:
    """Compare q and q_t with the expected q [T, K], as far as they are specified."""
    T, K = sample["x"].shape
    valid = reference.groups(sample["offs"], T)[-1].stop
    if sample.get("rowwise"):
        assert q.shape == (T, K)
        assert_same_bits(q[:valid], expected[:valid])
    else:
        assert q.shape == (0,)
    if sample.get("columnwise"):
        assert q_t.shape == ((T + 127 * min(len(sample["offs"]), T)) // 128, K, 128)
        columns = reference.in_column_blocks(expected, sample["offs"])
        assert_same_bits(q_t[: len(columns)], columns)
    else:
        assert q_t.shape == (0,)


def check_bias_grad(sample: Sample, bias_grad: Tensor, device: str) -> None:
    if not sample.get("bias_grad"):
        assert bias_grad.shape == (0,)
        return
    assert_bias_grad(bias_grad, sample["x"], sample["offs"])
    alone = Sample("grouped_bias_grad", {"dy": sample["x"], "offs": sample["offs"]})
    assert_same_bits(bias_grad, alone.results(device)[0])


# --- current scaling -----------------------------------------------------------------------------


def check_current(sample: Sample, device: str) -> None:
    q, scale, q_t, bias_grad = sample.results(device)
    arguments = (sample["x"], sample["offs"], scaling_of(sample), sample["out_dtype"])
    expected, expected_scale = reference.quantize_groups(*arguments)
    assert_same_bits(scale, expected_scale)
    check_rows(sample, q, q_t, expected)
    check_bias_grad(sample, bias_grad, device)


@pytest.mark.parametrize(("op", "groups", "variant", "device"), cases("group_quantize_current"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_group_quantize_current(
    op: str, groups: Groups, variant: str, dtype: torch.dtype, device: str
) -> None:
    check_current(variant_of(op, groups, variant, dtype), device)


def check_current_weight(sample: Sample, device: str) -> None:
    w_ENK = sample["w"]
    q, scale, q_t = sample.results(device)
    expected, expected_scale = reference.quantize(w_ENK, (1, 2), scaling_of(sample))
    assert_same_bits(q, expected)
    assert_same_bits(scale, expected_scale.flatten())
    if sample.get("columnwise"):
        assert_same_bits(q_t, expected.view(torch.uint8).transpose(1, 2).contiguous().view(E4M3))
    else:
        assert q_t.shape == (0,)


@pytest.mark.parametrize(("op", "groups", "variant", "device"), cases("quantize_weight_current"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_weight_current(
    op: str, groups: Groups, variant: str, dtype: torch.dtype, device: str
) -> None:
    check_current_weight(variant_of(op, groups, variant, dtype), device)


# --- delayed scaling -----------------------------------------------------------------------------


def check_delayed(sample: Sample, device: str) -> None:
    x_TK, offs_E, before = sample["x"], sample["offs"], sample["amax"]
    q, q_t, bias_grad, *amax = sample.results(device)
    expected = reference.quantize_groups_with(x_TK, offs_E, sample["scale"], sample["out_dtype"])
    check_rows(sample, q, q_t, expected)
    check_bias_grad(sample, bias_grad, device)
    if before is not None:
        assert_same_bits(amax[0], torch.maximum(before, reference.amax_of_groups(x_TK, offs_E)))


@pytest.mark.parametrize(("op", "groups", "variant", "device"), cases("group_quantize_delayed"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_group_quantize_delayed(
    op: str, groups: Groups, variant: str, dtype: torch.dtype, device: str
) -> None:
    check_delayed(variant_of(op, groups, variant, dtype), device)


def check_delayed_weight(sample: Sample, device: str) -> None:
    w_ENK, before = sample["w"], sample["amax"]
    E, N, K = w_ENK.shape
    q, q_t, *amax = sample.results(device)
    expected = reference.quantize_with(w_ENK, sample["scale"].view(-1, 1, 1), E4M3)
    assert_same_bits(q, expected)
    if sample.get("columnwise"):
        assert_same_bits(q_t, expected.view(torch.uint8).transpose(1, 2).contiguous().view(E4M3))
    else:
        assert q_t.shape == (0,)
    if before is not None:
        rows, ends = w_ENK.reshape(E * N, K), torch.arange(1, E + 1) * N
        assert_same_bits(amax[0], torch.maximum(before, reference.amax_of_groups(rows, ends)))


@pytest.mark.parametrize(("op", "groups", "variant", "device"), cases("quantize_weight_delayed"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_weight_delayed(
    op: str, groups: Groups, variant: str, dtype: torch.dtype, device: str
) -> None:
    check_delayed_weight(variant_of(op, groups, variant, dtype), device)


@pytest.mark.parametrize("device", devices("group_quantize_delayed"))
def test_recording_twice_changes_nothing(device: str) -> None:
    sample = make("group_quantize_delayed", GROUPS["capacity"], BF16)
    *_, once = sample.results(device)
    *_, twice = sample.but(amax=once).results(device)
    assert_same_bits(once, twice)


def check_update(sample: Sample, device: str) -> None:
    names = ("scale", "amax", "amax_history")
    count = len(sample["scale"])
    results = sample.results(device)
    scale, amax, history = (results[i * count : (i + 1) * count] for i in range(len(names)))
    options = (sample.get("margin"), sample.get("most_recent"))
    for i in range(count):
        before = (sample[name][i] for name in names)
        rolled = reference.update_scales(*before, sample["fp8_max"][i], *options)
        assert_same_bits(scale[i], rolled.scale)
        assert_same_bits(history[i], rolled.amax_history)
        assert not amax[i].any()


@pytest.mark.parametrize(("op", "groups", "variant", "device"), cases("update_scales_"))
def test_update_scales(op: str, groups: Groups, variant: str, device: str) -> None:
    check_update(variant_of(op, groups, variant, BF16), device)


@pytest.mark.parametrize("device", devices("update_scales_"))
@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("past", ["zeros", "rand"])
@pytest.mark.parametrize("margin", [0, 1, 64])
def test_update_scales_of_special_values(
    margin: int, past: str, most_recent: bool, device: str
) -> None:
    """Zero and what is not finite keep the scale; tiny and huge ones meet the clamps."""
    amax = torch.tensor([0.0, torch.inf, torch.nan, 2.0**-149, 2.0**-126, 3.4e38, 448.0, 1.0])
    history = getattr(torch, past)(3, 8)
    arguments = {"scale": [torch.full((8,), 0.25)], "amax": [amax], "fp8_max": [448.0]}
    options = {"margin": margin, "most_recent": most_recent}
    sample = Sample("update_scales_", arguments | {"amax_history": [history]} | options)
    check_update(sample, device)
    scale = sample.results(device)[0]
    assert (scale[1:3] == 0.25).all()
    assert scale[0] == 0.25 or (history.any() and not most_recent)
    assert (scale >= 2.0**-126).all()
    assert (scale <= 2.0**126).all()


@pytest.mark.parametrize("device", devices("update_scales_"))
def test_update_scales_of_a_whole_model(device: str) -> None:
    """More operands than one launch's arguments hold."""
    few = make("update_scales_", GROUPS["unaligned"], BF16)
    check_update(
        few.but(
            **{name: 700 * few[name] for name in ("fp8_max",)},
            **{
                name: [t.clone() for _ in range(700) for t in few[name]]
                for name in ("scale", "amax", "amax_history")
            },
        ),
        device,
    )


# --- MXFP8 ---------------------------------------------------------------------------------------


def check_mx(sample: Sample, device: str) -> None:
    """group_quantize_mx and group_round_mx on the same arguments."""
    x_TK, offs_E = sample["x"], sample["offs"]
    (T, K), E = x_TK.shape, len(offs_E)
    valid = reference.groups(offs_E, T)[-1].stop
    q, scale, q_t, scale_t, bias_grad = sample.results(device)
    x_rowwise, x_columnwise, same_grad = Sample("group_round_mx", sample.arguments).results(device)
    assert_same_bits(bias_grad, same_grad)
    check_bias_grad(sample, bias_grad, device)
    if sample.get("rowwise"):
        assert (q.shape, scale.shape) == ((T, K), (T, -(-K // 32)))
        expected_q, expected_scale = reference.quantize_mx_rowwise(x_TK[:valid])
        assert_same_bits(q[:valid], expected_q)
        assert torch.equal(scale[:valid].double(), expected_scale)
        rounded = reference.round_mx_rowwise(x_TK[:valid])
        assert torch.equal(x_rowwise[:valid].double().nan_to_num(), rounded.nan_to_num())
        assert not rounded.isinf().any()  # so nan_to_num hides nothing but NaN
        assert torch.equal(x_rowwise[:valid].isnan(), rounded.isnan())
    if sample.get("columnwise"):
        blocks = (T + 127 * min(E, T)) // 128
        assert (q_t.shape, scale_t.shape) == ((blocks, K, 128), (blocks, K, 4))
        expected_q_t, expected_scale_t = reference.quantize_mx_columnwise(x_TK, offs_E)
        used = len(expected_q_t)
        assert_same_bits(q_t[:used], expected_q_t)
        assert torch.equal(scale_t[:used].double(), expected_scale_t)
        rounded = reference.round_mx_columnwise(x_TK, offs_E)[:valid]
        assert torch.equal(x_columnwise[:valid].double().nan_to_num(), rounded.nan_to_num())
        assert torch.equal(x_columnwise[:valid].isnan(), rounded.isnan())


@pytest.mark.parametrize(("op", "groups", "variant", "device"), cases("group_quantize_mx"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mx(op: str, groups: Groups, variant: str, dtype: torch.dtype, device: str) -> None:
    check_mx(variant_of(op, groups, variant, dtype), device)


# --- any rows ------------------------------------------------------------------------------------

ROW_CHECKS = {
    "group_quantize_current": check_current,
    "group_quantize_delayed": check_delayed,
    "group_quantize_mx": check_mx,
}
ROW_OPS = tuple(ROW_CHECKS)


@pytest.mark.parametrize("device", devices(*ROW_OPS, "group_round_mx"))
@pytest.mark.parametrize("groups", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("op", "check"), ROW_CHECKS.items(), ids=ROW_CHECKS)
def test_wide_rows(
    op: str, check: Callable[[Sample, str], None], dtype: torch.dtype, groups: Groups, device: str
) -> None:
    options = {"columnwise": True, "bias_grad": True}
    check(make(op, groups, dtype, **options), device)


@pytest.mark.parametrize("device", devices("quantize_weight_current", "quantize_weight_delayed"))
@pytest.mark.parametrize("groups", WIDE.values(), ids=WIDE)
def test_wide_weights(groups: Groups, device: str) -> None:
    check_current_weight(make("quantize_weight_current", groups, BF16), device)
    check_delayed_weight(make("quantize_weight_delayed", groups, BF16), device)


@pytest.mark.parametrize("device", devices(*ROW_OPS))
@FP8
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype: torch.dtype, fp8: torch.dtype, device: str) -> None:
    """A group of each kind: zeros, subnormal and tiny numbers, the largest, infinities and NaN."""
    x_TK = special_rows(dtype)
    T = len(x_TK)
    for x in (x_TK, x_TK.t().contiguous().repeat(1, 8)):
        x = x[:, : x.size(1) // 16 * 16]
        for ends in (torch.arange(1, len(x) + 1), torch.tensor([2, len(x)])):
            rows = {"x": x, "offs": ends.int(), "columnwise": True}
            for epsilon in (0.0, 2.0**-130, 3e38):
                for pow2 in (True, False):
                    options = {
                        "amax_epsilon": epsilon,
                        "power_of_two_scales": pow2,
                        "out_dtype": fp8,
                    }
                    check_current(Sample("group_quantize_current", rows | options), device)
            for scale in (1.0, 2.0**-126, 2.0**126, 0.3):
                given = {"scale": torch.full((len(ends),), scale), "out_dtype": fp8}
                given |= {"amax": torch.zeros(len(ends))}
                check_delayed(Sample("group_quantize_delayed", rows | given), device)
            check_mx(Sample("group_quantize_mx", rows), device)
    assert T > 10


@pytest.mark.parametrize("device", devices("group_quantize_delayed"))
@FP8
def test_a_cold_scale_shows(fp8: torch.dtype, device: str) -> None:
    sample = make("group_quantize_delayed", GROUPS["unaligned"], FP32, fp8=fp8)
    q = sample.but(scale=torch.full((3,), torch.nan)).results(device)[0]
    assert q.float().isnan().all()


@pytest.mark.parametrize("device", devices(*ROW_OPS))
@FP8
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_16_bit_number(dtype: torch.dtype, fp8: torch.dtype, device: str) -> None:
    every = torch.arange(2**16).to(torch.int16).view(dtype).view(512, 128)
    rows = {"x": every, "offs": torch.tensor([512], dtype=torch.int32), "columnwise": True}
    check_current(Sample("group_quantize_current", rows | {"out_dtype": fp8}), device)
    for scale in (1.0, 2.0**-126, 0.7):
        given = {"scale": torch.tensor([scale]), "amax": torch.zeros(1), "out_dtype": fp8}
        check_delayed(Sample("group_quantize_delayed", rows | given), device)
    check_mx(Sample("group_quantize_mx", rows), device)


@hypothesis.given(data=strategies.data())
@pytest.mark.parametrize("device", devices(*ROW_OPS, "quantize_weight_current"))
def test_drawn_inputs(device: str, data: strategies.DataObject) -> None:
    m_splits = data.draw(strategies.lists(strategies.integers(0, 140), min_size=1, max_size=5))
    spare, features = data.draw(strategies.integers(0, 9)), data.draw(strategies.integers(1, 18))
    groups = Groups(tuple(m_splits), sum(m_splits) + spare, K=16 * features, N=32)
    exponents = data.draw(strategies.sampled_from([1, 10, 30]))
    seed, pow2 = data.draw(strategies.integers(0, 99)), data.draw(strategies.booleans())
    epsilon = data.draw(strategies.sampled_from([0.0, 1e-12, 0.1, 1000.0]))
    dtype = data.draw(strategies.sampled_from(DTYPES))
    fp8 = data.draw(strategies.sampled_from([E4M3, E5M2]))

    torch.manual_seed(seed)
    options = {"amax_epsilon": epsilon, "power_of_two_scales": pow2}
    rows = {"columnwise": True, "bias_grad": True}
    sample = make("group_quantize_current", groups, dtype, fp8=fp8, **rows, **options)
    x_TK = sample["x"]
    if dtype != FP16:
        x_TK = x_TK * torch.randn_like(x_TK).mul(exponents).clamp(max=100).exp2()
    check_current(sample.but(x=x_TK), device)
    delayed = make("group_quantize_delayed", groups, dtype, fp8=fp8, **rows)
    check_delayed(delayed.but(x=x_TK), device)
    check_mx(make("group_quantize_mx", groups, dtype, **rows).but(x=x_TK), device)
    check_current_weight(make("quantize_weight_current", groups, dtype, **options), device)


# --- weights that are kept -----------------------------------------------------------------------


@pytest.mark.parametrize(("op", "groups", "variant", "device"), cases("quantize_weight_list"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_weight_list(
    op: str, groups: Groups, variant: str, dtype: torch.dtype, device: str
) -> None:
    sample = variant_of(op, groups, variant, dtype)
    packed = Sample("quantize_weight", sample.arguments | {"w": torch.stack(sample["w"])})
    for actual, right in zip(sample.results(device), packed.results(device), strict=True):
        assert_same_bits(actual, right)


@pytest.mark.parametrize("device", devices("quantize_weight_list"))
def test_as_many_weights_as_there_can_be(device: str) -> None:
    """Weights at addresses of every alignment."""
    room = torch.randn(1024, 16 * 16 + 8).to(BF16)
    w = [room[e, e % 8 : e % 8 + 256].view(16, 16) for e in range(1024)]
    sample = Sample("quantize_weight_list", {"w": w})
    expected = reference.quantize_weight(torch.stack(w), Scaling())
    for actual, right in zip(sample.results(device), expected, strict=True):
        assert_same_bits(actual, right)
