"""One call on a device beside torch's or the CPU's, and once more in memory full of NaN."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from grouped_linear.selftest.calls import EXACT, Call, Inputs, Tolerance


@dataclass
class Verdict:
    """The failures of an op on a device: a sentence for each wrong result and each error."""

    op: str
    failures: list[str] = field(default_factory=list)


def results(call: Call, inputs: Inputs, device: torch.device, poison: bool = False) -> list[Tensor]:
    """The results of a call on a device, on the CPU.

    poison: fill a GPU's memory with NaN, or the largest integer, when it is allocated.
    """
    given = Inputs(*(t.to(device) for t in inputs))
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


def check(call: Call, inputs: Inputs, device: torch.device, verdict: Verdict) -> None:
    """Add the failures of a call to the verdict of its op."""
    try:
        once, again = (results(call, inputs, device, poison) for poison in (False, True))
        on_cpu = device.type == "cpu"
        reference = call._replace(ours=call.torchs or call.ours) if on_cpu else call
        expected = results(reference, inputs, torch.device("cpu"))
    except (RuntimeError, ValueError) as error:
        verdict.failures.append((str(error) or type(error).__name__).splitlines()[0])
        return
    tolerance = EXACT if call.same_bits and not on_cpu else call.tolerance
    for i, (t, same, right) in enumerate(zip(once, again, expected, strict=True)):
        said = differing(t, right, tolerance)
        said = f"beside {'torch' if on_cpu else 'the CPU'}: {said}" if said else ""
        if not said and (changed := differing(same, t)):
            said = f"beside the same call again: {changed}"
        if said:
            verdict.failures.append(f"result {i}: {said}")
