# SPDX-License-Identifier: Apache-2.0
"""Load ``_C.so``, which registers the ops of the namespace ``grouped_linear`` with torch."""

import importlib
from pathlib import Path
from types import ModuleType

import torch

import grouped_linear

MINIMUM_TORCH = (2, 11)


def library_path() -> Path:
    """The path of ``_C.so``, which a program without Python loads with ``dlopen``.

    >>> library_path().name
    '_C.so'
    """
    # An editable install has _C.so in another folder of the package's path than this file.
    for folder in grouped_linear.__path__:
        path = Path(folder) / "_C.so"
        if path.exists():
            return path
    raise ImportError(
        "grouped_linear: _C.so is missing, build it with `pip install --no-build-isolation -e .`"
    )


def host_module() -> ModuleType | None:
    """The optional module ``_host``, or None where it was not built."""
    try:
        return importlib.import_module("grouped_linear._host")
    except ImportError:
        return None


_found = tuple(int(part) for part in torch.__version__.split(".")[:2])
if _found < MINIMUM_TORCH:
    raise ImportError(f"grouped_linear: needs torch 2.11 or newer, found {torch.__version__}")
torch.ops.load_library(str(library_path()))
