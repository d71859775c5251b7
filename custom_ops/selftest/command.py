# SPDX-License-Identifier: Apache-2.0
"""The self-test as a whole: the kernels on each device, CUDA graphs, speed, and a verdict."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence

import torch

from grouped_linear.report import first_line, report
from grouped_linear.selftest import speed
from grouped_linear.selftest.calls import CALLS, Call, Inputs, inputs
from grouped_linear.selftest.check import failures
from grouped_linear.selftest.graph import wrong_replays

SHOWN = 3  # failures of one op
CPU = torch.device("cpu")
ASK = "Please paste all of this into an issue of the project, also where nothing failed."
HOW = """\
The kernels: on a CPU beside plain torch, where that is short, on a GPU beside the CPU's. Groups are
unaligned and empty, and rows past the sum hold NaN. Each call is made twice, on a GPU in memory
full of NaN, and its numbers must not change. A GPU's quantized numbers, SwiGLU and routing must be
the CPU's."""


def devices() -> list[torch.device]:
    """The CPU, and the current GPU if the ops run on it."""
    if why_no_gpu():
        return [CPU]
    return [CPU, torch.device("cuda", torch.cuda.current_device())]


def why_no_gpu() -> str:
    """Why the CPU alone is tested, or nothing."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"The GPU has compute capability {capability[0]}.{capability[1]}, and ops need 8.0"
    return ""


def failures_on(calls: Iterable[Call], given: Inputs, device: torch.device) -> dict[str, list[str]]:
    """The failures of each op on a device, in the order of their first calls."""
    found: dict[str, list[str]] = {}
    for call in calls:
        found.setdefault(call.op, []).extend(failures(call, given, device))
    return found


def rows_of(found: dict[str, list[str]]) -> Iterator[str]:
    """A row for each op, with the first of its failures below."""
    for op, failed in found.items():
        yield f"  {op:<32}{'FAILS' if failed else 'ok'}"
        yield from (f"      {failure}" for failure in failed[:SHOWN])
        if len(failed) > SHOWN:
            yield f"      and {len(failed) - SHOWN} more"


def graph_failures() -> list[str]:
    """A sentence for each wrong replay of a CUDA graph, or for its error."""
    try:
        return wrong_replays()
    except RuntimeError as error:
        return [first_line(error)]


def speeds_on(device: torch.device) -> Iterator[str]:
    """The table of speeds; an error, as one of memory, is no failure."""
    try:
        yield from speed.rows_on(device)
    except RuntimeError as error:
        yield f"speed: not measured: {first_line(error)}"


def main(calls: Sequence[Call] = CALLS) -> int:
    """Run the self-test and print what it finds: 0 where nothing failed, else 1."""
    begin = time.perf_counter()
    print(report(), flush=True)
    if "GROUPED_LINEAR_PORTABLE" in os.environ:
        print(f"\nGROUPED_LINEAR_PORTABLE is {os.environ['GROUPED_LINEAR_PORTABLE']}")
    print(f"\n{HOW}", flush=True)
    if why := why_no_gpu():
        print(f"{why}: the CPU alone is tested.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        given, failed = inputs(), []
        for device in devices():
            print(f"\nops on {device}", flush=True)
            found = failures_on(calls, given, device)
            print("\n".join(rows_of(found)), flush=True)
            failed += [f"{op} on {device}" for op, sentences in found.items() if sentences]
            if device.type == "cuda":
                wrong = graph_failures()
                print(f"  one CUDA graph, other group sizes: {'FAILS' if wrong else 'ok'}")
                print("".join(f"      {said}\n" for said in wrong[:SHOWN]), end="")
                failed += [f"CUDA graphs on {device}"] * bool(wrong)
            print("\n" + "\n".join(speeds_on(device)), flush=True)
    print(f"\n{len(calls)} calls, {time.perf_counter() - begin:.0f} s: ", end="")
    print(f"{len(failed)} FAILED: {', '.join(failed)}" if failed else "nothing failed")
    print(ASK)
    return 1 if failed else 0
