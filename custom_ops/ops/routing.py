# SPDX-License-Identifier: Apache-2.0
"""Group sizes to offsets, and tokens to the rows of their experts and back.

T tokens, C experts chosen for a token, R = T * C rows, E experts, H features of a token.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from grouped_linear.ops.gradients import OPS


class SortedByExpert(NamedTuple):
    """The results of :func:`sort_by_expert`, for R = T * C choices; all int32.

    choice [R]: for each row its index into the flattened [T, C]; token [R]: for each row its token;
    row [T, C]: for each choice its row; offs [E]: the end of each expert's rows.
    """

    choice: Tensor
    token: Tensor
    row: Tensor
    offs: Tensor

    def tokens(self, x: Tensor, *, again: bool = False) -> Tensor:
        """``x[token]`` [R, H], of x [T, H]: each row's token.

        torch.compile would compute once what two equal calls return, and keep it from the first to
        the second. It keeps nothing between a call with ``again`` and one without.
        """
        index = torch.int64 if again else torch.int32
        if statically_known_true(self.token.numel() == self.row.numel()):
            return scatter_rows(x, self.row.to(index), self.token.numel())
        return x[self.token.to(index)]  # fewer rows than choices


def splits_to_offsets(
    m_splits: Tensor,
    num_rows: int,
    *,
    alignment: int = 1,
    stride: int = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Turn group sizes into group ends, in one launch.

    ``offs[e] = stride * min(num_rows, sum of round_up(m_splits[i], alignment) for i <= e)``.

    Args:
        m_splits: [E] int32 or int64, 1 <= E <= 1024. On CPU negative sizes, and sizes that sum to
            more than num_rows, raise. On a GPU negative sizes count as zero and sums saturate.
        num_rows: the number of rows, an upper bound of every end.
        alignment: every group's size is rounded up to a multiple of it.
        stride: elements in a row, to get element offsets.
        out_dtype: the result's dtype, int32 (the default) or int64.

    Returns: [E] ends.

    Raises:
        RuntimeError: if num_rows * stride does not fit in out_dtype.

    >>> splits_to_offsets(torch.tensor([3, 0, 5]), 10)
    tensor([3, 3, 8], dtype=torch.int32)
    """
    return OPS.splits_to_offsets(m_splits, num_rows, alignment, stride, out_dtype)


def topk_experts(
    logits: Tensor,
    k: int,
    expert_bias: Tensor | None = None,
    *,
    score_function: Literal["none", "softmax", "sigmoid"] = "none",
    normalize: bool = False,
    scaling_factor: float = 1,
) -> tuple[Tensor, Tensor]:
    """Choose the k experts with the largest scores, the largest first, and weigh them: a router.

    Differentiable by the logits, in one launch each way. With the scores s = score_function(logits)
    over the experts e of a token, and the chosen experts c::

        weights[c] = scaling_factor * s[c] / (sum of s over the chosen + 1e-20)     normalize=True
        weights[c] = scaling_factor * s[c]                                          else

    Without a score function this is ``torch.topk(logits, k)``, where equal logits come in the order
    of their experts, on CPU and GPU alike, and NaN before everything. With one, experts are chosen
    by the same logits, so that rounded scores make no ties; with a bias by ``s + expert_bias``.
    Scores and weights are float32, with the same bits on CPU and GPU. A NaN that is chosen, or in
    softmax's sum, makes a token's weights NaN.

    What routers take::

        Mixtral, Qwen3, GPT-OSS   "softmax", normalize
        OLMoE, Qwen2              "softmax"
        GLM-4.5, Kimi K2          "sigmoid", normalize, expert_bias, scaling_factor

    GPT-OSS takes softmax of the chosen logits, which is softmax of all, normalized. DeepSeek-V3's
    router is Kimi's where it has one group: a choice limited to groups of experts is not computed.
    The routers of transformers round more often: they divide rounded probabilities, and those of
    Qwen3 and GPT-OSS return weights in the dtype of the logits.

    Args:
        logits: [T, E] bfloat16, float16 or float32, 1 <= E <= 1024. Or [..., E].
        k: at most E.
        expert_bias: [E] float32, which balances load. It gets no gradient, a parameter neither.
        score_function: "none" takes the logits as scores, such as a router's that is not here.
        normalize: whether weights are divided by their sum.
        scaling_factor: of the weights.

    Returns:
        weights [T, k] float32, and experts [T, k] int64, as :class:`grouped_linear.GroupedMLP`
        takes them. Or [..., k].

    >>> logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, -1.0]])
    >>> weights, experts = topk_experts(logits, 2, score_function="softmax", normalize=True)
    >>> experts
    tensor([[1, 2],
            [0, 1]])
    >>> torch.allclose(weights, logits.gather(-1, experts).softmax(-1))
    True
    """
    leading = logits.shape[:-1]
    logits_TE = logits.flatten(0, -2) if logits.dim() > 2 else logits
    if logits.dim() == 1:
        logits_TE = logits[None]
    # A parameter would be in the graph, with hooks that get None.
    bias_E = None if expert_bias is None else expert_bias.detach()
    scoring = bias_E, score_function, normalize, scaling_factor
    weights, experts = OPS.topk_experts(logits_TE, k, *scoring)
    if logits.dim() == 2:
        return weights, experts
    return weights.reshape(*leading, k), experts.reshape(*leading, k)


def topk_experts_grad(
    d_weights: Tensor,
    logits: Tensor,
    experts: Tensor,
    *,
    score_function: Literal["none", "softmax", "sigmoid"] = "none",
    normalize: bool = False,
    scaling_factor: float = 1,
) -> Tensor:
    """The gradient [T, E] of :func:`topk_experts` by its logits, of d_weights [T, k] float32.

    It computes the scores again, with the forward's options, in float32, and rounds once to logits'
    dtype. experts [T, k] int64 are those that the forward returned, no two of a token the same. On
    CPU a number outside [0, E) raises; on a GPU it has no gradient.

    >>> logits, d_weights = torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([[1.0, 2.0]])
    >>> topk_experts_grad(d_weights, logits, torch.tensor([[1, 2]]), scaling_factor=2.0)
    tensor([[0., 2., 4.]])
    """
    return OPS.topk_experts_grad(
        d_weights, logits, experts, score_function, normalize, scaling_factor
    )


def sort_by_expert(experts: Tensor, num_experts: int) -> SortedByExpert:
    """Sort tokens' choices by expert; an expert's rows stay in the order of their tokens.

    Sorted row i is entry ``choice[i]`` of the flattened `experts` and belongs to token ``token[i] =
    choice[i] // C``. In the other direction, ``row.flatten()[choice[i]] = i``. Expert e has the
    rows [offs[e-1], offs[e]). This is a counting sort: one launch up to 1024 choices, two above.

    Args:
        experts: [T, C] int32 or int64, the experts of each token. A number outside [0, num_experts)
            means no expert: its row comes last, past ``offs[-1]``.
        num_experts: E, at most 1024.

    >>> sort_by_expert(torch.tensor([[1, 0], [2, 1], [-1, 2]]), 3).offs
    tensor([1, 3, 5], dtype=torch.int32)
    """
    return SortedByExpert(*OPS.sort_by_expert(experts, num_experts))


def gather_sum(
    y: Tensor, rows: Tensor, weight: Tensor | None = None, offs: Tensor | None = None
) -> Tensor:
    """Sum gathered rows, weighted or not: experts' outputs back to their tokens.

    ``out[t] = sum over c of weight[t, c] * y[rows[t, c]]``, from the first c to the last, in
    float32 and rounded once. CPU and GPU give the same bits, except the bits of a NaN.

    Args:
        y: [R, H] bfloat16, float16 or float32, H a multiple of 16.
        rows: [T, C] int32 or int64. On CPU an index outside y raises; on a GPU it is clamped.
        weight: [T, C] float32; None for ones.
        offs: [E] int32, group ends of y. Rows from ``offs[-1]`` on add nothing, whatever they and
            their weights hold. None if all rows add.

    Returns: [T, H] of y's dtype.

    >>> y = torch.tensor([[1.0] * 16, [10.0] * 16, [100.0] * 16])
    >>> gather_sum(y, torch.tensor([[0, 1], [2, 2]]), torch.tensor([[1.0, 2.0], [1.0, 0.0]]))[:, 0]
    tensor([ 21., 100.])
    """
    return OPS.gather_sum(y, rows, weight, offs)


def gather_dot(a: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """Dot products with gathered rows: the gradient of :func:`gather_sum` by its weights.

    ``out[t, c] = dot(a[t], y[rows[t, c]])``, [T, C] float32, summed in a fixed order. a is [T, H]
    of y's dtype.

    >>> y = torch.tensor([[1.0] * 16, [2.0] * 16])
    >>> gather_dot(torch.ones(1, 16), y, torch.tensor([[1, 0]]))
    tensor([[32., 16.]])
    """
    return OPS.gather_dot(a, y, rows)


def scatter_rows(x: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Copy each token to the rows of its experts: ``out[rows[t, c]] = x[t]``.

    With ``rows`` and ``token`` of :func:`sort_by_expert` this is ``x[token]``, but a token is read
    once, not once an expert.

    Args:
        x: [T, H] bfloat16, float16 or float32, H a multiple of 16.
        rows: [T, C] int32 or int64. They should name every row of the output: a row that none names
            holds anything, and a row that several name holds bits of any of these tokens. On CPU a
            number outside the output raises; on a GPU it is clamped.
        num_rows: rows of the output [num_rows, H], which has x's dtype.

    >>> x = torch.tensor([[1.0] * 16, [2.0] * 16])
    >>> scatter_rows(x, torch.tensor([[3, 0], [2, 1]]), 4)[:, 0]
    tensor([1., 2., 2., 1.])
    """
    return OPS.scatter_rows(x, rows, num_rows)
