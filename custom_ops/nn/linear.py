"""GroupedLinear, the layer as a torch.nn.Module.

T rows, E groups, K in_features, N out_features.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear.autograd.context import LinearOptions
from grouped_linear.autograd.wgrad import DeferredWgrad, Wgrad
from grouped_linear.nn.deferred import watch
from grouped_linear.nn.functional import apply_layer, autocast_dtype, check_parameters
from grouped_linear.nn.gradient_accumulation import cached_weight, main_grad_of, read_flag
from grouped_linear.nn.options import (
    GroupedLinearOptions,
    RngStateTracker,
    check_out_of_scope,
    check_parameters_dtype,
)
from grouped_linear.quantized.state_dict import join_quantized, scales_of, split_quantized
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import convert_loaded, is_dtensor, quantized_as
from grouped_linear.quantized.weight_cache import WeightCache
from grouped_linear.recipes import DelayedScalingState, Recipe, new_state


def _drawn_parts(parameter: Any, init_method: object = None) -> Iterator[Any]:
    """The parts that are initialised one by one: experts, or a sharded tensor as a whole.

    torch draws a sharded tensor's numbers so that they do not depend on the sharding.
    """
    if not is_dtensor(parameter):
        yield from parameter
    elif init_method is None:
        yield parameter
    else:
        yield from parameter.to_local()


class GroupedLinear(nn.Module):
    """One linear layer for each expert: ``y[t] = x[t] @ weight[e].T + bias[e]``, t in group e.

    Args:
        num_gemms: E, the number of groups (experts), at most 1024.
        in_features: K, a multiple of 16.
        out_features: N, a multiple of 16.
        bias: whether the layer has a bias.
        return_bias: return ``(y, bias)``, with the bias in y's dtype and not added.
        init_method: called with every expert's weight [N, K] to fill it; torch.nn.Linear's
            initialisation by default. For a sharded weight it is called with this process's part.
        get_rng_state_tracker: returns an object whose ``fork(name)`` context holds the random state
            that parameters are drawn from.
        rng_tracker_name: the name that ``fork`` is called with, if any.
        dtype: of the parameters; ``params_dtype`` is another name for it.
        device: of the parameters. After ``device="meta"`` call ``to_empty(device=...)`` and
            ``reset_parameters()``.
        recipe: how GEMMs are computed, for example ``Float8BlockScaling()``; None computes in the
            activations' dtype. See :class:`grouped_linear.Recipe`.
        cache_weights: allocate a buffer for the quantized weight, so that ``is_first_microbatch``
            can reuse it from one micro-batch to the next. Without a recipe there is nothing to
            cache. After the buffers were copied to a layer with other parameters, as
            torch.optim.swa_utils does, first call with True.
        fuse_wgrad_accumulation: add weight gradients to ``main_grad``, an attribute of the weight
            (float32 or bfloat16, of its shape), in the GEMM itself, and leave ``grad`` alone. If
            the weight has an attribute ``grad_added_to_main_grad``, the forward sets it to True and
            the backward returns zeros, for those who wait for a gradient. If the weight's
            ``overwrite_main_grad`` is true, main_grad is overwritten.
        delay_wgrad_compute: leave weight gradients to :meth:`backward_dw`. Not under
            torch.compile. torch's optimizers raise before they step a weight whose gradient waits.
        save_original_input: save the input itself for the backward and quantize it there. This
            saves memory if something else keeps the input anyway. Not under ``DelayedScaling``.
        single_grouped_weight: one parameter ``weight`` for all experts, or ``weight0``, ``weight1``
            and so on. Checkpoints of either form load into the other.
        single_grouped_bias: one parameter ``bias``, or ``bias0``, ``bias1`` and so on.
        quantized_weight: make the weight a :class:`grouped_linear.GroupedTensor`, which is stored
            quantized, under ``Float8BlockScaling``. It is drawn in `dtype`, then quantized.
        stochastic_rounding: round the quantized weight stochastically when an optimizer steps it,
            so that small steps add up. None, the default, does so for every quantized weight.
        preserve_high_precision_init: keep the drawn weight as ``high_precision_init``, for an
            optimizer with high-precision weights of its own.
        out_of_scope: TransformerEngine's arguments for tensor parallelism and overlapped
            communication, with values that ask for none.

    Attributes:
        num_gemms, in_features, out_features, recipe: as given, read-only.
        weight: [E, N, K]; or weight0, ... [N, K].
        high_precision_init: [E, N, K] on the CPU, or None; set it to None after use.
        bias: [E, N], or None; or bias0, ... [N].
        weight_state: what the recipe keeps from step to step: under ``DelayedScaling`` a
            :class:`grouped_linear.DelayedScalingState`; None under a recipe without state.
        weight_cache: the cached weight, see
            :class:`grouped_linear.quantized.weight_cache.WeightCache`; None without
            ``cache_weights``.

    Raises:
        ValueError: for a configuration that no call could run.

    >>> layer = GroupedLinear(num_gemms=2, in_features=16, out_features=32)
    >>> layer
    GroupedLinear(num_gemms=2, in_features=16, out_features=32, bias=True, recipe=None)
    >>> layer(torch.randn(7, 16), torch.tensor([4, 2])).shape
    torch.Size([7, 32])
    """

    bias: nn.Parameter | None
    high_precision_init: Tensor | None
    weight_state: DelayedScalingState | None
    weight_cache: WeightCache | None

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_bias: bool = False,
        init_method: Callable[[Tensor], Any] | None = None,
        get_rng_state_tracker: Callable[[], RngStateTracker] | None = None,
        rng_tracker_name: str | None = None,
        dtype: torch.dtype | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        recipe: Recipe | None = None,
        cache_weights: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = True,
        single_grouped_bias: bool = True,
        quantized_weight: bool = False,
        stochastic_rounding: bool | None = None,
        preserve_high_precision_init: bool = False,
        **out_of_scope: Any,
    ) -> None:
        super().__init__()
        if dtype is not None and params_dtype is not None:
            raise ValueError("GroupedLinear: dtype and params_dtype are one option, got both")
        check_out_of_scope(out_of_scope)
        options = self._options = GroupedLinearOptions(
            num_gemms,
            in_features,
            out_features,
            bias,
            return_bias,
            init_method,
            get_rng_state_tracker,
            rng_tracker_name,
            recipe,
            cache_weights,
            fuse_wgrad_accumulation,
            delay_wgrad_compute,
            save_original_input,
            single_grouped_weight,
            single_grouped_bias,
            quantized_weight,
            stochastic_rounding,
            preserve_high_precision_init,
        )
        name, dtype = ("dtype", dtype) if params_dtype is None else ("params_dtype", params_dtype)
        check_parameters_dtype("GroupedLinear", name, dtype)
        like: dict[str, Any] = {"dtype": dtype, "device": device}
        weight = torch.empty(num_gemms, out_features, in_features, **like)
        if quantized_weight:
            stochastic = stochastic_rounding is not False
            weight = GroupedTensor.quantize(weight, recipe, stochastic_rounding=stochastic)
        self._register("weight", weight, single_grouped_weight)
        self.high_precision_init = None
        if bias:
            self._register(
                "bias", torch.empty(num_gemms, out_features, **like), single_grouped_bias
            )
        else:
            self.register_parameter("bias", None)
        self._weight_names = options.weight_names
        self._bias_names = options.bias_names if bias else []
        self.weight_state, self.weight_cache = new_state(recipe, num_gemms, device), None
        if cache_weights and recipe is not None:
            self.weight_cache = WeightCache(recipe, num_gemms, out_features, in_features, device)
        self._deferred_wgrads: deque[Wgrad] = deque()
        self.reset_parameters()

    @property
    def num_gemms(self) -> int:
        """E."""
        return self._options.num_gemms

    @property
    def in_features(self) -> int:
        """K."""
        return self._options.in_features

    @property
    def out_features(self) -> int:
        """N."""
        return self._options.out_features

    @property
    def recipe(self) -> Recipe | None:
        """How GEMMs are computed."""
        return self._options.recipe

    @property
    def weight_scale_inv(self) -> Tensor | None:
        """[E, ceil(N / 128), ceil(K / 128)], the scales of a quantized weight; None of another."""
        return scales_of(self._parameters.get("weight"))

    def _register(self, name: str, t: Tensor, single: bool) -> None:
        """Register one parameter, or one for each expert: views of one tensor, side by side."""
        if single:
            self.register_parameter(name, nn.Parameter(t))
            return
        for own_name, own in zip(self._options.per_expert_names(name), t, strict=True):
            self.register_parameter(own_name, nn.Parameter(own))

    def _weights(self) -> tuple[Any, ...]:
        """The weight's parameters; Any, because their owners give them attributes."""
        if self._options.single_grouped_weight:
            return (self.weight,)
        return tuple(getattr(self, name) for name in self._weight_names)

    def _whole_bias(self) -> Tensor | None:
        """[E, N]."""
        if not self._bias_names:
            return None
        if self._options.single_grouped_bias:
            return self.bias
        biases = [getattr(self, name) for name in self._bias_names]
        if autocast_dtype(biases[0].device) is None:
            return torch.stack(biases)
        with torch.autocast(biases[0].device.type, enabled=False):  # it refuses another half dtype
            return torch.stack(biases)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters again, reset scales and the weight cache; do nothing on meta."""
        weights = self._weights()
        if weights[0].is_meta:
            return
        for state in (self.weight_state, self.weight_cache):
            if state is not None:
                state.reset()
        options, tracker = self._options, self._options.get_rng_state_tracker
        names = () if options.rng_tracker_name is None else (options.rng_tracker_name,)
        bound = 1 / math.sqrt(options.in_features)
        drawn: Any = weights[0] if options.single_grouped_weight else weights
        if options.quantized_weight:  # draw what any other layer draws, then quantize it
            drawn = torch.empty_like(weights[0])
        with nullcontext() if tracker is None else tracker().fork(*names):
            for weight in _drawn_parts(drawn, options.init_method):
                if options.init_method is None:
                    nn.init.uniform_(weight, -bound, bound)
                else:
                    options.init_method(weight)
            # One expert at a time, as the weight: every form then draws the same numbers.
            biases: Any = [getattr(self, name) for name in self._bias_names]
            if biases and options.single_grouped_bias:
                biases = biases[0]
            for bias in _drawn_parts(biases):
                nn.init.uniform_(bias, -bound, bound)
        if options.quantized_weight:
            weights[0].copy_(quantized_as(weights[0], drawn))
            if options.preserve_high_precision_init:
                self.high_precision_init = drawn.cpu()

    def forward(
        self,
        x: Tensor,
        m_splits: Tensor | Sequence[int],
        is_first_microbatch: Tensor | bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Apply the layer to x [..., K], whose rows are sorted by group.

        Args:
            x: [..., K] bfloat16, float16 or float32.
            m_splits: [E] rows of each group, int32 or int64; on x's device it is never read by the
                host. Their sum may be less than the rows there are; it may not be more.
            is_first_microbatch: whether this is the first one since the last optimizer step. True
                quantizes the weight into the cache, and overwrites main_grad with its gradient.
                False reads the cache and adds to main_grad. A bool tensor of no dimensions on x's
                device decides this on the device, so that one graph does both. None quantizes the
                weight for this call alone, and adds to main_grad.

                True overwrites main_grad when its backward runs, which must therefore be the first.
                Clear main_grad yourself and pass None where a layer is called more than once before
                a backward, where backwards run in another order, or where layers share a weight.
                The cache holds the weight of the last call that filled it, also if that was
                substituted, as torch.func.functional_call does.

        Returns:
            y [..., N], zero in rows at and past sum(m_splits); with return_bias ``(y, bias)``.

        Raises:
            RuntimeError: for wrong tensors, or where False reads an empty cache. A tensor that is
                false is not checked; it then reads NaN.
            ValueError: for ``is_first_microbatch`` under a recipe that caches weights and without
                ``cache_weights``, unless the weight is stored quantized anyway.
        """
        options = self._options
        weights, bias = self._weights(), self._whole_bias()
        check_parameters("grouped_linear", weight=weights[0], bias=bias)
        state, cache = self.weight_state, self.weight_cache
        stores_weight = cache is not None or options.quantized_weight
        first = read_flag("GroupedLinear", is_first_microbatch, x, options.recipe, stores_weight)
        main_grad = deferred = None
        if torch.is_grad_enabled():
            if options.delay_wgrad_compute and any(w.requires_grad for w in weights):
                if torch.compiler.is_compiling():
                    raise RuntimeError(
                        "GroupedLinear: delay_wgrad_compute keeps operands of the backward for "
                        "backward_dw, which a compiled backward cannot hand out"
                    )
                deferred = self._deferred_wgrads
                watch(self, deferred)
            if options.fuse_wgrad_accumulation:
                named = dict(zip(self._weight_names, weights, strict=True))
                main_grad = main_grad_of("GroupedLinear", named, first)
        of_call = LinearOptions(
            cached_weight("GroupedLinear", cache, weights, first),
            main_grad,
            options.save_original_input,
            deferred,
        )
        added = None if options.return_bias else bias
        recipe = options.recipe if state is None else state.of_call()
        y = apply_layer(x, weights, added, m_splits, recipe, of_call)
        if not options.return_bias:
            return y
        return y, None if bias is None else bias.to(y.dtype)

    def backward_dw(self) -> None:
        """Compute the weight gradients that the oldest backward deferred.

        They arrive as the backward's own would: in ``grad`` or ``main_grad``, and hooks run.
        Nothing happens without ``delay_wgrad_compute``, or if the weight requires no gradient. A
        backward of chosen inputs, torch.autograd.grad or ``inputs=``, defers nothing. A backward
        that was captured in a CUDA graph needs a captured backward_dw: in the same graph, or in one
        that is replayed after it.

        Raises:
            RuntimeError: if no backward has deferred any; if some were deferred in a capture and
                this is none, or the other way round; or if FSDP2 has sharded the weight.

        >>> layer = GroupedLinear(2, 16, 32, delay_wgrad_compute=True)
        >>> layer(torch.ones(5, 16), [2, 3]).sum().backward()
        >>> layer.weight.grad is None, layer.bias.grad is None
        (True, False)
        >>> layer.backward_dw()
        >>> layer.weight.grad.shape
        torch.Size([2, 32, 16])
        """
        if not self._options.delay_wgrad_compute:
            return
        if not self._deferred_wgrads:
            if not any(w.requires_grad for w in self._weights()):
                return
            raise RuntimeError("GroupedLinear: backward_dw: no backward has left anything to do")
        parameters = self._deferred_wgrads[0].parameters
        if not any(w.requires_grad for w in parameters):  # frozen since
            self._deferred_wgrads.popleft()
            return
        if is_dtensor(self._parameters.get(self._weight_names[0])):
            raise RuntimeError(
                "GroupedLinear: backward_dw: the weight is sharded, whose gradients FSDP2 reduces "
                "in the backward: leave delay_wgrad_compute out"
            )
        capturing = parameters[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if any(wgrad.captured != capturing for wgrad in self._deferred_wgrads):
            raise RuntimeError(
                "GroupedLinear: backward_dw: gradients deferred in a CUDA graph capture are "
                "computed in a capture, and no others are"
            )
        with torch.enable_grad():
            DeferredWgrad.apply(self._deferred_wgrads.popleft(), *parameters).backward()

    def extra_repr(self) -> str:
        """The options that tell layers apart."""
        options = self._options
        return (
            f"num_gemms={options.num_gemms}, in_features={options.in_features}, "
            f"out_features={options.out_features}, bias={bool(self._bias_names)}, "
            f"recipe={options.recipe}"
        )

    # --- parameters that move, are copied or loaded ----------------------------------------------

    @torch.no_grad()
    def _tie(self) -> None:
        """Put a weight's experts side by side in memory, so that GEMMs read them in place."""
        weights = self._weights()
        first, size = weights[0], weights[0].numel()
        side_by_side = all(
            w.is_contiguous()
            and w.untyped_storage()._cdata == first.untyped_storage()._cdata
            and w.storage_offset() == first.storage_offset() + e * size
            for e, w in enumerate(weights)
        )
        if not side_by_side:
            for w, own in zip(weights, torch.stack([w.detach() for w in weights]), strict=True):
                w.data = own

    @contextmanager
    def _tied_if_moved(self) -> Iterator[None]:
        """Tie experts that move meanwhile; others may be views of a buffer that is not ours."""
        if self._options.single_grouped_weight:
            yield
            return
        before = [w.untyped_storage() for w in self._weights()]
        yield
        after = [w.untyped_storage() for w in self._weights()]
        if any(a._cdata != b._cdata for a, b in zip(after, before, strict=True)):
            self._tie()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GroupedLinear":
        with self._tied_if_moved():
            super()._apply(fn, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For a copy or a pickle, which has no deferred gradients."""
        return {**vars(self), "_deferred_wgrads": deque()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle."""
        super().__setstate__(state)
        if not self._options.single_grouped_weight:
            self._tie()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save a quantized weight by its parts, ``weight`` and ``weight_scale_inv``."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        split_quantized(self, destination, prefix)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Load parameters of either form, quantized or not."""
        join_quantized(self, state_dict, prefix, args[4])  # args[4] takes error messages
        options = self._options
        for name, single in (
            ("weight", options.single_grouped_weight),
            ("bias", options.single_grouped_bias),
        ):
            packed, names = prefix + name, [prefix + n for n in options.per_expert_names(name)]
            if single and packed not in state_dict and all(n in state_dict for n in names):
                if len({state_dict[n].shape for n in names}) == 1:
                    state_dict[packed] = torch.stack([state_dict.pop(n) for n in names])
            elif not single and state_dict.keys().isdisjoint(names):
                experts = state_dict.get(packed)
                if experts is not None and experts.shape[:1] == (options.num_gemms,):
                    state_dict.update(zip(names, state_dict.pop(packed), strict=True))
        convert_loaded(self, state_dict, prefix, args[0])  # args[0] is the local metadata
        with self._tied_if_moved():
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
