"""One call on a device, twice, with its outputs poisoned in between, beside what they must be."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from grouped_linear.selftest.case import Case, written
from grouped_linear.selftest.expected import Output

POISON = 0xFF  # NaN in every format of floating point, e5m2 among them; -1 as an integer


@dataclass
class Verdict:
    """What the cases of an op gave on a device.

    Args:
        op: its name.
        cases: how many calls were checked.
        worst: the number nearest to its bound: its error relative to that, its error, the bound;
            the first is negative where every output is compared bit for bit.
        failures: a sentence for each output that is wrong, and for each call that raised.
    """

    op: str
    cases: int = 0
    worst: tuple[float, float, float] = (-1.0, 0.0, 0.0)
    failures: list[str] = field(default_factory=list)


def call(op: str, arguments: dict[str, Any]) -> Any:
    """Call an op by its name."""
    return getattr(torch.ops.grouped_linear, op).default(**arguments)


def there(value: Any, device: torch.device) -> Any:
    """A tensor on a device, with its strides where it is not contiguous."""
    if not isinstance(value, Tensor):
        return value
    moved = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    if value.itemsize == 1:  # torch copies no strided float8 on every device
        moved.view(torch.uint8).copy_(value.view(torch.uint8))
        return moved
    return moved.copy_(value)


def results_of(case: Case, device: torch.device, poison: bool = False) -> list[Tensor]:
    """What the op returns and then what it writes, on the CPU.

    poison: leave the memory of what was returned full of NaN, for the next call to find.
    """
    arguments = tree_map(lambda value: there(value, device), case.arguments)
    returned = [t for t in tree_leaves(call(case.op, arguments)) if isinstance(t, Tensor)]
    changed = tree_leaves([arguments[name] for name in written(case.op)])
    results = [t.detach().cpu() for t in [*returned, *changed] if t is not None]
    if device.type == "cpu":
        results = [t.clone() for t in results]
    for t in returned if poison else ():
        memory = torch.empty(0, dtype=torch.uint8, device=device)
        memory.set_(t.untyped_storage()).fill_(POISON)  # type: ignore[call-overload]
    return results


def bits(t: Tensor) -> Tensor:
    """The bytes of each number as an integer, in the order of the numbers."""
    code = t.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize]
    )
    if t.dtype in (torch.uint8, torch.float8_e8m0fnu) or not t.is_floating_point():
        return code.long()
    code, sign = code.long(), 1 << (8 * t.itemsize - 1)
    code = code & (2 * sign - 1)
    return torch.where(code < sign, code, sign - 1 - code)  # -0 is one below 0


def differing(actual: Tensor, expected: Tensor) -> str:
    """Empty where the bytes are the same, else how many numbers differ, and by how much."""
    if actual.dtype != expected.dtype:
        return f"is {actual.dtype}, not {expected.dtype}"
    if actual.shape != expected.shape:
        return f"is {list(actual.shape)}, not {list(expected.shape)}"
    steps = (bits(actual) - bits(expected)).abs()
    count, one = int((steps > 0).sum()), int((steps == 1).sum())
    if count == 0:
        return ""
    return f"{count} of {steps.numel()} numbers differ, {one} of them by one step"


def check_output(actual: Tensor, output: Output, on_cpu: Tensor | None, verdict: Verdict) -> str:
    """Empty, or what is wrong. on_cpu: what the CPU gave for it, where the device is another."""
    actual, expected, allowed = actual[output.part], output.expected, output.allowed
    if allowed is None:
        return differing(actual, expected)
    if actual.shape != expected.shape:
        return f"is {list(actual.shape)}, not {list(expected.shape)}"
    if not actual.numel():
        return ""
    error = (actual.double() - expected).abs().nan_to_num(nan=torch.inf)
    of_bound = torch.where(error > allowed, torch.inf, error / allowed).nan_to_num(nan=0.0)
    at = int(of_bound.flatten().argmax())
    worst, off, bound = (t.flatten()[at].item() for t in (of_bound, error, allowed))
    verdict.worst = max(verdict.worst, (worst, off, bound))
    if worst > 1:
        count = int((of_bound > 1).sum())
        got, right = (t.flatten()[at].item() for t in (actual, expected))
        return (
            f"{count} of {error.numel()} numbers are too far from float64: {got:.6g} for "
            f"{right:.6g}, where {bound:.2g} is allowed"
        )
    if output.same_bits and on_cpu is not None:
        wrong = differing(actual, on_cpu[output.part])
        return f"unlike the CPU's: {wrong}" if wrong else ""
    return ""


def wrong_outputs(case: Case, device: torch.device, verdict: Verdict) -> list[str]:
    """A sentence for each output that is not what it must be."""
    once = results_of(case, device, poison=True)
    again = results_of(case, device)
    if len(once) != len(case.outputs):
        return [f"has {len(once)} outputs, not {len(case.outputs)}"]
    needs_cpu = any(o and o.same_bits for o in case.outputs) and device.type != "cpu"
    on_cpu = results_of(case, torch.device("cpu")) if needs_cpu else [None] * len(once)
    wrong = []
    for i, output in enumerate(case.outputs):
        if output is None:
            continue
        said = check_output(once[i], output, on_cpu[i], verdict)
        if not said:
            changed = differing(again[i][output.part], once[i][output.part])
            said = f"the same call in poisoned memory: {changed}" if changed else ""
        if said:
            wrong.append(f"output {i}: {said}")
    return wrong


def check(case: Case, device: torch.device, verdict: Verdict) -> None:
    """Add what a case gave to the verdict of its op."""
    verdict.cases += 1
    try:
        wrong = wrong_outputs(case, device, verdict)
    except (RuntimeError, ValueError) as error:
        wrong = [(str(error) or type(error).__name__).splitlines()[0]]
    verdict.failures += [f"{case.what}: {said}" if case.what else said for said in wrong]
