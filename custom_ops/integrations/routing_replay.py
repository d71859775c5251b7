# SPDX-License-Identifier: Apache-2.0
"""The experts that a Hugging Face model chose: record them, and have a model take them again.

B sequences, S tokens of each, T = B * S tokens of a call, L layers with experts, C experts chosen
for a token, E experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from grouped_linear.integrations.routers import Router, in_place, routers_of
from grouped_linear.ops.constants import is_integer

TOPK = torch.topk, Tensor.topk
INTEGERS = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64


@dataclass(frozen=True, eq=False)
class Routing:
    """The experts that each token was sent to, in each layer, as vLLM and SGLang return them.

    >>> routing = Routing(torch.zeros(2, 7, 48, 8, dtype=torch.uint8))
    >>> routing.bytes_per_token
    384
    """

    experts: Tensor
    """[B, S, L, C]: for each token and layer the numbers of the experts, in the order in which
    their outputs are added. uint8 up to 256 experts, else int16. Samplers give padding -1."""
    weights: Tensor | None = None
    """[B, S, L, C] float32: the factors of the experts' outputs; None if not recorded."""

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token's choices in all layers, weights included."""
        parts = [self.experts] if self.weights is None else [self.experts, self.weights]
        return sum(t[0, 0].nbytes for t in parts)

    def to(self, device: torch.device | str) -> "Routing":
        """A copy on another device, as the CPU, where it waits for training."""
        weights = None if self.weights is None else self.weights.to(device)
        return replace(self, experts=self.experts.to(device), weights=weights)


class Recording:
    """The choices so far: :func:`record_routing` gives it."""

    def __init__(self, layers: "list[_Recorded]") -> None:
        self._layers = layers

    @property
    def routing(self) -> Routing:
        """The choices of all tokens so far, those of the prompt first.

        Raises:
            ValueError: if the model ran more tokens than there is room for, or not all layers ran.
        """
        columns = [layer.check_column() for layer in self._layers]
        S = max(columns)
        for layer, column in zip(self._layers, columns, strict=True):
            if column != S:
                raise ValueError(
                    f"record_routing: {layer.router.layer} ran {column} tokens of a sequence, "
                    f"other layers {S}: another router has taken its place since"
                )
        experts = [layer.experts[:, :S] for layer in self._layers]
        weights = [layer.weights[:, :S] for layer in self._layers if layer.weights is not None]
        device = experts[0].device
        return Routing(
            torch.stack([t.to(device) for t in experts], dim=2),
            torch.stack([t.to(device) for t in weights], dim=2) if weights else None,
        )


@contextmanager
def record_routing(
    model: nn.Module, batch_size: int, max_tokens: int, *, weights: bool = False
) -> Iterator[Recording]:
    """Record which experts a model's routers choose, for each token.

    A call with ``max_tokens`` tokens of each sequence is recorded from the first one on. A call
    with fewer goes on where the last one ended, as the prefill and the steps of ``generate`` do,
    greedy or sampling; its other modes exchange sequences or take tokens back, and are refused. A
    ``generate`` without ``past_key_values`` begins at the first token again.
    A forward that activation checkpointing repeats in an eager backward is not recorded again.
    Nothing waits for the device, and memory is taken once: it works compiled and in CUDA graphs.

    Args:
        model: a Hugging Face model whose experts go through transformers' interface, converted or
            not.
        batch_size: B, the sequences of each call.
        max_tokens: the most tokens of a sequence, those of its prompt among them.
        weights: whether to record the factors of the experts' outputs, too.

    Returns:
        A context; within and after it, ``recording.routing`` is a :class:`Routing`.

    Raises:
        ValueError: for a model without such experts, and for one whose router does not choose by
            torch.topk; in the model, for tokens that are no `batch_size` sequences, for more than
            `max_tokens` of them, for a part of them where gradients are recorded, and in
            ``generate`` for beams, prompt lookup, an assistant and continuous batching.
        TypeError: if `model` is not a module.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    >>> model, prompt = MixtralForCausalLM(config), torch.tensor([[1, 2, 3]])
    >>> with record_routing(model, batch_size=1, max_tokens=8) as recording:
    ...     ids = model.generate(prompt, min_new_tokens=4, max_new_tokens=4)
    >>> recording.routing.experts.shape, recording.routing.experts.dtype
    (torch.Size([1, 6, 2, 2]), torch.uint8)

    The last token is sampled and never computed. So training replays the routing on
    ``ids[:, :-1]``: :func:`grouped_linear.replay_routing`.
    """
    op = "record_routing"
    for name, number in (("batch_size", batch_size), ("max_tokens", max_tokens)):
        if not is_integer(number) or number < 1:
            raise ValueError(f"{op}: {name} must be a positive integer, got {number!r}")
    shape, routers = (batch_size, max_tokens), routers_of(op, model)
    with torch.inference_mode(False):
        recorded = [_Recorded(op, router, shape, weights) for router in routers]
    with in_place(op, model, recorded):
        yield Recording(recorded)


@contextmanager
def replay_routing(model: nn.Module, routing: Routing | Tensor) -> Iterator[None]:
    """Have a model's tokens go to given experts, those that another model or call chose.

    The model's routers compute their logits, and of these the weights of the given experts, as they
    always do, so gradients reach the routers; docs/inference.md says what decides nothing here. A
    call with all S tokens of the sequences takes the routing as a whole. A call with fewer goes on
    where the last one ended, as in ``generate``; gradients must be off then. With activation
    checkpointing the backward belongs into the context, before the next routing.

    Args:
        model: see :func:`record_routing`.
        routing: or its experts, a tensor [B, S, L, C] of integers, as of vLLM's and SGLang's
            ``routed_experts``. Where all C are -1, as samplers give padding, the router chooses.
            Numbers are checked here, in one wait for the device.

    Raises:
        ValueError: for a routing of another shape or dtype than the model's, for the number of an
            expert that a layer has not, in a model that replays a routing already, where
            :func:`record_routing` raises it, and at the end for a model that ran more tokens than
            the routing has.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    >>> model, ids = MixtralForCausalLM(config), torch.tensor([[1, 2, 3]])
    >>> experts = torch.randint(8, (1, 3, 2, 2))
    >>> with replay_routing(model, experts), record_routing(model, 1, 3) as recording:
    ...     model(ids).logits.sum().backward()
    >>> torch.equal(recording.routing.experts, experts.to(torch.uint8))
    True
    """
    op = "replay_routing"
    experts = routing.experts if isinstance(routing, Routing) else routing
    routers = routers_of(op, model)
    for router in routers:
        _check_replays_nothing(op, router)
    pads = _check_experts(op, experts, routers)
    with torch.inference_mode(False):
        replayed = [
            _Replayed(op, router, experts[:, :, i], pads) for i, router in enumerate(routers)
        ]
    with in_place(op, model, replayed):
        yield
        for layer in replayed:
            layer.check_column()


def _check_experts(op: str, experts: Any, routers: list[Router]) -> bool:
    """Whether some tokens are padding; ValueError unless these routers could choose all others."""
    is_integers = isinstance(experts, Tensor) and experts.dtype in INTEGERS
    if not is_integers or experts.dim() != 4 or experts.size(2) != len(routers):
        got = f"{experts.dtype} {list(experts.shape)}" if isinstance(experts, Tensor) else experts
        raise ValueError(
            f"{op}: experts must be integers [B, S, {len(routers)}, C], of {len(routers)} layers, "
            f"got {got}"
        )
    if not experts.numel():
        raise ValueError(f"{op}: experts are of no token: {list(experts.shape)}")
    C = experts.size(3)
    smallest, largest = (t.long() for t in (experts.amin((0, 1, 3)), experts.amax((0, 1, 3))))
    ranges = torch.stack([smallest, largest], dim=1).tolist()
    for router, (first, last) in zip(routers, ranges, strict=True):
        where, E = f"{op}: {router.layer}", router.num_experts
        if router.num_chosen != C:
            raise ValueError(
                f"{where} chooses {router.num_chosen} experts for a token, {list(experts.shape)} "
                f"has {C}"
            )
        if first < -1 or last >= E:
            wrong = first if first < -1 else last
            raise ValueError(f"{where} has experts 0 to {E - 1}, the routing has {wrong}")
    pads = any(first == -1 for first, _ in ranges)
    if pads:
        is_padding = experts == -1
        if bool((is_padding.any(3) & ~is_padding.all(3)).any()):
            raise ValueError(f"{op}: a token has -1 beside other experts: all are -1 for padding")
    return pads


def _check_replays_nothing(op: str, router: Router) -> None:
    """Raise ValueError for a router that takes the choices of another replay."""
    layer = getattr(router.module.forward, "__self__", None)
    while isinstance(layer, _Columns):
        if isinstance(layer, _Replayed):
            raise ValueError(
                f"{op}: {router.layer} replays a routing already: leave that context first"
            )
        layer = getattr(layer.router_forward, "__self__", None)


class _Columns(nn.Module):
    """Memory [B, S, ...] for one layer's tokens, which the model's calls go through in order.

    A module, because torch.compile takes its buffers for memory that stays, as CUDA graphs need it.
    """

    column: Tensor  # where the next call begins: a tensor, so that no graph depends on its value

    def __init__(self, op: str, router: Router, shape: tuple[int, int]) -> None:
        super().__init__()
        self.op, self.router, self.shape = op, router, shape
        parameter = next(router.module.parameters())
        self.device = parameter.device
        column = torch.zeros((), dtype=torch.int64, device=self.device)
        self.register_buffer("column", column, persistent=False)
        self.router_forward: Callable[..., Any] = router.module.forward

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            f"{self.op}: a copy or a pickle of the model would go on with this context: make it "
            "outside"
        )

    def _next_columns(self, T: int) -> Tensor | None:
        """Go on by a call's T tokens, and return their columns; None where they are all."""
        (B, S), where = self.shape, f"{self.op}: {self.router.layer}"
        n = T // B
        if n * B != T or n > S:
            raise ValueError(f"{where}: a call has {T} tokens, not {B} sequences of up to {S}")
        if n == S:
            self.column.fill_(S)
            return None
        if torch.is_grad_enabled():
            raise ValueError(
                f"{where}: with gradients a call must have all {B} x {S} tokens, got {B} x {n}"
            )
        columns = self.column + torch.arange(n, device=self.device)
        self.column += n
        return columns

    def check_column(self) -> int:
        """Raise ValueError if calls came to more tokens than there are; the column otherwise."""
        S, column = self.shape[1], int(self.column)
        if column > S:
            raise ValueError(
                f"{self.op}: {self.router.layer}: the model ran {column} tokens of a sequence, "
                f"there are {S}"
            )
        return column


class _Recorded(_Columns):
    """The choices of one layer, written by its router's forward."""

    experts: Tensor
    weights: Tensor | None

    def __init__(self, op: str, router: Router, shape: tuple[int, int], weights: bool) -> None:
        super().__init__(op, router, shape)
        (B, S), C = shape, router.num_chosen
        dtype = torch.uint8 if router.num_experts <= 256 else torch.int16
        room = B, S + 1, C  # the last column takes the tokens past S
        new = torch.zeros(room, dtype=dtype, device=self.device)
        self.register_buffer("experts", new, persistent=False)
        floats = torch.zeros(room, device=self.device) if weights else None
        self.register_buffer("weights", floats, persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The router's forward."""
        output = self.router_forward(*args, **kwargs)
        is_compiled = torch.compiler.is_compiling()
        if not is_compiled and torch._C._current_graph_task_id() != -1:
            return output  # in a backward, which computes a checkpointed forward again
        _, weights, experts = output[:3]
        C = self.router.num_chosen
        columns = self._next_columns(experts.numel() // C)
        self._write(self.experts, experts, columns)
        if self.weights is not None:
            self._write(self.weights, weights.detach(), columns)
        return output

    def _write(self, to: Tensor, numbers: Tensor, columns: Tensor | None) -> None:
        (B, S), C = self.shape, self.router.num_chosen
        numbers = numbers.reshape(B, -1, C).to(to.dtype)
        if columns is None:
            to[:, :S].copy_(numbers)
        else:
            to.index_copy_(1, columns.clamp(max=S), numbers)


class _Replayed(_Columns):
    """The choices of one layer, taken by its router's forward."""

    experts: Tensor

    def __init__(self, op: str, router: Router, experts_BSC: Tensor, pads: bool) -> None:
        super().__init__(op, router, (experts_BSC.size(0), experts_BSC.size(1)))
        experts = experts_BSC.detach().to(self.device, copy=True).contiguous()
        self.register_buffer("experts", experts, persistent=False)
        self.pads = pads

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The router's forward, with these choices."""
        choose = _Choose(self)
        with choose:
            output = self.router_forward(*args, **kwargs)
        if choose.times != 1:
            raise ValueError(
                f"{self.op}: {self.router.layer}: {type(self.router.module).__name__} chooses its "
                f"{self.router.num_chosen} of {self.router.num_experts} experts in a way that is "
                "not known"
            )
        return output

    def chosen(self, T: int) -> Tensor:
        """[T, C] int64 of a call's tokens."""
        columns = self._next_columns(T)
        experts = self.experts
        if columns is not None:
            experts = experts.index_select(1, columns.clamp(max=self.shape[1] - 1))
        return experts.reshape(T, self.router.num_chosen).long()


class _Choose(TorchFunctionMode):
    """Gives the topk of a router's scores [T, E] the experts of a replay.

    The router computes all else as it always does. Its other topk, of scores in groups of experts,
    have another shape.
    """

    def __init__(self, replayed: _Replayed) -> None:
        super().__init__()
        self.replayed, self.times = replayed, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        router = self.replayed.router
        if func in TOPK:
            scores = args[0]
            k = args[1] if len(args) > 1 else kwargs["k"]
            of_experts = scores.dim() == 2 and scores.size(1) == router.num_experts
            if of_experts and k == router.num_chosen:
                self.times += 1
                experts_TC = self.replayed.chosen(scores.size(0))
                if self.replayed.pads:
                    chosen_TC = func(*args, **kwargs)[1]
                    experts_TC = torch.where(experts_TC < 0, chosen_TC, experts_TC)
                # Two indices where topk saves one tensor: a recompute without the replay then has
                # fewer saved tensors than the forward, and torch.utils.checkpoint says so.
                row_T1 = torch.arange(scores.size(0), device=scores.device)[:, None]
                return torch.return_types.topk((scores[row_T1, experts_TC], experts_TC))
        return func(*args, **kwargs)
