# SPDX-License-Identifier: Apache-2.0
"""Calls each variant of every op once a dtype, with one of some group sizes.

For compute-sanitizer, which would take hours over the whole suite::

    compute-sanitizer --tool racecheck python tests/every_op.py

With names of ops it calls those alone.

Numbers are checked by the tests, not here.
"""

import sys

import torch

from support.groups import Groups
from support.ops import PAGES
from support.samples import variant_of
from support.tensors import DTYPES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = (
    Groups((0, 43, 61, 0, 26), 140, K=144, N=272),
    Groups((300, 0, 0, 0, 0), 300, K=272, N=144),
    Groups((5, 0, 131), 140, K=128, N=128),  # no tile of SwiGLU has columns of gate and of up
)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype in DTYPES:
        for op in sys.argv[1:] or PAGES:
            page = PAGES[op]
            variants = ("plain", page.every_tensor, *page.variants)
            for i, variant in enumerate(variants):
                variant_of(op, CASES[i % len(CASES)], variant, dtype).on(DEVICE)()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"every op ran on {DEVICE}")
