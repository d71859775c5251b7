# SPDX-License-Identifier: Apache-2.0
"""Numbers of options, which stay constants for Dynamo.

With ``dynamic=True``, and where a number has changed, Dynamo makes an input of the graph of each
float that it reads from an object or a default (torch 2.11 to 2.14). An op's argument cannot be
one: Dynamo traces a second time without it, and cannot compile two layers of one recipe. A string
stays a constant, and so do 0 and 1 as integers, which defaults therefore are. torch 2.11 still
traces twice where a frozen dataclass that the graph reads has other numbers: it reads all fields.
"""

from numbers import Integral, Rational, Real
from typing import Any

import torch


def _is(kind: Any, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """Whether it is an integer of an option, as numpy's are too, and no bool."""
    return _is(Integral, value)


def is_number(value: Any) -> bool:
    """Whether it is a number of an option, as numpy's are too: real, in float's range, no bool."""
    if type(value) is float:  # isinstance asks an abstract class, 1.5 us
        return True
    largest = torch.finfo(torch.float64).max  # a float of a module would not be a constant
    return _is(Real, value) and (not _is(Rational, value) or -largest <= value <= largest)


def is_finite(value: Any) -> bool:
    """Whether it is a number of an option that is finite in float32, in which ops compute."""
    largest = torch.finfo(torch.float32).max
    return is_number(value) and -largest <= value <= largest


def keep_constants(instance: object, *names: str) -> None:
    """Keep numbers of a frozen dataclass as texts, at the end of its ``__post_init__``.

    Not in a graph, where they may be symbols, without a text.
    """
    texts = {}
    if not torch.compiler.is_compiling():
        for name in names:
            number = getattr(instance, name)
            if is_number(number):
                texts[name] = repr(float(number))
    object.__setattr__(instance, "_texts", texts)


def constant(instance: Any, name: str) -> Any:
    """A number of which a text was kept, or whatever else the attribute is."""
    text = getattr(instance, "_texts", {}).get(name)  # a subclass may leave out __post_init__
    return getattr(instance, name) if text is None else float(text)
