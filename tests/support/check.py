# SPDX-License-Identifier: Apache-2.0
"""A call beside what its op's page says that it must give."""

import torch
from torch import Tensor

from support.compare import assert_same_bits
from support.op_info import Output, Sample
from support.ops import PAGES
from support.samples import specified_parts


def check(sample: Sample, device: str) -> None:
    """Compare all that is specified with the page; the call's bits are the same the second time.

    On a GPU they are the CPU's where the page says so.
    """
    results = sample.results(device)
    poison_freed_memory(device)
    again = sample.results(device)
    parts = specified_parts(sample, results)
    expected = PAGES[sample.op].expected(sample)
    on_cpu = results
    if device != "cpu" and any(output and output.same_bits for output in expected):
        on_cpu = sample.results("cpu")
    for i, output in enumerate(expected):
        if output is None:
            assert results[i].numel() == 0, f"result {i} was not asked for"
            continue
        actual = results[i][parts[i]]
        assert results[i].shape == (output.shape or output.expected.shape)
        check_output(actual, output, f"result {i} of {sample.op}")
        assert_same_bits(again[i][parts[i]], actual)
        if output.same_bits:
            assert_same_bits(actual, on_cpu[i][parts[i]])
    assert len(results) == len(expected)


def check_output(actual: Tensor, output: Output, what: str) -> None:
    """Within its bound, or of the bytes that are expected."""
    if output.allowed is None:
        assert_same_bits(actual, output.expected)
        return
    assert actual.dtype == output.dtype
    expected, allowed = output.expected, output.allowed
    numbers = actual.double()
    near = (numbers - expected).abs() <= allowed  # NaN is not
    near |= numbers.isnan() & expected.isnan()
    if allowed.dim() > 1:  # rows of no group, experts without rows: their zeros have a sign
        exact = (allowed == 0).all(-1, keepdim=True)
        near &= ~exact | (numbers.signbit() == expected.signbit())
    assert near.all(), f"{what}: {int((~near).sum())} of {near.numel()} numbers are off"


def poison_freed_memory(device: str) -> None:
    """Leave NaN in what the next allocations find."""
    blocks = [torch.full((2**size,), torch.nan, device=device) for size in range(6, 18)]
    del blocks
