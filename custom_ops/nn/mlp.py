# SPDX-License-Identifier: Apache-2.0
"""GroupedMLP, the experts of a mixture-of-experts layer as a torch.nn.Module.

E experts, C experts chosen for a token, H features of a token, F features inside an expert.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from grouped_linear.autograd.activation import MLPConfig
from grouped_linear.autograd.projection import Projection
from grouped_linear.nn.checks import (
    check_activation,
    check_features,
    check_flags,
    check_mx_blocks,
    check_num_groups,
)
from grouped_linear.nn.dispatcher import TokenDispatcher
from grouped_linear.nn.from_modules import fill, stack_experts
from grouped_linear.nn.functional_mlp import apply_mlp, apply_mlp_sorted, config_of
from grouped_linear.nn.gradient_accumulation import read_flag
from grouped_linear.nn.grouped_layer import GroupedLayer
from grouped_linear.nn.lora import Lora, check_lora
from grouped_linear.ops.activation import PLAIN, Activation
from grouped_linear.quantized.keep import Weights
from grouped_linear.quantized.weight_cache import WeightCache
from grouped_linear.recipes import DelayedScalingState, Recipe


class GroupedMLP(GroupedLayer):
    """Experts of two layers and their weighted sum: :func:`grouped_linear.grouped_mlp` as a module.

    Args:
        num_experts: E, at most 1024.
        hidden_size: H, a multiple of 16.
        intermediate_size: F, a multiple of 16.
        bias: whether both GEMMs add a bias.
        activation: between them, see :func:`grouped_linear.grouped_mlp`.
        save_gate_up_in_fp8, recompute_gate_up: see :func:`grouped_linear.grouped_mlp`.
        recipe, cache_weights, weights: of both weights, see :class:`grouped_linear.GroupedLinear`.
        fuse_wgrad_accumulation: of both weights, see :class:`grouped_linear.GroupedLinear`. A bias
            has its gradient in ``grad``.
        lora: adapters beside both projections, which are frozen, see :class:`grouped_linear.Lora`;
            or a mapping with one for "gate_up_proj" or "down_proj" or each.
        dtype, device: of the parameters, see :class:`grouped_linear.GroupedLinear`.

    Attributes:
        num_experts, hidden_size, intermediate_size, activation: as given.
        save_gate_up_in_fp8, recompute_gate_up, recipe, weights: as given.
        gate_up_proj: [E, 2 F, H]: gate, then up, or as activation says; [E, F, H] for one without a
            gate.
        down_proj: [E, H, F].
        gate_up_proj_scale_inv, down_proj_scale_inv: the scales of frozen weights, see
            ``weight_scale_inv`` of :class:`grouped_linear.GroupedLinear`.
        gate_up_proj_bias: [E, 2 F] or [E, F], or None.
        down_proj_bias: [E, H], or None.
        gate_up_proj_lora_a: [E, r, H], the adapter's A, where there is one.
        gate_up_proj_lora_b: [E, 2 F, r] or [E, F, r], the adapter's B.
        down_proj_lora_a: [E, r, F].
        down_proj_lora_b: [E, H, r].
        gate_up_proj_state, down_proj_state: see ``weight_state`` of
            :class:`grouped_linear.GroupedLinear`.
        gate_up_proj_cache, down_proj_cache: see ``weight_cache`` there.
        dispatcher: where experts are on several processes, sends tokens to them; else None. See
            :class:`grouped_linear.parallel.ExpertParallel`.
        observed: see :class:`grouped_linear.GroupedLinear`.

    Raises:
        ValueError: for a configuration that no call could run.

    >>> mlp = GroupedMLP(num_experts=4, hidden_size=16, intermediate_size=32)
    >>> x, scores = torch.randn(2, 5, 16), torch.randn(2, 5, 4).softmax(dim=-1)
    >>> mlp(x, *scores.topk(2)).shape
    torch.Size([2, 5, 16])

    Adapters learn beside weights that are frozen in FP8:

    >>> from grouped_linear import Float8BlockScaling, Lora
    >>> mlp = GroupedMLP(4, 16, 32, recipe=Float8BlockScaling(), weights="fp8", lora=Lora(8))
    >>> mlp.down_proj.dtype, mlp.dequantize("down_proj").dtype
    (torch.uint8, torch.float32)
    >>> mlp(x, *scores.topk(2)).square().mean().backward()
    >>> [name for name, p in mlp.named_parameters() if p.grad is not None][:2]
    ['gate_up_proj_lora_a', 'gate_up_proj_lora_b']
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None
    gate_up_proj_state: DelayedScalingState | None
    down_proj_state: DelayedScalingState | None
    gate_up_proj_cache: WeightCache | None
    down_proj_cache: WeightCache | None
    dispatcher: TokenDispatcher | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: Activation = PLAIN,
        save_gate_up_in_fp8: bool = False,
        recompute_gate_up: bool = False,
        recipe: Recipe | None = None,
        cache_weights: bool = False,
        fuse_wgrad_accumulation: bool = False,
        weights: Weights = None,
        lora: Lora | Mapping[str, Lora] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_num_groups("GroupedMLP", "num_experts", num_experts)
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
        check_features("GroupedMLP", **sizes)
        check_flags("GroupedMLP", bias=bias)
        check_activation("GroupedMLP", activation)
        config_of("GroupedMLP", activation, save_gate_up_in_fp8, recompute_gate_up)
        self._set_options(
            "GroupedMLP", recipe, weights, cache_weights, fuse_wgrad_accumulation, dtype
        )
        check_mx_blocks("GroupedMLP", recipe, weights, **sizes)
        adapters = _adapters_of(lora)
        self.num_experts = num_experts
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.activation, self.save_gate_up_in_fp8 = activation, save_gate_up_in_fp8
        self.recompute_gate_up = recompute_gate_up
        self.dispatcher = None
        E, H, F = num_experts, hidden_size, intermediate_size
        G = 2 * F if activation.gated else F
        for name, shape in (("gate_up_proj", (E, G, H)), ("down_proj", (E, H, F))):
            self._add_weight(name, torch.empty(shape, dtype=dtype, device=device), cache_weights)
        for name, features in (("gate_up_proj_bias", G), ("down_proj_bias", H)):
            b = torch.empty(E, features, dtype=dtype, device=device) if bias else None
            self._register(name, b)
        self._add_adapters(adapters)
        self.reset_parameters()

    @classmethod
    @torch.inference_mode(False)  # new parameters are to be ordinary ones
    def from_experts(
        cls,
        experts: Iterable[nn.Module],
        *,
        recipe: Recipe | None = None,
        weights: Weights = None,
        cache_weights: bool = False,
        fuse_wgrad_accumulation: bool = False,
        save_gate_up_in_fp8: bool = False,
        recompute_gate_up: bool = False,
    ) -> Self:
        """Make the layer of a list of SwiGLU experts, with their parameters, dtype and device.

        Each expert computes ``w2(silu(w1(x)) * w3(x))`` without biases, or has the names gate_proj,
        up_proj and down_proj. Names do not show what an expert computes, so each runs on random
        rows, in training mode, and must give SwiGLU's result up to three times the error that
        rounding explains. Frozen parameters stay so. Make the optimizer afterwards.

        Args:
            experts: such as a ModuleList. They may be on the meta device.
            recipe, weights, cache_weights, fuse_wgrad_accumulation: see
                :class:`grouped_linear.GroupedLinear`.
            save_gate_up_in_fp8, recompute_gate_up: see :func:`grouped_linear.grouped_mlp`.

        Raises:
            ValueError: for experts that compute something else, differ, are sharded, or have what
                would be lost: hooks, buffers, parametrizations, a second owner.
            TypeError: for what is no list of modules.

        >>> class Expert(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w1, self.w3 = (nn.Linear(16, 32, bias=False) for _ in range(2))
        ...         self.w2 = nn.Linear(32, 16, bias=False)
        ...
        ...     def forward(self, x):
        ...         return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        >>> experts, x = nn.ModuleList(Expert() for _ in range(4)), torch.randn(3, 16)
        >>> mlp = GroupedMLP.from_experts(experts)
        >>> y = mlp(x, torch.ones(3, 1), torch.full((3, 1), 2))
        >>> torch.allclose(y, experts[2](x), atol=1e-5)
        True
        """
        parameters = stack_experts(f"{cls.__name__}.from_experts", experts)
        E, H, F = parameters["down_proj"].shape
        layer = cls(
            E,
            H,
            F,
            save_gate_up_in_fp8=save_gate_up_in_fp8,
            recompute_gate_up=recompute_gate_up,
            recipe=recipe,
            cache_weights=cache_weights,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            weights=weights,
            dtype=parameters["down_proj"].dtype,
            device="meta",
        )
        fill(layer, parameters)
        return layer

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters as nn.Linear does, reset scales and caches; do nothing on meta."""
        if self.gate_up_proj.is_meta:
            return
        for name in ("gate_up_proj", "down_proj"):
            weight_ENK, bias_EN = getattr(self, name), getattr(self, f"{name}_bias")
            features = self.hidden_size if name == "gate_up_proj" else self.intermediate_size
            bound = 1 / math.sqrt(features)
            if bias_EN is not None:
                nn.init.uniform_(bias_EN, -bound, bound)
            with self.drawn(name, weight_ENK) as w_ENK:
                nn.init.uniform_(w_ENK, -bound, bound)
        self._draw_adapters()
        self._reset()

    def forward(
        self,
        x: Tensor,
        top_k_weights: Tensor,
        top_k_index: Tensor,
        is_first_microbatch: Tensor | bool | None = None,
        *,
        max_rows: int | None = None,
    ) -> Tensor:
        """Send tokens x [..., H] through the experts top_k_index [..., C], and sum their outputs.

        Args:
            x, top_k_weights, top_k_index, max_rows: see :func:`grouped_linear.grouped_mlp`.
            is_first_microbatch: of both weights, see :meth:`grouped_linear.GroupedLinear.forward`.

        Raises what :func:`grouped_linear.grouped_mlp` and
        :meth:`grouped_linear.GroupedLinear.forward` raise.
        """
        if self.dispatcher is not None and max_rows is not None:
            raise ValueError(
                "GroupedMLP: the dispatcher chooses max_rows where experts are on several "
                "processes: give it a capacity_factor"
            )
        projections = self._projections(x, is_first_microbatch)
        given = x, top_k_weights, top_k_index, *projections, self._config
        return apply_mlp(*given, max_rows=max_rows, dispatcher=self.dispatcher)

    def forward_sorted(
        self,
        x: Tensor,
        m_splits: Tensor | Sequence[int],
        row_weights: Tensor | None = None,
        is_first_microbatch: Tensor | bool | None = None,
    ) -> Tensor:
        """Send rows x [R, H] that are sorted by expert through their experts.

        For a dispatcher that sorts tokens itself, as DeepEP's, Megatron-Core's and torchtitan's do.
        FSDP2, DistributedDataParallel and hooks know ``forward`` alone: let a subclass's call this.

        Args:
            x, m_splits, row_weights: see :func:`grouped_linear.grouped_mlp_sorted`.
            is_first_microbatch: see :meth:`forward`.

        Raises:
            ValueError: where a dispatcher of this package sorts; others as :meth:`forward`.

        >>> class Experts(GroupedMLP):
        ...     def forward(self, x, m_splits):
        ...         return self.forward_sorted(x, m_splits)
        >>> Experts(4, 16, 32)(torch.randn(10, 16), torch.tensor([3, 0, 5, 2])).shape
        torch.Size([10, 16])
        """
        if self.dispatcher is not None:
            raise ValueError("GroupedMLP: its dispatcher sorts: call forward, not forward_sorted")
        projections = self._projections(x, is_first_microbatch)
        return apply_mlp_sorted(x, m_splits, row_weights, *projections, self._config)

    @property
    def _config(self) -> MLPConfig:
        return MLPConfig(self.activation, self.save_gate_up_in_fp8, self.recompute_gate_up)

    def _projections(
        self, x: Tensor, is_first_microbatch: Tensor | bool | None
    ) -> tuple[Projection, Projection]:
        first = read_flag(self._owner, is_first_microbatch, x, self._recipe, self._stores_weight)
        weight, bias = {"gate_up_proj": self.gate_up_proj}, self.gate_up_proj_bias
        gate_up = self._projection("gate_up_proj", weight, bias, first)
        weight, bias = {"down_proj": self.down_proj}, self.down_proj_bias
        return gate_up, self._projection("down_proj", weight, bias, first)

    def extra_repr(self) -> str:
        """The options that tell layers apart."""
        E, H, F = self.num_experts, self.hidden_size, self.intermediate_size
        bias, activation = self.down_proj_bias is not None, self.activation
        saved = ("save_gate_up_in_fp8", "recompute_gate_up")
        return (
            f"num_experts={E}, hidden_size={H}, intermediate_size={F}, bias={bias}, "
            f"activation={activation}, recipe={self.recipe}"
            + ("" if self.weights is None else f", weights={self.weights!r}")
            + "".join(f", {name}=True" for name in saved if getattr(self, name))
            + (f", lora={self._adapters}" if self._adapters else "")
        )


def _adapters_of(lora: Any) -> dict[str, Lora]:
    """The adapters that ``lora`` asks for, by the name of the projection."""
    names = "gate_up_proj", "down_proj"
    if not isinstance(lora, Mapping):
        check_lora("GroupedMLP", lora)
        return {} if lora is None else dict.fromkeys(names, lora)
    for name, one in lora.items():
        if name not in names:
            raise ValueError(
                f"GroupedMLP: lora may have adapters for gate_up_proj and down_proj, got {name!r}"
            )
        if not isinstance(one, Lora):
            raise ValueError(
                f"GroupedMLP: lora[{name!r}] must be a grouped_linear.Lora, got {one!r}"
            )
    return dict(lora)
