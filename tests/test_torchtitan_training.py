"""torchtitan's Trainer on two processes, FSDP2 and expert parallelism: our experts and its own.

``make torchtitan`` runs it: on the CPU with gloo, and where there are two GPUs with NCCL, too.
"""

import os
from functools import cache, partial
from pathlib import Path

import pytest

from grouped_linear import Float8BlockScaling, MXFP8BlockScaling, Recipe
from support.processes import Checks, Passes, device, needs_two_gpus

pytest.importorskip(
    "torchtitan", reason="torchtitan is not installed: make torchtitan runs this where it is"
)

from support.titan import losses, prepare

LAYERS, STEPS = 2, 12


@cache
def losses_as_it_is(directory: Path) -> list[float]:
    return losses(None, LAYERS, device().type, str(directory), STEPS)


def check_losses(recipe: Recipe | None, tolerance: float, rank: int, directory: Path) -> None:
    """They fall, and are those of the model as it is."""
    os.environ["LOCAL_RANK"] = str(rank)
    prepare(device().type)
    plain = losses_as_it_is(directory.parent)
    converted = losses({"recipe": recipe}, LAYERS, device().type, str(directory), STEPS)
    assert len(plain) == len(converted) == STEPS
    assert plain[-1] < plain[0] / 2
    apart = [abs(a - b) / a for a, b in zip(plain, converted, strict=True)]
    assert max(apart) <= tolerance, (plain, converted)


CHECKS: Checks = {
    "bf16": partial(check_losses, None, 0.005),
    "block": partial(check_losses, Float8BlockScaling(), 0.01),
    "mxfp8": partial(check_losses, MXFP8BlockScaling(), 0.01),
}


@pytest.mark.parametrize("check", CHECKS)
def test_two_processes(check: str, passes: Passes) -> None:
    passes(check)


@needs_two_gpus
@pytest.mark.parametrize("check", CHECKS)
def test_two_gpus(check: str, passes_on_gpus: Passes) -> None:
    passes_on_gpus(check)
