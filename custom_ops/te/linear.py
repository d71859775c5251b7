# SPDX-License-Identifier: Apache-2.0
"""GroupedLinear with TransformerEngine's arguments.

E groups, K in_features, N out_features.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear.nn import linear
from grouped_linear.nn.arguments import without_autocast
from grouped_linear.nn.checks import (
    check_flags,
    check_num_groups,
    check_parameter,
    check_parameters_dtype,
)
from grouped_linear.nn.functional import apply_linear
from grouped_linear.nn.gradient_accumulation import read_flag
from grouped_linear.quantized.keep import NEEDS, SCALE, Weights, is_dtensor, local_part
from grouped_linear.recipes import Recipe
from grouped_linear.te.deferred import Deferred, DeferredWgrad, defer, watch


class GroupedLinear(linear.GroupedLinear):
    """:class:`grouped_linear.GroupedLinear` with TransformerEngine's arguments, in its order.

    The recipe is the layer's own, not a context's. docs/from_other_libraries.md says argument by
    argument what else differs.

    Args:
        num_gemms: ``num_experts`` of :class:`grouped_linear.GroupedLinear`.
        in_features, out_features, bias: see there.
        recipe, cache_weights: see :class:`grouped_linear.GroupedLinear`.
        weights: see :class:`grouped_linear.GroupedLinear`; needs ``single_grouped_weight``.
        fuse_wgrad_accumulation: the same; each weight has a ``main_grad``.
        device: the same; torch's default device, not "cuda".
        sequence_parallel, ub_overlap_rs, ub_overlap_ag: only False; tp_group, parallel_mode,
            ub_name: only None; tp_size: only 1. Tensor parallelism and overlapped communication are
            out of scope.
        get_rng_state_tracker: returns an object whose ``fork(name)`` context holds the random state
            that parameters are drawn from.
        rng_tracker_name: the name that ``fork`` is called with, if any.
        init_method: called with every expert's weight [N, K] to fill it; torch.nn.Linear's
            initialisation by default. For a sharded weight it is called with this process's part.
        return_bias: return ``(y, bias)``, with the bias in y's dtype and not added.
        params_dtype: of the parameters.
        delay_wgrad_compute: leave weight gradients to :meth:`backward_dw`. Not under
            torch.compile. torch's optimizers raise before they step a weight whose gradient waits.
        save_original_input: save the input itself for the backward and quantize it there. This
            saves memory if something else keeps the input anyway. Not under ``DelayedScaling``.
        single_grouped_weight: one parameter ``weight`` for all experts, or ``weight0``, ``weight1``
            and so on. Checkpoints of either form load into the other.
        single_grouped_bias: one parameter ``bias``, or ``bias0``, ``bias1`` and so on.

    Attributes:
        num_gemms, num_experts: E.
        weight: [E, N, K]; or weight0, ... [N, K].
        bias: [E, N], or None; or bias0, ... [N].

    Raises:
        ValueError: for a configuration that no call could run, and for what is out of scope.

    >>> layer = GroupedLinear(2, 16, 32, return_bias=True)
    >>> [name for name, _ in layer.named_parameters()]
    ['weight0', 'weight1', 'bias0', 'bias1']
    >>> y, bias = layer(torch.randn(7, 16), [4, 2])
    >>> y.shape, bias.shape
    (torch.Size([7, 32]), torch.Size([2, 32]))
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: None = None,
        device: torch.device | str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        *,
        recipe: Recipe | None = None,
        cache_weights: bool = False,
        weights: Weights = None,
    ) -> None:
        _check_out_of_scope(False, sequence_parallel=sequence_parallel)
        _check_out_of_scope(False, ub_overlap_rs=ub_overlap_rs, ub_overlap_ag=ub_overlap_ag)
        _check_out_of_scope(None, tp_group=tp_group, parallel_mode=parallel_mode, ub_name=ub_name)
        _check_out_of_scope(1, tp_size=tp_size)
        check_num_groups("GroupedLinear", "num_gemms", num_gemms)
        check_flags(
            "GroupedLinear",
            return_bias=return_bias,
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
        )
        _check_function("init_method", init_method, "called with each expert's weight")
        _check_function(
            "get_rng_state_tracker", get_rng_state_tracker, "that returns an object with fork()"
        )
        check_parameters_dtype("GroupedLinear", "params_dtype", params_dtype)
        # The base class refuses other words.
        if weights in tuple(NEEDS) and not single_grouped_weight:
            raise ValueError(f"GroupedLinear: weights={weights!r} needs single_grouped_weight=True")
        if save_original_input and isinstance(recipe, Recipe) and recipe.has_state:
            raise ValueError(
                "GroupedLinear: save_original_input quantizes the input once more in the backward, "
                f"by when the scales of {type(recipe).__name__} may have changed"
            )
        # The base class reads these while it registers and draws the parameters.
        self._single = {"weight": single_grouped_weight, "bias": single_grouped_bias}
        # Inside of a partial a module, which may be called as well, is no part of the layer.
        self._init_method, self._get_rng_state_tracker = (
            None if given is None else partial(given)
            for given in (init_method, get_rng_state_tracker)
        )
        self._rng_tracker_names = () if rng_tracker_name is None else (rng_tracker_name,)
        super().__init__(
            num_gemms,
            in_features,
            out_features,
            bias,
            device,
            params_dtype,
            recipe=recipe,
            cache_weights=cache_weights,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            weights=weights,
        )
        self.num_gemms, self.return_bias = num_gemms, return_bias
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input
        self._deferred: deque[Deferred] = deque()

    # --- one parameter, or one for each expert ---------------------------------------------------

    def _register(self, name: str, t: Tensor | None) -> None:
        if t is None or self._single[name]:
            super()._register(name, t)
            return
        for expert, own in zip(self._per_expert(name), t, strict=True):  # side by side in memory
            self.register_parameter(expert, nn.Parameter(own))

    def _per_expert(self, name: str) -> tuple[str, ...]:
        return tuple(f"{name}{e}" for e in range(self.num_experts))

    def _experts_of(self, name: str) -> Any:
        if name in self._parameters or self._single[name]:
            return getattr(self, name)
        experts = tuple(getattr(self, expert) for expert in self._per_expert(name))
        if any(own is None for own in experts):
            raise TypeError(
                f"GroupedLinear: {name}{experts.index(None)} is None: give each expert a "
                "parameter, also one without rows"
            )
        return experts

    def _weights(self) -> dict[str, Any]:
        """The weight's parameters by name; Any, because their owners give them attributes."""
        if self._single["weight"]:
            return {"weight": self.weight}
        return dict(zip(self._per_expert("weight"), self._experts_of("weight"), strict=True))

    def _draw(self, weight: Iterable[Tensor], bias: Iterable[Tensor]) -> None:
        tracker = self._get_rng_state_tracker
        with nullcontext() if tracker is None else tracker().fork(*self._rng_tracker_names):
            if self._init_method is not None:
                for expert in local_part(weight):
                    self._init_method(expert)
            super()._draw(weight if self._init_method is None else (), bias)

    @classmethod
    def from_linears(cls, *args: Any, **options: Any) -> Any:
        """Not here: this class loads the state dict of a ``grouped_linear.GroupedLinear``."""
        made = "make a grouped_linear.GroupedLinear and load its state_dict()"
        raise NotImplementedError(f"te.GroupedLinear has no from_linears: {made}")

    # --- a call ----------------------------------------------------------------------------------

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        m_splits: Tensor | Sequence[int],
        is_first_microbatch: Tensor | bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """:meth:`grouped_linear.GroupedLinear.forward`; with return_bias it gives ``(y, bias)``."""
        named, bias = self._weights(), self._experts_of("bias")
        if isinstance(bias, tuple):
            with without_autocast(bias[0].device):
                bias = torch.stack(bias)
        weights, later = tuple(named.values()), None
        defers = self.delay_wgrad_compute and torch.is_grad_enabled()
        if defers and any(w.requires_grad for w in weights):
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    "GroupedLinear: delay_wgrad_compute keeps operands of the backward for "
                    "backward_dw, which a compiled backward cannot hand out"
                )
            later = partial(defer, self._deferred, weights)
            watch(self, self._deferred)
        first = read_flag(self._owner, is_first_microbatch, x, self._recipe, self._stores_weight)
        added = None if self.return_bias else bias
        given = self._projection("weight", named, added, first)
        if self.return_bias and bias is not None:
            check_parameter("grouped_linear", "bias", bias)
        y = apply_linear(x, m_splits, given, self.save_original_input, later)
        if not self.return_bias:
            return y
        # A view: a reentrant checkpoint that returns a parameter itself makes it no leaf any more.
        return y, None if bias is None else bias.view_as(bias).to(y.dtype)

    def backward_dw(self) -> None:
        """Compute the weight gradients that the oldest backward deferred.

        They arrive as the backward's own would: in ``grad`` or ``main_grad``, and hooks run.
        Nothing happens without ``delay_wgrad_compute``, or if the weight requires no gradient. A
        backward of chosen inputs defers nothing. A backward that was captured in a CUDA graph needs
        a captured backward_dw: in the same graph, or in one that is replayed after it.

        Raises:
            RuntimeError: if no backward has deferred any; if some were deferred in a capture and
                this is none, or the other way round; or if FSDP2 has sharded the weight.

        >>> layer = GroupedLinear(2, 16, 32, delay_wgrad_compute=True)
        >>> layer(torch.ones(5, 16), [2, 3]).sum().backward()
        >>> layer.weight0.grad is None, layer.bias0.grad is None
        (True, False)
        >>> layer.backward_dw()
        >>> layer.weight0.grad.shape
        torch.Size([32, 16])
        """
        if not self.delay_wgrad_compute:
            return
        if not self._deferred:
            if not any(w.requires_grad for w in self._weights().values()):
                return
            raise RuntimeError("GroupedLinear: backward_dw: no backward has left anything to do")
        parameters = self._deferred[0].parameters
        if not any(w.requires_grad for w in parameters):  # frozen since
            self._deferred.popleft()
            return
        if any(map(is_dtensor, self.parameters(recurse=False))):
            raise RuntimeError(
                "GroupedLinear: backward_dw: the weight is sharded, whose gradients FSDP2 reduces "
                "in the backward: leave delay_wgrad_compute out"
            )
        capturing = parameters[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if any(deferred.captured != capturing for deferred in self._deferred):
            raise RuntimeError(
                "GroupedLinear: backward_dw: gradients deferred in a CUDA graph capture are "
                "computed in a capture, and no others are"
            )
        with torch.enable_grad():
            DeferredWgrad.apply(self._deferred.popleft(), *parameters).backward()

    # --- parameters that move, are copied or loaded ----------------------------------------------

    @torch.no_grad()
    def _side_by_side(self) -> Tensor | None:
        """[E, N, K] of a weight whose experts lie so in memory, which GEMMs read in place."""
        weights = tuple(self._weights().values())
        first, size = weights[0].detach(), weights[0].numel()
        for e, w in enumerate(weights):
            same_memory = w.untyped_storage()._cdata == first.untyped_storage()._cdata
            beside = w.storage_offset() == first.storage_offset() + e * size
            if not (same_memory and beside and w.is_contiguous()):
                return None
        return first.as_strided((len(weights), *first.shape), (size, *first.stride()))

    def _lie_in(self, whole: Tensor) -> None:
        """Have the experts' parameters in a tensor [E, N, K]."""
        for w, own in zip(self._weights().values(), whole, strict=True):
            w.data = own

    @contextmanager
    def _tied_if_moved(self) -> Iterator[None]:
        """Tie experts that the block moves; others may be views of their owner's buffer."""
        if self._single["weight"]:
            yield
            return
        before = [w.untyped_storage() for w in self._weights().values()]
        yield
        after = [w.untyped_storage() for w in self._weights().values()]
        moved = any(a._cdata != b._cdata for a, b in zip(after, before, strict=True))
        if moved and self._side_by_side() is None:
            with torch.no_grad():
                self._lie_in(torch.stack([w.detach() for w in self._weights().values()]))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GroupedLinear":
        with self._tied_if_moved():
            super()._apply(fn, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy or a pickle, without deferred gradients.

        Experts that lie side by side are there once more, as one tensor, so that they do so again
        without a copy: torch's older file format has no numbers there yet.
        """
        whole = None if self._single["weight"] else self._side_by_side()
        return {**vars(self), "_deferred": deque(), "_whole": whole}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        whole = state.pop("_whole")
        super().__setstate__(state)
        if whole is not None and self._side_by_side() is None:
            self._lie_in(whole)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Load parameters of either form, in FP8 or not."""
        for name, single in self._single.items():
            for part in ("", SCALE):
                packed = prefix + name + part
                names = [prefix + n + part for n in self._per_expert(name)]
                if single and packed not in state_dict and all(n in state_dict for n in names):
                    if len({(state_dict[n].shape, state_dict[n].dtype) for n in names}) == 1:
                        state_dict[packed] = torch.stack([state_dict.pop(n) for n in names])
                elif not single and state_dict.keys().isdisjoint(names):
                    experts = state_dict.get(packed)
                    if experts is not None and experts.shape[:1] == (self.num_experts,):
                        state_dict.update(zip(names, state_dict.pop(packed), strict=True))
        with self._tied_if_moved():
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _check_out_of_scope(nothing: Any, **options: Any) -> None:
    for name, value in options.items():
        if value is not nothing and value != nothing:
            raise ValueError(
                "GroupedLinear: tensor parallelism and overlapped communication are out of scope, "
                f"got {name}={value!r}"
            )


def _check_function(name: str, function: Any, which: str) -> None:
    if function is not None and not callable(function):
        raise ValueError(
            f"GroupedLinear: {name} must be None or a function {which}, got {function!r}"
        )
