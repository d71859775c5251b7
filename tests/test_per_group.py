# SPDX-License-Identifier: Apache-2.0
"""Current and delayed scaling, MXFP8, and what keeps quantized weights: bit for bit.

T rows, E groups, K in_features, N out_features.
"""

import pytest
import torch

from support import reference
from support.check import check
from support.compare import assert_all_same_bits, assert_same_bits
from support.groups import GROUPS, WIDE, Groups
from support.op_info import Sample
from support.reference import E4M3, E5M2, Scaling
from support.samples import make
from support.tensors import BF16, DTYPES, FP16, FP32, special_rows

FP8 = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])


# --- delayed scaling -----------------------------------------------------------------------------


def test_recording_twice_changes_nothing(device: str) -> None:
    sample = make("group_quantize_delayed", GROUPS["capacity"], BF16)
    *_, once = sample.results(device)
    *_, twice = sample.but(amax=once).results(device)
    assert_same_bits(once, twice)


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
    check(sample, device)
    scale = sample.results(device)[0]
    assert (scale[1:3] == 0.25).all()
    assert scale[0] == 0.25 or (history.any() and not most_recent)
    assert (scale >= 2.0**-126).all()
    assert (scale <= 2.0**126).all()


def test_update_scales_of_a_whole_model(device: str) -> None:
    """More operands than one launch's arguments hold."""
    few = make("update_scales_", GROUPS["unaligned"], BF16)
    check(
        few.but(
            **{name: 700 * few[name] for name in ("fp8_max",)},
            **{
                name: [t.clone() for _ in range(700) for t in few[name]]
                for name in ("scale", "amax", "amax_history")
            },
        ),
        device,
    )


# --- any rows ------------------------------------------------------------------------------------


def check_mx(sample: Sample, device: str) -> None:
    """group_quantize_mx and group_round_mx on the same arguments."""
    check(sample, device)
    check(Sample("group_round_mx", sample.arguments), device)


@pytest.mark.parametrize("groups", WIDE.values(), ids=WIDE)
def test_wide_weights(groups: Groups, device: str) -> None:
    check(make("quantize_weight_current", groups, BF16), device)
    check(make("quantize_weight_delayed", groups, BF16), device)


@FP8
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype: torch.dtype, fp8: torch.dtype, device: str) -> None:
    """A group of each kind: zeros, subnormal and tiny numbers, the largest, infinities and NaN."""
    x_TK = special_rows(dtype)
    T = len(x_TK)
    for turn, x in enumerate((x_TK, x_TK.t().contiguous().repeat(1, 8))):
        x = x[:, : x.size(1) // 16 * 16]
        for all_apart, ends in enumerate((torch.tensor([2, len(x)]), torch.arange(1, len(x) + 1))):
            rows = {"x": x, "offs": ends.int(), "columnwise": True}
            for i, epsilon in enumerate((0.0, 2.0**-130, 3e38)):
                options = {
                    "amax_epsilon": epsilon,
                    "power_of_two_scales": (i + turn + all_apart) % 2 == 0,
                    "out_dtype": fp8,
                }
                check(Sample("group_quantize_current", rows | options), device)
            for scale in (1.0, 2.0**-126, 2.0**126, 0.3):
                given = {"scale": torch.full((len(ends),), scale), "out_dtype": fp8}
                given |= {"amax": torch.zeros(len(ends))}
                check(Sample("group_quantize_delayed", rows | given), device)
            check_mx(Sample("group_quantize_mx", rows), device)
    assert T > 10


@FP8
def test_a_cold_scale_shows(fp8: torch.dtype, device: str) -> None:
    sample = make("group_quantize_delayed", GROUPS["unaligned"], FP32, fp8=fp8)
    q = sample.but(scale=torch.full((3,), torch.nan)).results(device)[0]
    assert q.float().isnan().all()


@FP8
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_16_bit_number(dtype: torch.dtype, fp8: torch.dtype, device: str) -> None:
    every = torch.arange(2**16).to(torch.int16).view(dtype).view(512, 128)
    rows = {"x": every, "offs": torch.tensor([512], dtype=torch.int32), "columnwise": True}
    check(Sample("group_quantize_current", rows | {"out_dtype": fp8}), device)
    for scale in (1.0, 2.0**-126, 0.7):
        given = {"scale": torch.tensor([scale]), "amax": torch.zeros(1), "out_dtype": fp8}
        check(Sample("group_quantize_delayed", rows | given), device)
    check_mx(Sample("group_quantize_mx", rows), device)


# --- weights that are kept -----------------------------------------------------------------------


def test_as_many_weights_as_there_can_be(device: str) -> None:
    """Weights at addresses of every alignment."""
    room = torch.randn(1024, 16 * 16 + 8).to(BF16)
    w = [room[e, e % 8 : e % 8 + 256].view(16, 16) for e in range(1024)]
    sample = Sample("quantize_weight_list", {"w": w})
    expected = reference.quantize_weight(torch.stack(w), Scaling())
    assert_all_same_bits(sample.results(device), expected)
