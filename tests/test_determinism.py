"""The same inputs give the same bits, run after run."""

import pytest
import torch
from torch import Tensor

from support.cases import cases, variant_of
from support.compare import assert_same_bits
from support.devices import OPS
from support.groups import Groups
from support.samples import Sample, specified
from support.tensors import BF16


def poison_freed_memory(device: str) -> None:
    """Leave NaN in what the next allocations find."""
    blocks = [torch.full((2**size,), torch.nan, device=device) for size in range(6, 18)]
    del blocks


def run(sample: Sample, device: str) -> list[Tensor]:
    poison_freed_memory(device)
    return specified(sample, sample.results(device))


@pytest.mark.parametrize(("op", "groups", "variant", "device"), cases(*OPS))
def test_runs_give_the_same_bits(op: str, groups: Groups, variant: str, device: str) -> None:
    sample = variant_of(op, groups, variant, BF16)
    first = run(sample, device)
    for threads in (1, 2) if device == "cpu" and groups.E < 100 else (1,):
        torch.set_num_threads(threads)
        if "mm" in op:  # torch's own float32 product on CPU splits its sums over the threads
            first = run(sample, device)
        for actual, expected in zip(run(sample, device), first, strict=True):
            assert_same_bits(actual, expected)
