# SPDX-License-Identifier: Apache-2.0
"""``python -m grouped_linear --selftest``: it passes, and names the layer that has a fault."""

import re
import runpy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from grouped_linear import GroupedLinear, selftest
from support.devices import needs_gpu

CPU = torch.device("cpu")


def test_passes_and_names_each_layer_and_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest.main() == 0
    said = capsys.readouterr().out
    assert "nothing failed" in said
    assert said.endswith(f"{selftest.ASK}\n")
    for kind in selftest.LAYERS:
        assert f"\n{kind} on cpu\n" in said
    for recipe in selftest.RECIPES:
        assert said.count(f"\n  {recipe:<24}ok ") >= 2
    if not torch.cuda.is_available():
        assert "torch sees no GPU here: the CPU alone is checked, beside float64" in said


def one_row_is_off(y: Tensor, call: int) -> Tensor:
    y[1] *= 1.05
    return y


def the_tail_is_not_zero(y: Tensor, call: int) -> Tensor:
    y[-1, 0] = 1e-4
    return y


def nothing_is_written(y: Tensor, call: int) -> Tensor:
    return torch.full_like(y, torch.nan)


def the_second_call_differs(y: Tensor, call: int) -> Tensor:
    y[0, 0] += call * 2.0**-7
    return y


def it_raises(y: Tensor, call: int) -> Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand advice")


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (one_row_is_off, r"FAILS +\d\.\d\d% of y "),
        (the_tail_is_not_zero, "FAILS +inf% of y "),
        (nothing_is_written, "FAILS +inf% of y "),
        (the_second_call_differs, "FAILS: the same call again gives other bits$"),
        (it_raises, "FAILS: CUDA error: an illegal memory access was encountered$"),
    ],
)
def test_finds_a_fault(
    fault: Callable[[Tensor, int], Tensor],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = iter(range(9))

    class Faulty(GroupedLinear):
        def forward(self, *given: Tensor) -> Tensor:
            y = super().forward(*given)
            return y + (fault(y.detach().clone(), next(calls)) - y.detach())

    def faulty(**options: object) -> GroupedLinear:
        E, H, F = selftest.E, selftest.H, selftest.F
        return Faulty(E, H, F, dtype=torch.bfloat16, **options)

    monkeypatch.setattr(selftest, "report", lambda: "report")
    monkeypatch.setattr(selftest, "LAYERS", {"GroupedLinear": faulty})
    monkeypatch.setattr(selftest, "RECIPES", {"BF16": selftest.RECIPES["BF16"]})
    line, right = selftest.check("GroupedLinear", "BF16", CPU)
    assert re.search(sentence, line), line
    assert not right
    monkeypatch.setattr(selftest, "check", lambda *given: (line, right))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert selftest.main() == 1
    assert "\n1 FAILED\n" in capsys.readouterr().out


def test_command_runs_the_selftest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["grouped_linear", "--selftest"])
    monkeypatch.setattr(selftest, "main", lambda: 1)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("grouped_linear", run_name="__main__")
    assert stopped.value.code == 1


@needs_gpu
@pytest.mark.parametrize("kind", selftest.LAYERS)
@pytest.mark.parametrize("recipe", selftest.RECIPES)
def test_a_gpu_beside_the_cpu(recipe: str, kind: str) -> None:
    line, right = selftest.check(kind, recipe, torch.device("cuda"))
    assert right, line
