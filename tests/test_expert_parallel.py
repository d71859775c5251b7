"""Two processes: the documentation's expert parallelism computes what one process does, to the bit.

E experts, T tokens a process, C experts chosen for a token, H and F features.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from grouped_linear import Float8BlockScaling, GroupedMLP, MXFP8BlockScaling, Recipe
from support.compare import assert_same_bits
from support.documents import ROOT, examples
from support.processes import PROCESSES, Checks

E, T, C, H, F = 4, 40, 2, 64, 48
RECIPES: dict[str, Recipe] = {
    "none": None,
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
}


def documented_class() -> Any:
    page = (ROOT / "docs" / "use_in_your_model.md").read_text()
    (source,) = (text for text in examples(page) if "class ExpertParallel" in text)
    names: dict[str, Any] = {"__name__": __name__, "nn": nn, "GroupedMLP": GroupedMLP}
    exec(source, names)
    return names["ExpertParallel"]


def step(model: nn.Module, x: Tensor, logits: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx, d logits and the parameters' gradients."""
    model.zero_grad()
    x, logits = x.clone().requires_grad_(), logits.clone().requires_grad_()
    y = model(x, *logits.softmax(dim=-1).topk(C))
    gradients = torch.autograd.grad(y, (x, logits, *model.parameters()), dy)
    return [y.detach(), *gradients]


def check(recipe: Recipe, compiled: bool, rank: int, directory: Path) -> None:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    tokens, experts = slice(rank * T, (rank + 1) * T), slice(rank * E // 2, (rank + 1) * E // 2)
    whole = GroupedMLP(E, H, F, recipe=recipe)
    data = torch.randn(2 * T, H), torch.randn(2 * T, E), torch.randn(2 * T, H)
    # Two choices a token and float32: one addition, in one process or between two.
    want_y, want_dx, want_d_logits, *want_dw = step(whole, *data)
    model = documented_class()(E, H, F, mesh, recipe=recipe)
    with torch.no_grad():
        for p, of_all in zip(model.parameters(), whole.parameters(), strict=True):
            p.copy_(of_all[experts])
    if compiled:
        model = torch.compile(model, fullgraph=True)
    y, dx, d_logits, *dw = step(model, *(t[tokens] for t in data))
    assert_same_bits(y, want_y[tokens])
    assert_same_bits(dx, want_dx[tokens])
    assert_same_bits(d_logits, want_d_logits[tokens])
    for got, want in zip(dw, want_dw, strict=True):
        assert_same_bits(got, want[experts])


CHECKS: Checks = {
    f"{mode}_{name}": partial(check, recipe, mode == "compiled")
    for name, recipe in RECIPES.items()
    for mode in ("eager", "compiled")
}


@pytest.mark.parametrize("check", CHECKS)
def test_two_processes(check: str, failures: dict[str, str]) -> None:
    if check in failures:
        pytest.fail(failures[check], pytrace=False)
