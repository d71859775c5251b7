# SPDX-License-Identifier: Apache-2.0
"""``python -m grouped_linear --selftest``: it passes, and finds a fault in an op and names it."""

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from grouped_linear.selftest import calls, check, command, speed
from grouped_linear.selftest.calls import Call
from support.devices import needs_gpu
from support.ops import OPS

Fault = Callable[[list[Tensor], int], None]  # of an op's results, in its nth call


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr(command, "report", lambda: "report")
    monkeypatch.setattr(command, "devices", lambda: [command.CPU])


def test_passes(capsys: pytest.CaptureFixture[str]) -> None:
    called = {made.op for made in calls.CALLS}
    assert called <= set(OPS)
    assert command.main() == 0
    said = capsys.readouterr().out
    assert said.startswith("report\n")
    assert "nothing failed" in said
    assert "FAIL" not in said
    assert said.endswith(f"{command.ASK}\n")
    for name in (*called, "fprop", "dgrad", "wgrad"):
        assert f"\n  {name} " in said


def one_row_is_off(results: list[Tensor], n: int) -> None:
    results[0][1] *= 1.05


def the_tail_is_not_zero(results: list[Tensor], n: int) -> None:
    results[0][-1, 0] = 1e-3


def one_sign_is_off(results: list[Tensor], n: int) -> None:
    results[-1][results[-1] == results[-1].amax()] *= -1


def the_second_call_differs(results: list[Tensor], n: int) -> None:
    results[0][0, 0] *= 1 + n % 2 * 2.0**-7


def nothing_is_written(results: list[Tensor], n: int) -> None:
    results[0].fill_(torch.nan)


def it_raises(results: list[Tensor], n: int) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand advice")


@pytest.mark.parametrize(
    ("op", "fault", "sentence"),
    [
        ("grouped_mm", one_row_is_off, "result 0: beside torch: "),
        ("swiglu", the_tail_is_not_zero, "1 of 72000 numbers differ, as 0.000999451 from 0"),
        ("quantize_weight", one_sign_is_off, "result 1: beside torch: "),
        ("group_quantize_swiglu", one_sign_is_off, "1 of 72000 numbers differ"),
        ("gather_sum", the_second_call_differs, "beside the same call again: 1 of"),
        ("grouped_mm_wgrad", nothing_is_written, "numbers differ, as nan from"),
        ("gather_sum", it_raises, "CUDA error: an illegal memory access was encountered\n"),
    ],
)
def test_names_the_op_with_a_fault(
    op: str,
    fault: Fault,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    count = 0

    def with_fault(made: Call) -> Call:
        def ours(inputs: calls.Inputs) -> list[Tensor]:
            nonlocal count
            results = tree_map(torch.clone, tree_leaves(made.ours(inputs)))
            fault(results, count)
            count += 1
            return results

        return made._replace(ours=ours) if made.op == op else made

    monkeypatch.setattr(command, "speeds_on", lambda device: [])
    made = [with_fault(made) for made in calls.CALLS if made.op in (op, "gather_dot")]
    assert command.main(made) == 1
    said = capsys.readouterr().out
    assert f"1 FAILED: {op} on cpu" in said
    assert sentence in said


@pytest.mark.parametrize("same_bits", [True, False])
def test_other_numbers_than_the_cpu_are_a_failure(
    same_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a GPU has the CPU's bits, also within the tolerance beside torch."""

    def results(
        made: Call, inputs: Any, device: torch.device, poison: bool = False
    ) -> list[Tensor]:
        right = torch.ones(2, 3)
        return [right.nextafter(torch.tensor(2.0)) if device.type == "meta" else right]

    monkeypatch.setattr(check, "results", results)
    made = Call("swiglu", list, None, calls.ROUNDED, same_bits)
    found = check.failures(made, calls.inputs(), torch.device("meta"))
    expected = "result 0: beside the CPU: 6 of 6 numbers differ, as 1 from 1"
    assert found == [expected] * same_bits


def test_command_runs_the_selftest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["grouped_linear", "--selftest"])
    monkeypatch.setattr(command, "main", lambda: 1)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("grouped_linear", run_name="__main__")
    assert stopped.value.code == 1


@needs_gpu
def test_passes_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "devices", lambda: [torch.device("cuda")])
    assert command.main() == 0, capsys.readouterr().out
    assert "one CUDA graph, other group sizes: ok" in capsys.readouterr().out
