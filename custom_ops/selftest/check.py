# SPDX-License-Identifier: Apache-2.0
"""One call on a device beside torch's or the CPU's, and once more in memory full of NaN."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from grouped_linear.report import first_line
from grouped_linear.selftest.calls import EXACT, Call, Inputs, Tolerance


def results(call: Call, inputs: Inputs, device: torch.device, poison: bool = False) -> list[Tensor]:
    """The results of a call on a device, on the CPU.

    poison: fill a GPU's memory with NaN, or the largest integer, when it is allocated.
    """
    given = Inputs(**{name: t.to(device) for name, t in vars(inputs).items()})
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    fills = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(poison, warn_only=True)
    deterministic.fill_uninitialized_memory = poison
    try:
        return [t.cpu() for t in tree_leaves(call.ours(given))]
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fills


def differing(actual: Tensor, expected: Tensor, tolerance: Tolerance = EXACT) -> str:
    """Empty where numbers are equal or near enough, NaN beside NaN, else how many are not."""
    if actual.shape != expected.shape:
        return f"is {list(actual.shape)}, not {list(expected.shape)}"
    actual, expected = actual.double(), expected.double()
    relative, absolute = tolerance
    near = torch.isclose(actual, expected, relative, absolute, equal_nan=True)
    if near.all():
        return ""
    got, right = actual[~near][0].item(), expected[~near][0].item()
    return f"{int((~near).sum())} of {near.numel()} numbers differ, as {got:.6g} from {right:.6g}"


def failures(call: Call, inputs: Inputs, device: torch.device) -> list[str]:
    """A sentence for each wrong result of a call on a device, and for its error."""
    on_cpu = device.type == "cpu"
    try:
        once, again = (results(call, inputs, device, poison) for poison in (False, True))
        reference = call._replace(ours=call.torchs or call.ours) if on_cpu else call
        expected = results(reference, inputs, torch.device("cpu"))
    except (RuntimeError, ValueError) as error:
        return [first_line(error)]
    tolerance = EXACT if call.same_bits and not on_cpu else call.tolerance
    found = []
    for i, (t, same, right) in enumerate(zip(once, again, expected, strict=True)):
        if said := differing(t, right, tolerance):
            found.append(f"result {i}: beside {'torch' if on_cpu else 'the CPU'}: {said}")
        elif said := differing(same, t):
            found.append(f"result {i}: beside the same call again: {said}")
    return found
