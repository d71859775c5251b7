"""GroupedLinear, the layer as a torch.nn.Module.

T rows, E groups, K in_features, N out_features.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from grouped_linear.autograd.linear import DeferredWgrad, Wgrad
from grouped_linear.meta_kernels.rules import FEATURE_MULTIPLE, MAX_GROUPS
from grouped_linear.nn.functional import apply_layer, autocast_dtype, check_bias, is_dtensor
from grouped_linear.nn.gradient_accumulation import cache_plan, main_grad_plan, read_flag
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import check_quantized_weight, convert_assigned
from grouped_linear.quantized.weight_cache import WeightCache
from grouped_linear.recipes import DelayedScaling, Float8BlockScaling, Recipe
from grouped_linear.recipes.delayed_state import DelayedScalingState

# Arguments of TransformerEngine's layer that belong to its callers here, and the values that ask
# for nothing.
_OUT_OF_SCOPE: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (False,),
    "tp_group": (None,),
    "tp_size": (1,),
    "parallel_mode": (None,),
    "ub_overlap_rs": (False,),
    "ub_overlap_ag": (False,),
    "ub_name": (None,),
}


class RngStateTracker(Protocol):
    """What ``get_rng_state_tracker`` returns, Megatron's convention."""

    def fork(self, name: str = ...) -> AbstractContextManager[Any]:
        """A context in which the named random state is the current one."""
        ...


@dataclass(frozen=True)
class _Options:
    num_gemms: int
    in_features: int
    out_features: int
    bias: bool
    return_bias: bool
    init_method: Callable[[Tensor], Any] | None
    get_rng_state_tracker: Callable[[], RngStateTracker] | None
    rng_tracker_name: str | None
    recipe: Recipe
    cache_weights: bool
    fuse_wgrad_accumulation: bool
    delay_wgrad_compute: bool
    save_original_input: bool
    single_grouped_weight: bool
    single_grouped_bias: bool
    quantized_weight: bool
    stochastic_rounding: bool
    preserve_high_precision_init: bool

    def __post_init__(self) -> None:
        if not 1 <= self.num_gemms <= MAX_GROUPS:
            raise ValueError(
                f"GroupedLinear: num_gemms must be between 1 and {MAX_GROUPS}, got {self.num_gemms}"
            )
        for name in ("in_features", "out_features"):
            size = getattr(self, name)
            if size <= 0 or size % FEATURE_MULTIPLE:
                raise ValueError(
                    f"GroupedLinear: {name} must be a positive multiple of {FEATURE_MULTIPLE}, "
                    f"got {size}"
                )
        if not isinstance(self.bias, bool) or not isinstance(self.return_bias, bool):
            raise ValueError(
                "GroupedLinear: bias and return_bias must be True or False, "
                f"got {self.bias!r} and {self.return_bias!r}"
            )
        if not isinstance(self.recipe, Recipe):
            raise ValueError(
                "GroupedLinear: recipe must be None or one of grouped_linear's recipes, "
                f"got {self.recipe!r}"
            )
        check_quantized_weight(
            "GroupedLinear",
            self.recipe,
            self.quantized_weight,
            self.cache_weights,
            stochastic_rounding=self.stochastic_rounding,
            preserve_high_precision_init=self.preserve_high_precision_init,
        )
        if self.quantized_weight and not self.single_grouped_weight:
            raise ValueError("GroupedLinear: quantized_weight needs single_grouped_weight=True")
        if self.save_original_input and isinstance(self.recipe, DelayedScaling):
            raise ValueError(
                "GroupedLinear: save_original_input quantizes the input once more in the backward, "
                "by when the scales of DelayedScaling may have changed"
            )

    @property
    def weight_names(self) -> list[str]:
        """The weight's parameters."""
        return ["weight"] if self.single_grouped_weight else self.names_apart("weight")

    @property
    def bias_names(self) -> list[str]:
        """The bias's parameters, where there is one."""
        return ["bias"] if self.single_grouped_bias else self.names_apart("bias")

    def names_apart(self, name: str) -> list[str]:
        """Of a parameter an expert."""
        return [f"{name}{e}" for e in range(self.num_gemms)]


def _check_out_of_scope(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in _OUT_OF_SCOPE:
            raise TypeError(f"GroupedLinear: unexpected keyword argument {name!r}")
        if not any(value is nothing or value == nothing for nothing in _OUT_OF_SCOPE[name]):
            raise ValueError(
                "GroupedLinear: tensor parallelism and overlapped communication are out of scope, "
                f"got {name}={value!r}"
            )


def _one_by_one(parameter: Any, init_method: object = None) -> Iterator[Any]:
    """What is drawn at a time: an expert, or all of a sharded tensor, as torch draws shards."""
    if not is_dtensor(parameter):
        yield from parameter
    elif init_method is None:
        yield parameter
    else:
        yield from parameter.to_local()


class GroupedLinear(nn.Module):
    """A linear layer an expert: ``y[t] = x[t] @ weight[e].T + bias[e]`` for the rows t of group e.

    Args:
        num_gemms: E, the number of groups (experts), at most 1024.
        in_features: K, a multiple of 16.
        out_features: N, a multiple of 16.
        bias: whether the layer has a bias.
        return_bias: return ``(y, bias)`` with the bias in y's dtype and not added.
        init_method: called with every expert's weight [N, K] to fill it; torch.nn.Linear's
            initialisation by default. Of a sharded weight, with what this process has of each.
        get_rng_state_tracker: returns an object whose ``fork(name)`` context holds the random state
            that parameters are drawn from.
        rng_tracker_name: the name that ``fork`` is called with, if any.
        dtype: of the parameters; ``params_dtype`` is another name for it.
        device: of the parameters. After ``device="meta"`` call ``to_empty(device=...)`` and
            ``reset_parameters()``.
        recipe: how products are computed, for example ``Float8BlockScaling()``; None computes in
            the activations' dtype.
        cache_weights: allocate room for the quantized weight, so that ``is_first_microbatch`` can
            keep it from one micro-batch to the next. Without a recipe there is nothing to keep. Who
            copies a layer's buffers to one of other parameters (torch.optim.swa_utils) calls that
            with True first.
        fuse_wgrad_accumulation: add weight gradients to ``main_grad``, an attribute of the weight
            (float32 or bfloat16, of its shape), in the product itself, and leave its ``grad``
            alone. Where the weight has an attribute ``grad_added_to_main_grad`` it is set to True
            in the forward, and a gradient of zeros is returned for those who wait for one. Where
            ``overwrite_main_grad`` is true main_grad is written over.
        delay_wgrad_compute: leave weight gradients to :meth:`backward_dw`. Not under
            torch.compile.
        save_original_input: keep the input itself for the backward and quantize it there, for an
            input that something else keeps anyway. Not under ``DelayedScaling``.
        single_grouped_weight: one parameter ``weight`` for all experts, or ``weight0``, ``weight1``
            and so on. Checkpoints of either form load into the other.
        single_grouped_bias: one parameter ``bias``, or ``bias0``, ``bias1`` and so on.
        quantized_weight: make the weight a :class:`grouped_linear.GroupedTensor`, which is kept
            quantized, under ``Float8BlockScaling``. It is drawn in `dtype`, then quantized.
        stochastic_rounding: round it by chance when an optimizer steps it.
        preserve_high_precision_init: keep what was drawn as ``high_precision_init``, for an
            optimizer that holds weights of its own in high precision.
        out_of_scope: TransformerEngine's arguments for tensor parallelism and overlapped
            communication, with values that ask for none.

    Attributes:
        num_gemms, in_features, out_features, recipe: as given, read-only.
        weight: [E, N, K]; or weight0, ... [N, K].
        high_precision_init: [E, N, K] on the CPU, or None; yours to set to None after use.
        bias: [E, N], or None; or bias0, ... [N].
        scaling_state: what ``DelayedScaling`` remembers, see
            :class:`grouped_linear.DelayedScalingState`; None under any other recipe.
        weight_cache: the weight that is kept, see
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
    scaling_state: DelayedScalingState | None
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
        recipe: Recipe = None,
        cache_weights: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = True,
        single_grouped_bias: bool = True,
        quantized_weight: bool = False,
        stochastic_rounding: bool = False,
        preserve_high_precision_init: bool = False,
        **out_of_scope: Any,
    ) -> None:
        super().__init__()
        if dtype is not None and params_dtype is not None:
            raise ValueError("GroupedLinear: dtype and params_dtype are one option, got both")
        _check_out_of_scope(out_of_scope)
        options = self._options = _Options(
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
        like: dict[str, Any] = {"dtype": dtype or params_dtype, "device": device}
        weight = torch.empty(num_gemms, out_features, in_features, **like)
        if quantized_weight:
            assert isinstance(recipe, Float8BlockScaling)
            weight = GroupedTensor.quantize(weight, recipe, stochastic_rounding=stochastic_rounding)
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
        self.scaling_state = self.weight_cache = None
        if isinstance(recipe, DelayedScaling):
            self.scaling_state = DelayedScalingState(recipe, num_gemms, device)
        if cache_weights and recipe is not None:
            self.weight_cache = WeightCache(recipe, num_gemms, out_features, in_features, device)
        self._later: deque[Wgrad] = deque()
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
    def recipe(self) -> Recipe:
        """How products are computed."""
        return self._options.recipe

    def _register(self, name: str, t: Tensor, single: bool) -> None:
        """One parameter, or one an expert: views of one tensor, so that they lie side by side."""
        for own_name, own in (
            [(name, t)] if single else zip(self._options.names_apart(name), t, strict=True)
        ):
            self.register_parameter(own_name, nn.Parameter(own))

    def _weights(self) -> tuple[Any, ...]:
        """One parameter, or one an expert; Any for the attributes that their owners give them."""
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
        """Draw the parameters anew, forget scales and the weight cache; nothing on meta."""
        weights = self._weights()
        if weights[0].is_meta:
            return
        for state in (self.scaling_state, self.weight_cache):
            if state is not None:
                state.reset()
        options, tracker = self._options, self._options.get_rng_state_tracker
        names = () if options.rng_tracker_name is None else (options.rng_tracker_name,)
        bound = 1 / math.sqrt(options.in_features)
        drawn: Any = weights[0] if options.single_grouped_weight else weights
        if options.quantized_weight:  # draw what any other layer draws, then quantize all of it
            drawn = torch.empty_like(weights[0])
        with nullcontext() if tracker is None else tracker().fork(*names):
            for weight in _one_by_one(drawn, options.init_method):
                if options.init_method is None:
                    nn.init.uniform_(weight, -bound, bound)
                else:
                    options.init_method(weight)
            # An expert at a time, as weights: one number generator gives every form the same.
            biases: Any = [getattr(self, name) for name in self._bias_names]
            if biases and options.single_grouped_bias:
                biases = biases[0]
            for bias in _one_by_one(biases):
                nn.init.uniform_(bias, -bound, bound)
        if options.quantized_weight:
            weights[0].copy_(drawn)
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
            is_first_microbatch: of those between two steps of the optimizer. True quantizes the
                weight into the cache, and writes its gradient over main_grad; False reads the cache
                and adds to main_grad. A bool tensor of no dimensions on x's device decides the same
                there, so that one graph does both. None quantizes the weight for this call alone,
                and adds to main_grad. True writes over what is there when its backward runs, which
                must be the first: where a layer is called more than once before a backward,
                backwards run in another order, or layers share a weight, clear main_grad and say
                None. The cache holds the weight of the last call that filled it, also where that
                was put in the layer's place, as torch.func.functional_call does.

        Returns:
            y [..., N], zero in rows at and past sum(m_splits); with return_bias ``(y, bias)``.

        Raises:
            RuntimeError: for wrong tensors, or where False reads a cache that was not filled. On
                the device nobody looks: a flag that is false then reads NaN.
            ValueError: for ``is_first_microbatch`` under a recipe and without ``cache_weights``,
                unless the weight is kept quantized anyway.
        """
        options = self._options
        weights, bias = self._weights(), self._whole_bias()
        check_bias(bias)
        state, cache = self.scaling_state, self.weight_cache
        keeps_weight = cache is not None or options.quantized_weight
        first = read_flag("GroupedLinear", is_first_microbatch, x, options.recipe, keeps_weight)
        plan = cache_plan("GroupedLinear", cache, first)  # of what differs from a plain call
        if options.save_original_input:
            plan["save_input"] = True
        if state is not None:
            plan["slots"] = state.slots()
        if torch.is_grad_enabled():
            if options.delay_wgrad_compute and any(w.requires_grad for w in weights):
                if torch.compiler.is_compiling():
                    raise RuntimeError(
                        "GroupedLinear: delay_wgrad_compute keeps operands of the backward for "
                        "backward_dw, which a compiled backward cannot hand out"
                    )
                plan["later"] = self._later
            if options.fuse_wgrad_accumulation:
                named = dict(zip(self._weight_names, weights, strict=True))
                plan |= main_grad_plan("GroupedLinear", named, first)
        added = None if options.return_bias else bias
        y = apply_layer(x, weights, added, m_splits, options.recipe, **plan)
        if not options.return_bias:
            return y
        return y, None if bias is None else bias.to(y.dtype)

    def backward_dw(self) -> None:
        """Compute the weight gradients of the oldest backward that put them off.

        They arrive as they would have there: in ``grad`` or ``main_grad``, and hooks run. Nothing
        happens without ``delay_wgrad_compute`` or for a weight that requires no gradient. A
        backward of chosen inputs, torch.autograd.grad or ``inputs=``, puts nothing off. What a
        backward put off while it was captured in a CUDA graph is computed in a capture, too: in the
        same, or in one that is replayed after it.

        Raises:
            RuntimeError: if no backward has put any off, some are of a capture and this is none or
                the other way round, or FSDP2 has sharded the weight.

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
        if not self._later:
            if not any(w.requires_grad for w in self._weights()):
                return
            raise RuntimeError("GroupedLinear: backward_dw: no backward has left anything to do")
        weights = self._later[0].call.differentiated
        if not any(w.requires_grad for w in weights):  # frozen since
            self._later.popleft()
            return
        if is_dtensor(self._parameters.get(self._weight_names[0])):
            raise RuntimeError(
                "GroupedLinear: backward_dw: the weight is sharded, whose gradients FSDP2 reduces "
                "in the backward: leave delay_wgrad_compute out"
            )
        capturing = weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if any(wgrad.captured != capturing for wgrad in self._later):
            raise RuntimeError(
                "GroupedLinear: backward_dw: what was put off while a CUDA graph was captured is "
                "computed while one is captured, and nothing else is"
            )
        with torch.enable_grad():
            DeferredWgrad.apply(self._later.popleft(), *weights).backward()

    def extra_repr(self) -> str:
        """The options that tell layers apart."""
        options = self._options
        return (
            f"num_gemms={options.num_gemms}, in_features={options.in_features}, "
            f"out_features={options.out_features}, bias={bool(self._bias_names)}, "
            f"recipe={options.recipe}"
        )

    # --- parameters on their travels -----------------------------------------------------------

    @torch.no_grad()
    def _tie(self) -> None:
        """Put a weight's experts side by side again, so that products read them where they are."""
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
        """Tie what moves to other memory meanwhile; what stays may belong to a buffer of others."""
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
        """For a copy or a pickle, whose weights no backward has waiting gradients of."""
        return {**vars(self), "_later": deque()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy or a pickle."""
        super().__setstate__(state)
        if not self._options.single_grouped_weight:
            self._tie()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Load parameters of either form."""
        options = self._options
        for name, single in (
            ("weight", options.single_grouped_weight),
            ("bias", options.single_grouped_bias),
        ):
            whole, apart = prefix + name, [prefix + n for n in options.names_apart(name)]
            if single and whole not in state_dict and all(n in state_dict for n in apart):
                if len({state_dict[n].shape for n in apart}) == 1:
                    state_dict[whole] = torch.stack([state_dict.pop(n) for n in apart])
            elif not single and state_dict.keys().isdisjoint(apart):
                experts = state_dict.get(whole)
                if experts is not None and experts.shape[:1] == (options.num_gemms,):
                    state_dict.update(zip(apart, state_dict.pop(whole), strict=True))
        if args[0].get("assign_to_params_buffers"):  # of the local metadata
            convert_assigned(self, state_dict, prefix)
        with self._tied_if_moved():
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
