"""One call on a device, twice, with its outputs poisoned in between, beside what they must be."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from grouped_linear.selftest.calls import Call, Near

POISON = 0xFF  # NaN in every format of floating point; -1 as an integer


@dataclass
class Verdict:
    """What the calls of an op gave on a device.

    Args:
        op: its name.
        worst: the number nearest to its bound: its error relative to that, its error, the bound.
        failures: a sentence for each result that is wrong, and for each call that raised.
    """

    op: str
    worst: tuple[float, float, float] = (-1.0, 0.0, 0.0)
    failures: list[str] = field(default_factory=list)


def call(op: str, arguments: dict[str, Any]) -> Any:
    """Call an op by its name."""
    return getattr(torch.ops.grouped_linear, op).default(**arguments)


def numbers_of(made: Call, device: torch.device, poison: bool = False) -> list[Near]:
    """The numbers that a call gives on a device, beside what they must be.

    poison: leave the memory of what was returned full of NaN, for the next call to find.
    """
    arguments = tree_map(
        lambda t: t.clone().to(device) if isinstance(t, Tensor) else t, made.arguments
    )
    returned = [t for t in tree_leaves(call(made.op, arguments)) if isinstance(t, Tensor)]
    schema = getattr(torch.ops.grouped_linear, made.op).default._schema.arguments
    names = [a.name for a in schema if a.alias_info and a.alias_info.is_write]
    written = tree_leaves([arguments[name] for name in names])
    near = made.check(*(t.cpu().clone() for t in [*returned, *written] if t is not None))
    for t in returned if poison else ():
        memory = torch.empty(0, dtype=torch.uint8, device=device)
        memory.set_(t.untyped_storage()).fill_(POISON)  # type: ignore[call-overload]
    return near


def differing(actual: Tensor, expected: Tensor) -> str:
    """Empty where the numbers are the same, NaN among them, else how many differ."""
    if actual.shape != expected.shape:
        return f"is {list(actual.shape)}, not {list(expected.shape)}"
    actual, expected = actual.double(), expected.double()
    count = int(((actual != expected) & ~(actual.isnan() & expected.isnan())).sum())
    return f"{count} of {actual.numel()} numbers differ" if count else ""


def wrong(near: Near, verdict: Verdict) -> str:
    """Empty, or how many numbers are too far from what they must be."""
    actual, expected = near.actual.double(), near.expected.double()
    if actual.shape != expected.shape:
        return differing(actual, expected)
    error = (actual - expected).abs().nan_to_num(nan=torch.inf)
    allowed = torch.as_tensor(near.allowed).double().expand_as(error)
    of_bound = torch.where(error > allowed, torch.inf, error / allowed).nan_to_num(nan=0.0)
    at = int(of_bound.flatten().argmax())
    worst, off, bound, got, right = (
        t.flatten()[at].item() for t in (of_bound, error, allowed, actual, expected)
    )
    verdict.worst = max(verdict.worst, (worst, off, bound))
    if worst <= 1:
        return ""
    return (
        f"{int((of_bound > 1).sum())} of {error.numel()} numbers are too far from float64: "
        f"{got:.6g} for {right:.6g}, where {bound:.2g} is allowed"
    )


def check(made: Call, device: torch.device, verdict: Verdict) -> None:
    """Add what a call gave to the verdict of its op."""
    try:
        once = numbers_of(made, device, poison=True)
        again = numbers_of(made, device)
        on_cpu = numbers_of(made, torch.device("cpu")) if device.type != "cpu" else once
    except (RuntimeError, ValueError) as error:
        verdict.failures.append((str(error) or type(error).__name__).splitlines()[0])
        return
    for i, near in enumerate(once):
        said = wrong(near, verdict)
        if not said and (changed := differing(again[i].actual, near.actual)):
            said = f"the same call in poisoned memory: {changed}"
        if not said and near.same_bits and (other := differing(near.actual, on_cpu[i].actual)):
            said = f"unlike the CPU's: {other}"
        if said:
            verdict.failures.append(f"result {i}: {said}")
