# SPDX-License-Identifier: Apache-2.0
"""One projection of a layer in one call, ``x @ weight + bias`` and its adapter.

E groups, K in_features, N out_features.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grouped_linear import ops
from grouped_linear.autograd.gemm import Gemm, LowRankTerm
from grouped_linear.autograd.low_rank import Adapter
from grouped_linear.autograd.wgrad import MainGrad, Wgrad
from grouped_linear.recipes import Layouts, Operands, Recipe
from grouped_linear.recipes.format import (
    BOTH,
    ROWWISE,
    ROWWISE_AGAIN,
    WeightList,
    with_shared_scale,
)
from grouped_linear.recipes.quantize import Source, quantize
from grouped_linear.recipes.quantize_weight import (
    QuantizedWeight,
    quantize_weight,
    refresh_weight_,
    weight_for_dgrad,
)


class Parameters(NamedTuple):
    """Whether the gradient of each parameter of a projection is needed, or the gradient."""

    weight: Any
    bias: Any
    a: Any
    b: Any


class Kept(NamedTuple):
    """The tensors of a projection that its backward reads; None where no gradient needs one."""

    weight: Any  # columnwise, as Projection.weight gives it: a tensor, or E of [N, K]
    weight_scale: Tensor | None
    a_ErK: Tensor | None = None
    b_ENr: Tensor | None = None
    mask: Tensor | None = None
    h_Tr: Any = None  # A's product with the input
    # For fprop_again: the weight, or the parameter where a call quantizes that.
    fprop_weight: Any = None
    fprop_scale: Tensor | None = None
    bias_EN: Tensor | None = None


class Projection(NamedTuple):
    """A projection and the tensors of one call.

    A named tuple, as its fields are: Dynamo traces it as an argument of an autograd.Function, and
    making a frozen dataclass takes an eager call 2.5 times as long.
    """

    weights: WeightList
    """One [E, N, K], or E tensors [N, K] without adapter; copies of parameters under autocast."""
    bias_EN: Tensor | None
    recipe: Recipe
    """Its formats have the state of delayed scaling, and observers."""
    stored: QuantizedWeight | None = None
    """The quantized weight to read in place of the parameter: a layer's cache, or its own parts."""
    main_grad: MainGrad | None = None
    adapter: Adapter | None = None
    refresh: Tensor | bool = False
    """Whether a cache is quantized from the parameter first; a tensor is read on the device."""

    # --- operands and GEMMs ----------------------------------------------------------------------

    @property
    def out_features(self) -> int:
        """N."""
        return self.weights[0].size(-2)

    @property
    def in_features(self) -> int:
        """K."""
        return self.weights[0].size(-1)

    @property
    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """A and B of the adapter, if there is one."""
        adapter = self.adapter
        return (None, None) if adapter is None else (adapter.a_ErK, adapter.b_ENr)

    def input(self, source: Source, offs_E: Tensor, layouts: Layouts) -> Operands:
        """x for fprop, and for wgrad; GEMMs may gather its rows."""
        return quantize(source, self.recipe.input, offs_E, layouts, self.out_features, True)

    def gradient(self, source: Source, offs_E: Tensor, layouts: Layouts) -> Operands:
        """dy for dgrad, and for wgrad; GEMMs may gather its rows."""
        return quantize(source, self.recipe.grad_output, offs_E, layouts, self.in_features)

    def weight(self, columnwise: bool) -> Operands:
        """The weight for fprop, and for dgrad if ``columnwise``: stored, or quantized now."""
        weights, stored, format = self.weights, self.stored, self.recipe.weight
        if stored is None:
            later = columnwise and self.recipe.requantize_weights
            w = quantize_weight(weights, format, BOTH if columnwise and not later else ROWWISE)
            if later:
                w = w._replace(columnwise=weights if weights[0].dim() == 2 else weights[0])
        else:
            if self.refresh is not False:
                flag = None if self.refresh is True else self.refresh
                refresh_weight_(stored, weights, format, flag)
            w = stored.operands(columnwise)
            if columnwise and w.columnwise is None:
                w = with_shared_scale(stored.values, stored.scale, stored.values)
        if format.observer is not None:
            format.observer(weights, w, None, None)
        return w

    @property
    def in_mxfp4(self) -> bool:
        """Whether the weight is stored in MXFP4."""
        return self.stored is not None and self.stored.is_mxfp4

    @property
    def transposes_weight(self) -> bool:
        """Whether the weight is stored for fprop alone, and the backward transposes it."""
        if self.stored is None or self.in_mxfp4:
            return False
        return self.stored.columnwise is None and self.recipe.weight.transposes_columnwise

    def fprop(
        self, x: Operands, w: Operands, offs_E: Tensor, dtype: torch.dtype, term: LowRankTerm | None
    ) -> Gemm:
        """``x[t] @ weight[e].T + bias[e]`` of rowwise x, in x's dtype."""
        bias_EN = None if self.bias_EN is None else self.bias_EN.to(dtype)
        if self.recipe.checks_operands:
            scales = x.rowwise_scale, w.rowwise_scale
            self.recipe.check_operands("fprop", x.rowwise, w.rowwise, *scales)
        return Gemm(x, w, offs_E, dtype, bias_EN, True, term)

    def dgrad(
        self, dy: Operands, kept: Kept, offs_E: Tensor, dtype: torch.dtype, term: LowRankTerm | None
    ) -> Gemm:
        """``dy[t] @ weight[e]`` of rowwise dy."""
        columnwise, scale = kept.weight, kept.weight_scale
        if self.transposes_weight:
            columnwise = ops.transpose_weight(columnwise)
        elif self.stored is None and self.recipe.requantize_weights:
            weights = columnwise if isinstance(columnwise, tuple) else (columnwise,)
            w = quantize_weight(weights, self.recipe.weight, Layouts(False, True))
            assert w.columnwise is not None
            columnwise, scale = w.columnwise, w.columnwise_scale
        if self.in_mxfp4:
            w = Operands(None, None, columnwise, scale)
        else:
            w = weight_for_dgrad(columnwise, scale, self.recipe.weight)
        if self.recipe.checks_operands:
            scales = dy.rowwise_scale, w.columnwise_scale
            self.recipe.check_operands("dgrad", dy.rowwise, w.columnwise, *scales)
        return Gemm(dy, w, offs_E, dtype, None, False, term)

    def wgrad(self, dy: Operands, x: Operands, offs_E: Tensor) -> Wgrad:
        """The weight gradient of columnwise dy and x."""
        assert isinstance(dy.columnwise, Tensor)
        assert isinstance(x.columnwise, Tensor)
        operands = dy.columnwise, x.columnwise, dy.columnwise_scale, x.columnwise_scale
        if self.recipe.checks_operands:
            self.recipe.check_operands("wgrad", *operands)
        rows = dy.columnwise_rows, x.columnwise_rows
        return Wgrad(self.weights, self.main_grad, *operands, offs_E, *rows)

    # --- from the forward to the backward --------------------------------------------------------

    def keep(
        self,
        w: Operands,
        needs: Parameters,
        dgrad: bool,
        term: LowRankTerm | None,
        again: bool = False,
    ) -> Kept:
        """Of w what dgrad and, where asked, fprop ``again`` read; and what the adapter does.

        ``term`` is what the adapter added to fprop.
        """
        kept = Kept(w.columnwise, w.columnwise_scale)
        adapter = self.adapter
        if adapter is not None and term is not None and (dgrad or needs.a or needs.b):
            h_Tr = term.a_Tr if needs.b else None
            a_ErK, b_ENr, mask = adapter.a_ErK, adapter.b_ENr, adapter.mask
            kept = kept._replace(a_ErK=a_ErK, b_ENr=b_ENr, mask=mask, h_Tr=h_Tr)
        if again:
            weight, scale = w.rowwise, w.rowwise_scale
            if self._quantizes_weight:
                weight, scale = self.weights[0], None
            kept = kept._replace(fprop_weight=weight, fprop_scale=scale, bias_EN=self.bias_EN)
        return kept

    def fprop_again(
        self,
        kept: Kept,
        source: Source,
        adapter_x: Tensor | None,
        token: Tensor | None,
        offs_E: Tensor,
        d_out: Tensor,
    ) -> Gemm:
        """fprop in the backward, of a projection that is restored; the bits are the forward's.

        ``source`` is x or what its rows are gathered from; ``adapter_x``, or adapter_x[token], is
        the adapter's input before dropout; ``d_out`` is any gradient that comes, of the product's
        dtype.
        """
        if torch.compiler.is_compiling():
            # A zero that needs the gradient. A graph that can compute this product in the forward
            # may do so and keep it, or take the forward's product for it.
            offs_E = offs_E + d_out[:0].sum(dtype=torch.int32)
        w = Operands(kept.fprop_weight, kept.fprop_scale)
        if self._quantizes_weight:
            w = quantize_weight((kept.fprop_weight,), self.recipe.weight, ROWWISE)
        term, adapter = None, self.adapter
        if adapter is not None:
            assert adapter_x is not None
            term = adapter.forward_term(adapter.input(adapter_x), offs_E, token)
        x = self.input(source, offs_E, ROWWISE_AGAIN)
        return self._replace(bias_EN=kept.bias_EN).fprop(x, w, offs_E, d_out.dtype, term)

    @property
    def _quantizes_weight(self) -> bool:
        """Whether a call quantizes or casts the parameter."""
        return self.stored is None and not self.recipe.weight.changes_nothing

    def for_backward(self) -> "Projection":
        """The projection without tensors of the forward, which are saved where they are needed.

        It keeps the metadata of temporary weights. A parameter lives anyway; a computed tensor
        would live as long as the graph.
        """
        weights, bias_EN, adapter = self.weights, self.bias_EN, self.adapter
        are_leaves = all(map(_is_leaf, weights))
        if adapter is None and are_leaves and (bias_EN is None or _is_leaf(bias_EN)):
            return self
        if not are_leaves and not torch.compiler.is_compiling():
            # By no operation on it: a weight that FSDP2 gathered refuses empty_like.
            weights = tuple(
                torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device="meta")
                for w in weights
            )
        if adapter is not None:
            adapter = Adapter(None, None, adapter.scaling, None, 0.0)  # type: ignore[arg-type]
        return self._replace(weights=weights, bias_EN=None, adapter=adapter, refresh=False)

    def restored(self, kept: Kept) -> "Projection":
        """The projection in the backward, with the adapter that the forward saved, if it did."""
        if self.adapter is None:
            return self
        adapter = None
        if kept.a_ErK is not None and kept.b_ENr is not None:
            adapter = Adapter(kept.a_ErK, kept.b_ENr, self.adapter.scaling, kept.mask, 0.0)
        return self._replace(adapter=adapter)

    def split(self, term: LowRankTerm | None) -> tuple[LowRankTerm | None, LowRankTerm | None]:
        """The term that dgrad adds, and the one whose product dropout's mask multiplies first."""
        masked = self.adapter is not None and self.adapter.mask is not None
        return (None, term) if masked else (term, None)


def _is_leaf(w: Tensor) -> bool:
    return (w.is_leaf and w.requires_grad) or isinstance(w, nn.Parameter)
