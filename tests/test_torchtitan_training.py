# SPDX-License-Identifier: Apache-2.0
"""torchtitan's Trainer on two processes, FSDP2 with experts spread or whole: ours and its own.

``make torchtitan`` runs it: on the CPU with gloo, and where there are two GPUs with NCCL, too.
"""

import os
from functools import cache, partial
from pathlib import Path

import pytest

from grouped_linear import Float8BlockScaling, MXFP8BlockScaling, Recipe
from support.processes import Checks, device, on_cpu, on_gpus
from support.versions import FSDP_HAS_MESHES

pytest.importorskip(
    "torchtitan", reason="torchtitan is not installed: make torchtitan runs this where it is"
)

from support.titan import losses, prepare

LAYERS, STEPS = 2, 12


@cache
def losses_as_it_is(directory: Path, degree: int) -> list[float]:
    return losses(None, LAYERS, device().type, str(directory), STEPS, degree)


def check_losses(
    recipe: Recipe | None, degree: int, tolerance: float, rank: int, directory: Path
) -> None:
    """They fall, and are those of the model as it is."""
    os.environ["LOCAL_RANK"] = str(rank)
    prepare(device().type)
    plain = losses_as_it_is(directory.parent, degree)
    how = {"recipe": recipe}
    converted = losses(how, LAYERS, device().type, str(directory), STEPS, degree)
    assert len(plain) == len(converted) == STEPS
    assert plain[-1] < plain[0] / 2
    apart = [abs(a - b) / a for a, b in zip(plain, converted, strict=True)]
    assert max(apart) <= tolerance, (plain, converted)


SPREAD: Checks = {
    "bf16": partial(check_losses, None, 2, 0.005),
    "block": partial(check_losses, Float8BlockScaling(), 2, 0.01),
    "mxfp8": partial(check_losses, MXFP8BlockScaling(), 2, 0.01),
}
WHOLE: Checks = {
    "bf16_whole": partial(check_losses, None, 1, 0.005),
    "block_whole": partial(check_losses, Float8BlockScaling(), 1, 0.01),
}
CHECKS: Checks = {**(SPREAD if FSDP_HAS_MESHES else {}), **WHOLE}
needs_meshes = pytest.mark.skipif(
    not FSDP_HAS_MESHES, reason="torchtitan 0.3.0 spreads experts with torch 2.12 or later"
)
EVERY = [*(pytest.param(name, marks=needs_meshes) for name in SPREAD), *WHOLE]

test_two_processes, test_two_gpus = on_cpu(EVERY), on_gpus(EVERY)
