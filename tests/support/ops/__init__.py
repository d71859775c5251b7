# SPDX-License-Identifier: Apache-2.0
"""A page an op: a module of its name, with its OpInfo as ``OP``. Each list of ops is made of it.

Their letters: T rows, E groups, K in_features, N out_features.
"""

import importlib
import pkgutil

from support.op_info import OpInfo

PAGES: dict[str, OpInfo] = {
    page.name: importlib.import_module(f"{__name__}.{page.name}").OP
    for page in pkgutil.iter_modules(__path__)
}
OPS = tuple(PAGES)
