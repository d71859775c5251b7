"""The class of a converted module: that of before, with another forward."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from torch import nn

from grouped_linear.quantized.pickle_version import check_pickle_version

Forward = Callable[..., Any]

PICKLE_VERSION = 1


@runtime_checkable
class MakesForward(Protocol):
    """A forward as data that can be pickled, which a local function cannot."""

    def make_forward(self) -> Forward:
        """The function."""


def is_converted(module: nn.Module) -> bool:
    """Whether the module has a class that :func:`converted_class` made."""
    return hasattr(type(module), "_converted_from")


@lru_cache  # all layers of a class, copies and loaded ones too, share it and compile once
def converted_class(before: type[nn.Module], new: Forward | MakesForward) -> type[nn.Module]:
    """A subclass of a module's class with a forward of its own; copies and pickles keep it.

    Args:
        before: the module's class.
        new: its forward, or what makes it.
    """

    def reduce_ex(self: Any, protocol: Any) -> tuple[Any, ...]:
        whole: tuple[Any, ...] = super(converted, self).__reduce_ex__(protocol)
        if type(self) is not converted:  # a subclass, such as FSDP2 makes
            return whole
        # An import cannot find a class that is made here, so loading a pickle makes it again.
        made_of = {"version": PICKLE_VERSION, "class": before, "forward": new}
        return _new_converted, (made_of,), *whole[2:]

    body = {
        "forward": new.make_forward() if isinstance(new, MakesForward) else new,
        "__module__": before.__module__,
        "__reduce_ex__": reduce_ex,
        "_converted_from": before,
    }
    converted: type[nn.Module] = type(f"Grouped{before.__name__}", (before,), body)
    return converted


def _new_converted(made_of: dict[str, Any]) -> nn.Module:
    """An empty module for a copy or a pickle, which then sets its attributes."""
    check_pickle_version("convert_experts", made_of["version"], PICKLE_VERSION)
    converted = converted_class(made_of["class"], made_of["forward"])
    return converted.__new__(converted)
