# SPDX-License-Identifier: Apache-2.0
"""A byte-level mixture-of-experts language model over any grouped linear layer.

B sequences, S bytes in a sequence, T = B * S tokens, D width of the model, V byte values,
E experts, C experts chosen for a token, R = T * C routed rows, F width of an expert.

Each forward takes `first` at last: nothing, or is_first_microbatch for layers that have it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grouped_linear import GroupedLinear, ops
from grouped_linear.nn.router import router_logits

VOCABULARY = 256
BALANCE_COEFFICIENT = 0.01  # of the load-balancing loss: Switch Transformer, arXiv:2101.03961


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model: D, S, E, C, F of the legend and how often a layer is repeated."""

    layers: int
    width: int
    heads: int
    context: int
    experts: int
    chosen: int
    expert_width: int


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    cos: Tensor  # [S, H], H = D / heads / 2 pairs of features
    sin: Tensor

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        half = size.width // size.heads // 2
        rate = 10000.0 ** -(torch.arange(half) / half)
        angle_SH = torch.arange(size.context)[:, None] * rate
        self.register_buffer("cos", angle_SH.cos(), persistent=False)
        self.register_buffer("sin", angle_SH.sin(), persistent=False)

    def _rotate(self, x: Tensor) -> Tensor:
        """Turn each pair of features of x [B, heads, S, 2 H] by its position's angle."""
        a, b = x.float().chunk(2, dim=-1)
        turned_a = a * self.cos - b * self.sin
        turned_b = b * self.cos + a * self.sin
        return torch.cat((turned_a, turned_b), dim=-1).to(x.dtype)

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x_BSD).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        out_BSD: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out_BSD


class Experts(nn.Module):
    """C experts of E for each token, SwiGLU in each expert, weighted by the router.

    Every shape is static: which rows an expert gets is data, so nothing is read by the host,
    recompiled or recorded again when it changes.

    Args:
        size: of the model.
        linear: makes a layer from E, in_features and out_features; called with rows sorted by
            expert and their m_splits.
    """

    def __init__(self, size: ModelSize, linear: Callable[[int, int, int], nn.Module]) -> None:
        super().__init__()
        self.experts = size.experts
        self.gate_up = linear(size.experts, size.width, 2 * size.expert_width)
        self.down = linear(size.experts, size.expert_width, size.width)

    def forward(
        self, x_TD: Tensor, weight_TC: Tensor, expert_TC: Tensor, *first: Tensor | bool
    ) -> Tensor:
        """Return [T, D], the weighted sums of what the chosen experts give."""
        chosen = expert_TC.size(1)
        expert_R = expert_TC.flatten()
        order_R = expert_R.argsort(stable=True)  # routed rows, sorted by expert
        x_RD = x_TD[order_R // chosen]
        m_splits_E = rows_per_expert(expert_TC, self.experts)
        gate_RF, up_RF = self.gate_up(x_RD, m_splits_E, *first).chunk(2, dim=-1)
        y_RD = self.down(F.silu(gate_RF) * up_RF, m_splits_E, *first)
        y_TCD = y_RD[order_R.argsort()].unflatten(0, (-1, chosen))
        return (y_TCD * weight_TC[..., None]).sum(dim=1).to(x_TD.dtype)


def give_gradients_memory(model: nn.Module) -> None:
    """Give parameters a grad that stays, for micro-batches to add to; it is main_grad, too.

    Where there is none autograd keeps what the first backward returns. Of a CUDA graph that is
    memory which the next replay writes over.
    """
    for p in model.parameters():
        p.grad = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
    for layer in model.modules():
        if isinstance(layer, GroupedLinear):
            layer.weight.main_grad = layer.weight.grad


def rows_per_expert(expert_TC: Tensor, experts: int) -> Tensor:
    """How many routed rows each expert gets: [E]. The shape of a bincount would depend on data."""
    return (expert_TC.flatten()[:, None] == torch.arange(experts, device=expert_TC.device)).sum(0)


class MixtureOfExperts(nn.Module):
    """A router and the experts it chooses from. Routing stays on the device.

    Args:
        size: of the model.
        experts: makes the experts, for example :class:`Experts` with a layer; called with x_TD,
            weight_TC and expert_TC.
        routes: whether this package's ops route, not torch's.
    """

    def __init__(
        self,
        size: ModelSize,
        experts: Callable[[ModelSize], nn.Module],
        routes: bool = False,
    ) -> None:
        super().__init__()
        self.size, self.routes = size, routes
        self.router = nn.Linear(size.width, size.experts, bias=False)
        self.experts = experts(size)

    def forward(self, x_BSD: Tensor, *first: Tensor | bool) -> tuple[Tensor, Tensor]:
        """Return the experts' output [B, S, D] and the load-balancing loss."""
        x_TD, E, C = x_BSD.flatten(0, 1), self.size.experts, self.size.chosen
        if self.routes:
            logit_TE, x_TD = router_logits(x_TD, self.router.weight)
            weight_TC, expert_TC = ops.topk_experts(
                logit_TE, C, score_function="softmax", normalize=True
            )
            score_TE = logit_TE.float().softmax(dim=-1)
            end_E = ops.sort_by_expert(expert_TC, E).offs  # the experts' own call, where compiled
            rows_E = end_E.diff(prepend=end_E.new_zeros(1))
        else:
            score_TE = self.router(x_TD).float().softmax(dim=-1)
            weight_TC, expert_TC = score_TE.topk(C, dim=-1)
            weight_TC = weight_TC / weight_TC.sum(dim=-1, keepdim=True)
            rows_E = rows_per_expert(expert_TC, E)
        y_TD = self.experts(x_TD, weight_TC, expert_TC, *first)

        share_E = rows_E / expert_TC.numel()
        balance = self.size.experts * (share_E * score_TE.mean(dim=0)).sum()
        return y_TD.view_as(x_BSD), balance


class Block(nn.Module):
    """Attention, then experts, each added to the residual stream."""

    def __init__(self, size: ModelSize, experts: Callable[[ModelSize], nn.Module]) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width)
        self.attention = Attention(size)
        self.experts_norm = nn.RMSNorm(size.width)
        self.experts = MixtureOfExperts(size, experts)

    def forward(self, x_BSD: Tensor, *first: Tensor | bool) -> tuple[Tensor, Tensor]:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        y_BSD, balance = self.experts(self.experts_norm(x_BSD), *first)
        return x_BSD + y_BSD, balance


class LanguageModel(nn.Module):
    """Predicts the next byte. Parameters are float32, products in `dtype` or the recipe's format.

    Args:
        size: of the model.
        experts: makes the experts of each block.
        dtype: of activations, under autocast.
    """

    def __init__(
        self, size: ModelSize, experts: Callable[[ModelSize], nn.Module], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.size = size
        self.dtype = dtype
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size, experts) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.25 * size.width**-0.5)  # first loss: about ln 256

    def logits(self, bytes_BS: Tensor, *first: Tensor | bool) -> tuple[Tensor, Tensor]:
        """Return float32 logits [B, S, V] and the mean load-balancing loss of the layers."""
        lower_precision = self.dtype != torch.float32
        with torch.autocast(bytes_BS.device.type, dtype=self.dtype, enabled=lower_precision):
            x_BSD = self.embedding(bytes_BS)
            balances = []
            for block in self.blocks:
                x_BSD, balance = block(x_BSD, *first)
                balances.append(balance)
            return self.head(self.norm(x_BSD)).float(), torch.stack(balances).mean()

    def forward(self, bytes_BS1: Tensor, *first: Tensor | bool) -> tuple[Tensor, Tensor]:
        """Return what training minimises and the cross-entropy in it, in nats a byte.

        Args:
            bytes_BS1: [B, S + 1] int64; each byte is predicted from those before it.
        """
        logits_BSV, balance = self.logits(bytes_BS1[:, :-1], *first)
        entropy = F.cross_entropy(logits_BSV.flatten(0, 1), bytes_BS1[:, 1:].flatten())
        return entropy + BALANCE_COEFFICIENT * balance, entropy.detach()

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, seed: int) -> bytes:
        """Continue a prompt by `count` bytes, sampled at a temperature of 0.5."""
        random = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(count):
            seen = text[-self.size.context :]
            # Padded to one shape: the model is causal, so what follows the last byte is not read.
            padded = seen + [0] * (self.size.context - len(seen))
            bytes_1S = torch.tensor([padded], device=self.head.weight.device)
            logits_V = self.logits(bytes_1S)[0][0, len(seen) - 1].cpu()
            chance_V = (logits_V / 0.5).softmax(dim=-1)
            text.append(int(torch.multinomial(chance_V, 1, generator=random)))
        return bytes(text)
