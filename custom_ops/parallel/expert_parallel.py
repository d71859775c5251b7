# SPDX-License-Identifier: Apache-2.0
"""The experts of a GroupedMLP over several processes, as a style of torch's parallelize_module."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from grouped_linear.nn.checks import check_whole
from grouped_linear.nn.dispatcher import TokenDispatcher
from grouped_linear.nn.mlp import GroupedMLP
from grouped_linear.parallel.dispatchers import (
    AllGather,
    AllToAll,
    AllToAllV,
    check_dispatch_options,
    check_mesh,
)
from grouped_linear.quantized.weight_cache import WeightCache

#: Makes the dispatcher of one layer: called with the mesh and E, the experts of all processes.
MakeDispatcher = Callable[[DeviceMesh, int], TokenDispatcher]
DISPATCHERS: dict[str, Any] = {
    "all_gather": AllGather,
    "all_to_all": AllToAll,
    "all_to_all_v": AllToAllV,
}


class ExpertParallel(ParallelStyle):
    """Spread a :class:`grouped_linear.GroupedMLP`'s experts over the processes of a mesh.

    Give it to ``torch.distributed.tensor.parallel.parallelize_module``. Process i of D then keeps
    E / D experts, from i E / D on. The layer's forward takes the tokens of this process, sends them
    to the processes that hold their experts, and sums the results that return: it returns what one
    process with all experts would return. All processes call it with the same number of tokens.
    Experts are numbered from 0 to E - 1. Pad with tokens of expert -1, which are sent nowhere.

    Parameters become DTensors, ``Shard(0)`` on the mesh, and keep their names. An expert's gradient
    is the sum over the tokens of all processes of the mesh. docs/several_gpus.md has gradients,
    FSDP2, checkpoints, and what each way costs.

    Args:
        dispatch: how tokens travel: ``"all_gather"``, ``"all_to_all"`` or ``"all_to_all_v"``, by
            :class:`grouped_linear.parallel.AllGather`,
            :class:`grouped_linear.parallel.AllToAll` or
            :class:`grouped_linear.parallel.AllToAllV`; or a function that is called with the mesh
            and E, and returns another :class:`grouped_linear.parallel.TokenDispatcher`.
        capacity_factor, fp8, check_tokens: see the dispatchers.

    Raises:
        ValueError: for another name or option; for another module than a GroupedMLP; for one whose
            parameters are sharded, whose recipe has a state, or whose experts do not divide evenly.

    >>> import torch
    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("experts",))
    >>> mlp = GroupedMLP(num_experts=4, hidden_size=16, intermediate_size=32)
    >>> mlp = parallelize_module(mlp, mesh["experts"], ExpertParallel(capacity_factor=2.0))
    >>> mlp.down_proj.placements, mlp.down_proj.shape
    ((Shard(dim=0),), torch.Size([4, 16, 32]))
    >>> mlp(torch.randn(5, 16), *torch.rand(5, 4).topk(2)).shape, mlp.dispatcher.dropped
    (torch.Size([5, 16]), tensor(0))
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        dispatch: str | MakeDispatcher = "all_gather",
        *,
        capacity_factor: float | None = None,
        fp8: bool = False,
        check_tokens: bool = False,
    ) -> None:
        super().__init__()
        if dispatch not in DISPATCHERS if isinstance(dispatch, str) else not callable(dispatch):
            raise ValueError(
                "ExpertParallel: dispatch must be all_gather, all_to_all, all_to_all_v or a "
                f"function, got {dispatch!r}"
            )
        check_dispatch_options("ExpertParallel", capacity_factor, fp8, check_tokens)
        if not isinstance(dispatch, str) and (capacity_factor is not None or fp8 or check_tokens):
            raise ValueError(
                "ExpertParallel: capacity_factor, fp8 and check_tokens are for dispatchers by "
                "name: give them to your own where you make it"
            )
        options = {"capacity_factor": capacity_factor, "fp8": fp8, "check_tokens": check_tokens}
        self.dispatch, self.options = dispatch, options

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """parallelize_module calls this."""
        if not isinstance(module, GroupedMLP):
            raise ValueError(
                f"ExpertParallel: spreads a GroupedMLP, got {type(module).__name__}: transformers "
                "and torchtitan spread the experts of their models themselves"
            )
        check_whole("ExpertParallel", module.parameters(), "apply it")
        if module.recipe is not None and module.recipe.has_state:
            raise ValueError(
                f"ExpertParallel: {type(module.recipe).__name__} keeps scales from step to step, "
                "which are not spread with experts: take another recipe, as Float8BlockScaling()"
            )
        E = module.num_experts
        if isinstance(self.dispatch, str):
            dispatcher: Any = DISPATCHERS[self.dispatch](device_mesh, E, **self.options)
        else:
            check_mesh("ExpertParallel", device_mesh, E)
            dispatcher = self.dispatch(device_mesh, E)
        if not isinstance(dispatcher, TokenDispatcher):
            raise ValueError(
                "ExpertParallel: dispatch must return a TokenDispatcher, got "
                f"{type(dispatcher).__name__}"
            )
        for name, p in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(p, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(part, requires_grad=p.requires_grad))
        for cache_name, cache in list(module.named_children()):
            if isinstance(cache, WeightCache):
                _, N, K = cache.quantized_weight().stand_in.shape
                own = E // device_mesh.size()
                smaller = WeightCache(cache.recipe, own, N, K, cache.values.device)
                setattr(module, cache_name, smaller)
        module.dispatcher = dispatcher
        module.dispatcher.ranks = tuple(device_mesh.mesh.flatten().tolist())
        return module
