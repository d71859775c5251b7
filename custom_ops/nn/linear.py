# SPDX-License-Identifier: Apache-2.0
"""GroupedLinear, the layer as a torch.nn.Module.

T rows, E groups, K in_features, N out_features.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from grouped_linear.nn.checks import check_features, check_flags, check_mx_blocks, check_num_groups
from grouped_linear.nn.from_modules import fill, stack_linears
from grouped_linear.nn.functional import apply_linear
from grouped_linear.nn.gradient_accumulation import read_flag
from grouped_linear.nn.grouped_layer import GroupedLayer
from grouped_linear.nn.lora import Lora, check_lora
from grouped_linear.quantized.keep import Weights, is_dtensor
from grouped_linear.quantized.weight_cache import WeightCache
from grouped_linear.recipes import DelayedScalingState, Recipe


class GroupedLinear(GroupedLayer):
    """One linear layer for each expert: ``y[t] = x[t] @ weight[e].T + bias[e]``, t in group e.

    :class:`grouped_linear.te.GroupedLinear` has the further arguments of TransformerEngine's layer.

    Args:
        num_experts: E, the number of groups (experts), at most 1024.
        in_features: K, a multiple of 16; of 32 for weights in MXFP4.
        out_features: N, a multiple of 16.
        bias: whether the layer has a bias.
        device: of the parameters. After ``device="meta"`` call ``to_empty(device=...)`` and
            ``reset_parameters()``.
        dtype: of the parameters.
        recipe: how GEMMs are computed, for example ``Float8BlockScaling()``; None computes in the
            activations' dtype. docs/recipes.md says which to take.
        cache_weights: keep memory for the quantized weight, so that ``is_first_microbatch`` can
            reuse it from one micro-batch to the next. The memory is no buffer of the layer. Without
            a recipe there is nothing to cache.
        fuse_wgrad_accumulation: add weight gradients to ``main_grad``, an attribute of the weight
            (float32 or bfloat16, of its shape), in the GEMM itself, and leave ``grad`` alone.
            docs/from_other_libraries.md has the attributes that Megatron sets beside it.
        weights: how the weight is kept. None: a plain tensor, which each call quantizes. "both": a
            ``GroupedTensorWithMaster``, in high precision and in FP8 (or MXFP4); each write to it,
            as by an optimizer, writes both. "fp8": frozen in FP8 alone, under
            ``Float8BlockScaling``, for inference and adapters; it is drawn in `dtype`, then
            quantized. For these two the recipe is ``Float8BlockScaling()`` unless another is given.
            "mxfp4": the same in 4.25 bits an element, see
            :func:`grouped_linear.ops.quantize_mxfp4`, without a recipe or under
            ``Float8BlockScaling`` or ``MXFP8BlockScaling``.
        lora: an adapter beside the weight, which is frozen, see :class:`grouped_linear.Lora`.

    Attributes:
        num_experts, in_features, out_features, recipe, weights: as given.
        weight: [E, N, K]; frozen in FP8, the numbers' bytes in uint8, see :meth:`dequantize`; in
            MXFP4 two codes a byte, [E, N, K / 2].
        weight_scale_inv: the bytes of a frozen weight's scales, uint8: in FP8
            [E, ceil(N / 128), ceil(K / 128), 4], of float32 numbers; in MXFP4 [E, N, K / 32, 1].
        bias: [E, N], or None.
        weight_lora_a: [E, r, K], the adapter's A, where there is one.
        weight_lora_b: [E, N, r], the adapter's B.
        weight_state: what the recipe keeps from step to step: under ``DelayedScaling`` a
            :class:`grouped_linear.recipes.DelayedScalingState`; None under a recipe without state.
        weight_cache: the cached weight, see
            :class:`grouped_linear.quantized.weight_cache.WeightCache`; None without
            ``cache_weights``.
        observed: set by a tool: its ``recipe(name, recipe)`` returns a projection's recipe with
            observers, see :class:`grouped_linear.Format`; else None.

    Raises:
        ValueError: for a configuration that no call could run.

    >>> layer = GroupedLinear(num_experts=2, in_features=16, out_features=32)
    >>> layer
    GroupedLinear(num_experts=2, in_features=16, out_features=32, bias=True, recipe=None)
    >>> layer(torch.randn(7, 16), torch.tensor([4, 2])).shape
    torch.Size([7, 32])
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_state: DelayedScalingState | None
    weight_cache: WeightCache | None

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | None = None,
        cache_weights: bool = False,
        fuse_wgrad_accumulation: bool = False,
        weights: Weights = None,
        lora: Lora | None = None,
    ) -> None:
        super().__init__()
        check_num_groups("GroupedLinear", "num_experts", num_experts)
        check_features("GroupedLinear", in_features=in_features, out_features=out_features)
        check_flags("GroupedLinear", bias=bias)
        self._set_options(
            "GroupedLinear", recipe, weights, cache_weights, fuse_wgrad_accumulation, dtype
        )
        check_mx_blocks("GroupedLinear", recipe, weights, in_features=in_features)
        check_lora("GroupedLinear", lora)
        self.num_experts, self._has_bias = num_experts, bias
        self.in_features, self.out_features = in_features, out_features
        E, N, K = num_experts, out_features, in_features
        self._add_weight("weight", torch.empty(E, N, K, dtype=dtype, device=device), cache_weights)
        self._register("bias", torch.empty(E, N, dtype=dtype, device=device) if bias else None)
        self._add_adapters({} if lora is None else {"weight": lora})
        self.reset_parameters()

    @classmethod
    @torch.inference_mode(False)  # new parameters are to be ordinary ones
    def from_linears(
        cls,
        linears: Iterable[nn.Module],
        *,
        recipe: Recipe | None = None,
        weights: Weights = None,
        cache_weights: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ) -> Self:
        """Make the layer of a list of torch.nn.Linear, with their parameters, dtype and device.

        Frozen parameters stay frozen. Make the optimizer afterwards.

        Args:
            linears: such as a ModuleList, one an expert. They may be on the meta device.
            recipe, weights, cache_weights, fuse_wgrad_accumulation: as of the layer.

        Raises:
            ValueError: for modules that are no torch.nn.Linear, differ, are sharded, or have what
                would be lost: hooks, buffers, a second owner.
            TypeError: for what is no list of modules.

        >>> linears, x = nn.ModuleList(nn.Linear(16, 32) for _ in range(2)), torch.randn(7, 16)
        >>> y = GroupedLinear.from_linears(linears)(x, torch.tensor([4, 3]))
        >>> torch.allclose(y, torch.cat([linears[0](x[:4]), linears[1](x[4:])]), atol=1e-5)
        True
        """
        parameters = stack_linears(f"{cls.__name__}.from_linears", linears)
        E, N, K = parameters["weight"].shape
        layer = cls(
            E,
            K,
            N,
            bias="bias" in parameters,
            device="meta",
            dtype=parameters["weight"].dtype,
            recipe=recipe,
            cache_weights=cache_weights,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            weights=weights,
        )
        fill(layer, parameters)
        return layer

    def _experts_of(self, name: str) -> Any:
        """The parameter, whose first dimension is experts, or a tuple with one of each expert."""
        return getattr(self, name)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters again, reset scales and the weight cache; do nothing on meta."""
        if next(self.parameters()).is_meta:
            return
        self._reset()
        bias = self._experts_of("bias")
        with self.drawn("weight", self._experts_of("weight")) as weight:
            self._draw(weight, () if bias is None else bias)
        self._draw_adapters()

    def _draw(self, weight: Iterable[Tensor], bias: Iterable[Tensor]) -> None:
        """Initialise the experts' weights, then their biases, as torch.nn.Linear does."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in (weight, bias):
            # torch draws a sharded tensor so that its numbers do not depend on the sharding.
            experts: Iterable[Any] = (parameter,) if is_dtensor(parameter) else parameter
            for expert in experts:
                nn.init.uniform_(expert, -bound, bound)

    def forward(
        self,
        x: Tensor,
        m_splits: Tensor | Sequence[int],
        is_first_microbatch: Tensor | bool | None = None,
    ) -> Tensor:
        """Apply the layer to x [..., K], whose rows are sorted by group.

        Args:
            x, m_splits: see :func:`grouped_linear.grouped_linear`.
            is_first_microbatch: whether this is the first one since the last optimizer step. True
                quantizes the weight into the cache, and overwrites main_grad with its gradient when
                its backward runs, which must therefore be the first. False reads the cache and adds
                to main_grad. A bool tensor of no dimensions on x's device decides this on the
                device, so that one graph does both. None quantizes the weight for this call alone,
                and adds to main_grad: clear it yourself and pass None where a layer is called more
                than once before a backward, where backwards run in another order, or where layers
                share a weight. The cache holds the weight of the last call that filled it, also if
                that was substituted, as torch.func.functional_call does.

        Returns:
            y [..., N], zero in rows at and past sum(m_splits).

        Raises:
            RuntimeError: for wrong tensors, or where False reads an empty cache. A tensor that is
                false is not checked; it then reads NaN.
            ValueError: for ``is_first_microbatch`` under a recipe that caches weights and without
                ``cache_weights``, unless the weight is stored quantized anyway.
        """
        first = read_flag(self._owner, is_first_microbatch, x, self._recipe, self._stores_weight)
        given = self._projection("weight", {"weight": self.weight}, self.bias, first)
        return apply_linear(x, m_splits, given)

    def extra_repr(self) -> str:
        """The options that tell layers apart."""
        return (
            f"num_experts={self.num_experts}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self._has_bias}, recipe={self._recipe}"
            + ("" if self.weights is None else f", weights={self.weights!r}")
            + "".join(f", lora={lora}" for lora in self._adapters.values())
        )
