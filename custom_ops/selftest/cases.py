"""Every call of the self-test.

T rows, E groups, K in_features, N out_features.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

from grouped_linear.selftest.case import BF16, FP16, FP32, Case
from grouped_linear.selftest.gemm_cases import gemms, layer, scaled_gemms, swiglu_gemms
from grouped_linear.selftest.operands import Groups
from grouped_linear.selftest.row_cases import activations, every_gate, quantizers, routing
from grouped_linear.selftest.weight_cases import optimizer, update_scales, weights

Family = Callable[[Groups, torch.dtype], Iterator[Case]]
FAMILIES: tuple[Family, ...] = (
    quantizers,
    activations,
    weights,
    optimizer,
    gemms,
    swiglu_gemms,
    scaled_gemms,
    layer,
)
# Unaligned and empty groups with rows past the sum, many small groups, no rows in any group, none.
UNEVEN = Groups((0, 130, 3, 0, 257, 64), 500)
MANY = Groups(tuple(e * 7 % 13 for e in range(40)), 245, K=48, N=32)
EMPTY = Groups((0, 0, 0), 6)
NO_ROWS = Groups((0, 0), 0)
# More tiles than most GPUs take at once: Hopper's GEMMs are of wide tiles there.
WIDE = Groups((130, 0, 257, 1, 300), 700, K=144, N=2064)


def every_case() -> Iterator[Case]:
    """Every op, with all group sizes in BF16 and with some in other dtypes."""
    yield from routing()
    yield from every_gate()
    yield from update_scales()
    for groups in (UNEVEN, MANY, EMPTY, NO_ROWS):
        yield from of_groups(groups, BF16)
    for dtype in (FP16, FP32):
        yield from of_groups(UNEVEN, dtype)
    yield from of_groups(WIDE, BF16, (gemms, scaled_gemms))


def of_groups(
    groups: Groups, dtype: torch.dtype, families: Iterable[Family] = FAMILIES
) -> Iterator[Case]:
    """Every op of rows in groups and of weights."""
    sizes = f"{groups.E} groups, {groups.valid} of {groups.T} rows, {groups.N} x {groups.K}"
    for family in families:
        for case in family(groups, dtype):
            what = (case.what, str(dtype).removeprefix("torch."), sizes)
            yield Case(case.op, case.arguments, case.outputs, ", ".join(filter(None, what)))
