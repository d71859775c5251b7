"""The class of a converted module: a subclass of the original class with new members."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from torch import nn

from grouped_linear.quantized.pickle_version import check_pickle_version
from grouped_linear.quantized.state_dict import SavesQuantized

Forward = Callable[..., Any]

PICKLE_VERSION = 1


@runtime_checkable
class MakesMembers(Protocol):
    """Members of a class as data that can be pickled, which local functions cannot."""

    def members(self) -> dict[str, Any]:
        """The members by name."""


def is_converted(module: nn.Module) -> bool:
    """Whether the module has a class that :func:`converted_class` made."""
    return hasattr(type(module), "_converted_from")


def class_before(module: nn.Module) -> type[nn.Module]:
    """The module's class, or the one that it had before it was converted."""
    before: type[nn.Module] = getattr(type(module), "_converted_from", type(module))
    return before


def convert_class(module: Any, new: Forward | MakesMembers) -> None:
    """Give a module the class that :func:`converted_class` makes of its own."""
    before: Any = type(module)
    made_of: Any = new
    module.__class__ = converted_class(before, made_of)


def restore_class(module: nn.Module) -> None:
    """Restore the original class, unless FSDP2 or another has made a subclass since."""
    if "_converted_from" in vars(type(module)):
        module.__class__ = class_before(module)


@lru_cache  # all layers of a class, copies and loaded ones too, share it and compile once
def converted_class(before: type[nn.Module], new: Forward | MakesMembers) -> type[nn.Module]:
    """A subclass of a module's class with members of its own; copies and pickles keep it.

    Args:
        before: the module's class.
        new: its forward, or what makes its members.
    """

    def reduce_ex(self: Any, protocol: Any) -> tuple[Any, ...]:
        whole: tuple[Any, ...] = super(converted, self).__reduce_ex__(protocol)
        if type(self) is not converted:  # a subclass, such as FSDP2 makes
            return whole
        # An import cannot find a class that is made here, so loading a pickle makes it again.
        made_of = {"version": PICKLE_VERSION, "class": before, "new": new}
        return _new_converted, (made_of,), *whole[2:]

    body = {
        **(new.members() if isinstance(new, MakesMembers) else {"forward": new}),
        "__module__": before.__module__,
        "__reduce_ex__": reduce_ex,
        "_converted_from": before,
    }
    converted: type[nn.Module] = type(f"Grouped{before.__name__}", (SavesQuantized, before), body)
    return converted


def _new_converted(made_of: dict[str, Any]) -> nn.Module:
    """An empty module for a copy or a pickle, which then sets its attributes."""
    check_pickle_version("convert", made_of["version"], PICKLE_VERSION)
    converted = converted_class(made_of["class"], made_of["new"])
    return converted.__new__(converted)
