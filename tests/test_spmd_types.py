# SPDX-License-Identifier: Apache-2.0
"""torchtitan's type checker knows what the layers do to tensors that differ between processes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from grouped_linear import Float8BlockScaling, GroupedLinear, GroupedMLP
from support.processes import one_process

spmd_types: Any = pytest.importorskip(
    "spmd_types", reason="spmd_types is not installed: pip install spmd_types, or torchtitan"
)

checker: Any = pytest.importorskip("spmd_types.checker")


@pytest.fixture
def axis() -> Iterator[Any]:
    with one_process():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with spmd_types.set_current_mesh(mesh):
            yield mesh.get_group("dp")


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["none", "block"])
@pytest.mark.parametrize("kind", ["V", "R"])
def test_layers(axis: Any, kind: str, recipe: Any) -> None:
    """Of tokens that differ the outputs do, of equal ones they are equal."""
    of_kind = {axis: getattr(spmd_types, kind)}
    same = {axis: spmd_types.R}
    linear, mlp = GroupedLinear(2, 16, 32, recipe=recipe), GroupedMLP(2, 16, 32, recipe=recipe)
    x, sizes = torch.randn(5, 16, requires_grad=True), torch.tensor([2, 3])
    weights, chosen = torch.rand(5, 2), torch.zeros(5, 2, dtype=torch.int64)
    with checker.typecheck("strict"):
        for p in (*linear.parameters(), *mlp.parameters()):
            spmd_types.assert_type(p, same)
        for t in (x, sizes, weights, chosen):
            spmd_types.assert_type(t, of_kind)
        for y in (linear(x, sizes), mlp(x, weights, chosen)):
            spmd_types.assert_type(y, of_kind)
