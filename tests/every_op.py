# SPDX-License-Identifier: Apache-2.0
"""Calls each variant of every op once a dtype, with one of some group sizes.

For compute-sanitizer, which would take hours over the whole suite (.ci/sanitize_gpu)::

    compute-sanitizer --tool racecheck python tests/every_op.py --sizes rings grouped_mm

With names of ops it calls those alone. Sizes: "small", of unaligned and empty groups; "few", of
groups for whose few rows Hopper has other GEMMs; "rings", with which a GEMM's pipeline goes round,
draws tickets and splits a sum, in BF16 alone and without variants; "many", of 1024 groups.

Numbers are checked by the tests, not here.
"""

import argparse

import torch

from support.groups import Groups
from support.ops import PAGES
from support.samples import variant_of
from support.tensors import DTYPES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {
    "small": (
        Groups((0, 43, 61, 0, 26), 140, K=144, N=272),
        Groups((300, 0, 0, 0, 0), 300, K=272, N=144),
        Groups((5, 0, 131), 140, K=128, N=128),  # no tile of SwiGLU has columns of gate and of up
    ),
    "few": (Groups((3, 0, 17, 9, 33), 70, K=272, N=144),),
    "rings": (Groups((4200, 0, 130, 2500, 1170), 8100, K=2048, N=1536),),
    "many": (Groups(tuple(0 if e % 43 == 5 else 1 + e % 3 for e in range(1024)), 2100),),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ops", nargs="*", default=[*PAGES])
    parser.add_argument("--sizes", choices=[*SIZES], default="small")
    options = parser.parse_args()
    cases = SIZES[options.sizes]
    torch.manual_seed(0)
    large = options.sizes == "rings"
    for dtype in DTYPES[:1] if large else DTYPES:
        for op in options.ops:
            page = PAGES[op]
            variants = ("plain",) if large else ("plain", page.every_tensor, *page.variants)
            for i, variant in enumerate(dict.fromkeys(variants)):
                variant_of(op, cases[i % len(cases)], variant, dtype).on(DEVICE)()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"{len(options.ops)} ops ran on {DEVICE} with {options.sizes} sizes")
