# SPDX-License-Identifier: Apache-2.0
"""The weights of a layer: how each is kept, its state, its cache and its adapter.

E groups (experts), K in_features, N out_features, r the rank of an adapter.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear.autograd.projection import Projection
from grouped_linear.meta_kernels.rules import ACTIVATIONS
from grouped_linear.nn.checks import check_flags, check_parameters_dtype, check_recipe
from grouped_linear.nn.dispatcher import TokenDispatcher
from grouped_linear.nn.gradient_accumulation import main_grad_of
from grouped_linear.nn.lora import Lora
from grouped_linear.quantized.frozen import STORAGES, KeepsFrozen
from grouped_linear.quantized.keep import (
    Weights,
    as_master,
    check_weights_kept,
    keep_weight,
    recipe_for,
)
from grouped_linear.quantized.weight_cache import WeightCache
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import DelayedScalingState, Recipe
from grouped_linear.recipes.delayed import new_state
from grouped_linear.recipes.recipe import UNQUANTIZED


class GroupedLayer(KeepsFrozen):
    """A layer of weights [E, N, K]; :class:`GroupedLinear` and :class:`GroupedMLP` are two.

    A weight ``name`` may have beside it the modules ``name_state`` and ``name_cache``, and its
    adapter's parameters ``name_lora_a`` and ``name_lora_b``.
    """

    weights: Weights
    fuse_wgrad_accumulation: bool
    observed: Any
    _recipe: Recipe | None
    _adapters: dict[str, Lora]

    @property
    def recipe(self) -> Recipe | None:
        """How GEMMs are computed. Another recipe has another state: make another layer."""
        return self._recipe

    def _set_options(
        self,
        owner: str,
        recipe: Recipe | None,
        weights: Weights,
        cache_weights: bool,
        fuse_wgrad_accumulation: bool,
        dtype: torch.dtype | None,
    ) -> None:
        """Check and set the options of all weights; errors begin with the name ``owner``."""
        flags = {"cache_weights": cache_weights, "fuse_wgrad_accumulation": fuse_wgrad_accumulation}
        check_flags(owner, **flags)
        check_parameters_dtype(owner, "dtype", dtype)
        check_recipe(owner, recipe)
        recipe = recipe_for(recipe, weights)
        check_weights_kept(owner, recipe, weights, cache_weights, fuse_wgrad_accumulation)
        self._owner, self._recipe, self.weights = owner, recipe, weights
        self._stores_weight = cache_weights or weights is not None
        self.fuse_wgrad_accumulation, self.observed = fuse_wgrad_accumulation, None

    def _add_weight(self, name: str, w_ENK: Tensor, cached: bool) -> None:
        """Register a weight, kept as the options say, with its state and its cache."""
        recipe, (E, N, K), device = self._recipe, w_ENK.shape, w_ENK.device
        if self.weights in STORAGES:
            self.freeze(name, w_ENK, recipe, weights=self.weights)
        else:
            self._register(name, keep_weight(w_ENK, self.weights, recipe))
        setattr(self, f"{name}_state", new_state(recipe, E, device))
        cache = WeightCache(recipe, E, N, K, device) if cached and recipe is not None else None
        setattr(self, f"{name}_cache", cache)

    def _register(self, name: str, t: Tensor | None) -> None:
        """Register a parameter. A subclass may register one for each expert."""
        self.register_parameter(name, None if t is None else nn.Parameter(t))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register, as any assignment does. State and cache leave the meta device with a weight.

        So does a master, which quantizes its copy of a plain weight. Frozen ones stay frozen.
        """
        before: Any = self._parameters.get(name)
        was_meta = before is not None and before.is_meta
        if was_meta and param is not None and not param.is_meta:
            is_plain = type(param) is nn.Parameter and param.dtype in ACTIVATIONS  # no bytes
            if isinstance(before, GroupedTensorWithMaster) and is_plain:
                kept: Any = as_master(before, param.detach())
                if kept.shape == before.shape:
                    vars(kept).update(vars(param))
                    param = kept.requires_grad_(param.requires_grad)
            if not before.requires_grad:
                param.requires_grad_(False)
        super().register_parameter(name, param)
        self._leave_meta()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load. torch may swap parameters for what it assigns, and then registers none."""
        super()._load_from_state_dict(*args, **kwargs)
        self._leave_meta()

    def _leave_meta(self) -> None:
        """Move state, cache and dispatcher from the meta device to where a parameter is."""
        device = next((p.device for p in self.parameters() if not p.is_meta), None)
        if device is None:
            return
        for kept in self.children():
            if isinstance(kept, TokenDispatcher):
                kept._leave_meta(device)
            elif isinstance(kept, DelayedScalingState | WeightCache):
                # Scales may have been loaded before the weight.
                kept._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)

    def _reset(self) -> None:
        """Forget the scales, what caches hold and what a dispatcher has counted."""
        for kept in self.children():
            if isinstance(kept, DelayedScalingState | WeightCache | TokenDispatcher):
                kept.reset()

    def _projection(
        self,
        name: str,
        weights: Mapping[str, Any],
        bias: Tensor | None,
        first: Tensor | bool | None,
    ) -> Projection:
        """The projection of the weight ``name`` in one call.

        ``weights`` are its parameters by name, one or one for each expert; ``first`` is from
        :func:`read_flag`.
        """
        tensors, frozen = tuple(weights.values()), self.frozen_weight(name)
        state, cache = getattr(self, f"{name}_state"), getattr(self, f"{name}_cache")
        main_grad, stored = None, frozen
        refresh: Tensor | bool = False
        if frozen is not None:
            tensors = (frozen.stand_in,)
        else:
            if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
                main_grad = main_grad_of(self._owner, weights, first)
            if cache is not None and first is not None:
                stored, refresh = cache.read(self._owner, tensors, first), first
        recipe = self._recipe
        if state is not None:
            recipe = state.of_call(fills_cache=refresh is not False)
        recipe, adapter, lora = recipe or UNQUANTIZED, None, self._adapters.get(name)
        if lora is not None:
            a, b = getattr(self, f"{name}_lora_a"), getattr(self, f"{name}_lora_b")
            adapter = lora.adapter(a, b, self.training)
        if self.observed is not None:
            recipe = self.observed.recipe(name, recipe)
        return Projection(tensors, bias, recipe, stored, main_grad, adapter, refresh)

    # --- adapters --------------------------------------------------------------------------------

    def _add_adapters(self, adapters: dict[str, Lora]) -> None:
        """Register the adapters' parameters and freeze all others."""
        self._adapters = adapters
        if not adapters:
            return
        self.requires_grad_(False)
        for name, lora in adapters.items():
            weight = getattr(self, name)
            E, N, K = self.weight_shape(name)
            frozen = self._frozen.get(name)
            dtype = lora.dtype or (weight.dtype if frozen is None else frozen.dtype)
            options = {"dtype": dtype, "device": weight.device}
            a = torch.empty(E, lora.rank, K, **options)
            self.register_parameter(f"{name}_lora_a", nn.Parameter(a))
            b = torch.empty(E, N, lora.rank, **options)
            self.register_parameter(f"{name}_lora_b", nn.Parameter(b))

    def _draw_adapters(self) -> None:
        """A as torch.nn.Linear draws its weight, B zero."""
        for name in self._adapters:
            a, b = getattr(self, f"{name}_lora_a"), getattr(self, f"{name}_lora_b")
            bound = 1 / math.sqrt(a.size(2))
            nn.init.uniform_(a, -bound, bound)
            nn.init.zeros_(b)

    @torch.no_grad()
    def merge_lora(self) -> None:
        """Add each adapter's product to its weight, and set its B to zero: outputs stay the same.

        ``weight[e] += scaling * B[e] @ A[e]``, computed in float32 and rounded once to the weight's
        numbers. On meta nothing is done.

        Raises:
            ValueError: for weights that are frozen in few bits, whose rounding would drop most of a
                small adapter. Nothing is merged then.
        """
        for name in self._adapters:
            if name in self._frozen:
                raise ValueError(
                    f"merge_lora: {name} is frozen with weights={self._frozen[name].weights!r} and "
                    "stays as it is: keep the adapter beside it, or merge in a layer with "
                    f"weights=None into which you copy dequantize({name!r})"
                )
        for name, lora in self._adapters.items():
            a, b = getattr(self, f"{name}_lora_a"), getattr(self, f"{name}_lora_b")
            weight = getattr(self, name)
            if weight.is_meta:  # which torch.autocast does not know
                return
            with torch.autocast(weight.device.type, enabled=False):
                product_ENK = lora.scaling * torch.bmm(b.float(), a.float())
            weight.copy_((weight.float() + product_ENK).to(weight.dtype))
            b.zero_()
