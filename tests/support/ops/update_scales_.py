# SPDX-License-Identifier: Apache-2.0
"""update_scales_: the scales of delayed scaling at the end of a step."""

import torch

from support import reference
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    sizes, steps = (groups.E, 2 * groups.E), options.pop("steps", (4, 1))
    history = [torch.randn(h, E).clamp(min=0) for h, E in zip(steps, sizes, strict=True)]
    return {
        "scale": [torch.rand(E) + 0.1 for E in sizes],
        "amax": [torch.randn(E).clamp(min=0) for E in sizes],
        "amax_history": history,
        "fp8_max": [448.0, 57344.0],
    }


def expected(sample: Sample) -> Outputs:
    states = zip(*(sample[n] for n in ("scale", "amax", "amax_history", "fp8_max")), strict=True)
    options = (sample.get("margin"), sample.get("most_recent"))
    rolled = [reference.update_scales(*state, *options) for state in states]
    return [
        *(Output(r.scale) for r in rolled),
        *(Output(torch.zeros_like(amax)) for amax in sample["amax"]),
        *(Output(r.amax_history) for r in rolled),
    ]


OP = OpInfo(
    sample=sample,
    expected=expected,
    mistakes=({"amax_history": [torch.ones(3, 4).t(), torch.ones(4, 6)]},),
    variants={
        "most_recent": {"most_recent": True},
        "margin": {"margin": 3},
        "long": {"steps": (1024, 1500)},
    },
    too_large=(({"scale": 0, "amax": 0, "amax_history": 1}, {}), ({"amax_history": 0}, {})),
)
