# SPDX-License-Identifier: Apache-2.0
"""The class of a converted module: a subclass of the original class with new members."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import nn

from grouped_linear.quantized.frozen import KeepsFrozen


def is_converted(module: nn.Module) -> bool:
    """Whether the module has a class that :func:`converted_class` made."""
    return hasattr(type(module), "_converted_from")


def class_before(module: nn.Module) -> type[nn.Module]:
    """The module's class, or the one that it had before it was converted."""
    before: type[nn.Module] = getattr(type(module), "_converted_from", type(module))
    return before


def convert_class(module: Any, members: Callable[..., dict[str, Any]], *args: Any) -> None:
    """Give a module the class that :func:`converted_class` makes of the one before a conversion."""
    before: Any = class_before(module)
    module.__class__ = converted_class(before, members, *args)


@lru_cache  # all layers of a class, copies and loaded ones too, share it and compile once
def converted_class(
    before: type[nn.Module], members: Callable[..., dict[str, Any]], *args: Any
) -> type[nn.Module]:
    """A subclass of a module's class with new members; copies and pickles keep it.

    Pickles name ``before``, the function ``members`` and its hashable ``args``. The function makes
    the members by name, which are local functions that no pickle can hold.
    """

    def reduce_ex(self: Any, protocol: Any) -> tuple[Any, ...]:
        whole: tuple[Any, ...] = super(converted, self).__reduce_ex__(protocol)
        if type(self) is not converted:  # a subclass, such as FSDP2 makes
            return whole
        # An import cannot find a class that is made here, so loading a pickle makes it again.
        return _new_converted, (before, members, *args), *whole[2:]

    body = {
        **members(*args),
        "__module__": before.__module__,
        "__reduce_ex__": reduce_ex,
        "_converted_from": before,
        "_converted_with": (members, *args),
    }
    converted: type[nn.Module] = type(f"Grouped{before.__name__}", (KeepsFrozen, before), body)
    return converted


def _new_converted(*made_of: Any) -> nn.Module:
    """An empty module for a copy or a pickle, which then sets its attributes."""
    converted = converted_class(*made_of)
    return converted.__new__(converted)
