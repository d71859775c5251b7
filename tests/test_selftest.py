"""``python -m grouped_linear --selftest``: it passes, and finds a fault in any op and names it."""

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grouped_linear.selftest import cases, check, command, speed
from grouped_linear.selftest.case import BF16
from grouped_linear.selftest.expected import Output
from support.devices import OPS, needs_gpu

SMALL = cases.Groups((0, 3, 130, 0, 5), 145, K=48, N=32)
Fault = Callable[[Any, int], None]  # of what an op returned, in its nth call


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr(command, "header", lambda: "header")
    monkeypatch.setattr(command, "devices", lambda: [command.CPU])


def small_cases(op: str = "") -> list[cases.Case]:
    every = [*cases.routing(), *cases.update_scales(), *cases.of_groups(SMALL, BF16)]
    return [case for case in every if op in ("", case.op)]


def test_passes_with_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    made = small_cases()
    assert {case.op for case in made} == set(OPS)
    assert command.main(made) == 0
    said = capsys.readouterr().out
    assert said.startswith("header\n")
    assert "nothing failed" in said
    assert "FAIL" not in said
    assert said.endswith(f"{command.ASK}\n")
    for name in (*OPS, "fprop", "dgrad", "wgrad"):
        assert f"\n  {name} " in said


def one_row_is_off(y: Tensor, n: int) -> None:
    y[1] *= 1.05


def the_tail_is_not_zero(y: Tensor, n: int) -> None:
    y[-1, 0] = 1e-6


def one_byte_is_off(quantized: tuple[Tensor, ...], n: int) -> None:
    quantized[0].view(torch.uint8).flatten()[:1] ^= 1


def the_second_call_differs(y: Tensor, n: int) -> None:
    y[0, 0] += n % 2 * y[0, 0].abs() * 2.0**-8


def nothing_is_written(y: Tensor, n: int) -> None:
    y.fill_(torch.nan)


def it_raises(y: Any, n: int) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand advice")


@pytest.mark.parametrize(
    ("op", "fault", "sentence"),
    [
        ("grouped_mm", one_row_is_off, "numbers are too far from float64"),
        ("swiglu", the_tail_is_not_zero, "for 0, where 0 is allowed"),
        ("quantize_weight_list", one_byte_is_off, "numbers differ"),
        ("group_quantize", one_byte_is_off, "1 of 6624 numbers differ, 1 of them by one step"),
        ("grouped_scaled_mm", the_second_call_differs, "the same call in poisoned memory: 1 of"),
        ("grouped_mm_wgrad", nothing_is_written, "too far from float64: nan for"),
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
    right, calls = check.call, 0

    def call(name: str, arguments: dict[str, Any]) -> Any:
        nonlocal calls
        returned = right(name, arguments)
        if name == op:
            fault(returned, calls)
            calls += 1
        return returned

    monkeypatch.setattr(check, "call", call)
    assert command.main([*small_cases(op), *small_cases("gather_dot")]) == 1
    said = capsys.readouterr().out
    assert f"1 FAILED: {op} on cpu" in said
    assert sentence in said


def test_steps_between_numbers() -> None:
    """In the order of numbers, across zero, in every format."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn):
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
        smallest = torch.tensor([0, 1, 2], dtype=integer).view(dtype)
        both = torch.cat([-smallest.float().flip(0), smallest.float()]).to(dtype)
        assert check.bits(both).diff().tolist() == [1] * 5
    assert check.differing(torch.zeros(2), torch.zeros(2)) == ""
    assert check.differing(torch.zeros(2), torch.zeros(2).bfloat16()) != ""


def test_other_bits_than_the_cpu_are_a_failure() -> None:
    """Of what is within its bound, as SwiGLU on a GPU whose reciprocals round in another way."""
    right = torch.ones(2, 3)
    output = Output(right.double(), torch.full((2, 3), 0.1).double(), same_bits=True)
    off = right.nextafter(torch.tensor(2.0))
    verdict = check.Verdict("swiglu")
    said = check.check_output(off, output, right, verdict)
    assert said == "unlike the CPU's: 6 of 6 numbers differ, 6 of them by one step"
    assert check.check_output(off, output, off, verdict) == ""


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
