# SPDX-License-Identifier: Apache-2.0
"""The experts that a Hugging Face model chose: record them, and have a model take them again.

A context replaces the forward of a model and of its routers. The model's forward says which tokens
run: n tokens of each of B sequences, behind those in its cache. Its routers see T = B * n of them.
L layers with experts, C experts chosen for a token, E experts, S tokens of a sequence.
"""

import base64
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from itertools import count
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from grouped_linear.contrib.layers import check_positive
from grouped_linear.nn.checks import check_model

TOPK = torch.topk, Tensor.topk
_numbers = count()  # of contexts
INTEGERS = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64


class Recording:
    """The choices so far: :func:`record_routing` gives it."""

    def __init__(self, context: "_Context") -> None:
        self._context = context

    def take(self) -> Tensor:
        """Return the choices of all tokens so far; the next call begins other sequences.

        [B, S, L, C]: for each token and layer the numbers of the experts, in the order in which
        their outputs are added. uint8 up to 256 experts, else int16.

        Raises:
            ValueError: if no token was recorded, or if calls were not those of the same sequences,
                one after the other; the next call begins anew then, too.
        """
        context = self._context
        try:
            column = context.check_calls()
            if not column:
                raise ValueError("record_routing: no token was recorded since the last take")
            return context.experts[:, :, :column].permute(1, 2, 0, 3).contiguous()
        finally:
            context.tokens.fill_(-1)
            context.column.zero_()
            context.faults.zero_()


@contextmanager
def record_routing(model: nn.Module, batch_size: int, max_tokens: int) -> Iterator[Recording]:
    """Record which experts a model's routers choose, for each token.

    A call of the model without a cache records its tokens from the first one on. A call with a
    cache goes on behind the tokens in it, as ``generate`` does. All calls before ``take`` are of
    the same sequences; ``take`` raises where their tokens show something else. Nothing waits for
    the device, and memory is taken once, so it works compiled and in CUDA graphs. A forward that
    activation checkpointing repeats is not recorded again.

    Args:
        model: a Hugging Face model, converted or not, with or without wrappers around it.
        batch_size: B, the sequences of each call, with those that ``num_return_sequences`` adds.
        max_tokens: the most tokens of a sequence, those of its prompt among them.

    Returns:
        A context. ``recording.take()``, within and after it, returns the routing.

    Raises:
        ValueError: for a model whose routers are not known. In the model, for other than
            `batch_size` sequences, for more than `max_tokens` tokens, for a router that layers
            share, and for one that gets a part of the tokens. After ``generate``, where it
            exchanged sequences or took tokens back, as beams do.
        TypeError: if `model` is not a module.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    >>> model, prompt = MixtralForCausalLM(config), torch.tensor([[1, 2, 3]])
    >>> with record_routing(model, batch_size=1, max_tokens=8) as recording:
    ...     ids = model.generate(prompt, min_new_tokens=4, max_new_tokens=4)
    >>> routing = recording.take()
    >>> routing.shape, routing.dtype
    (torch.Size([1, 6, 2, 2]), torch.uint8)

    The last token is sampled and never computed. So training replays the routing on
    ``ids[:, :-1]``: :func:`replay_routing`.
    """
    op = "record_routing"
    check_positive(op, batch_size=batch_size, max_tokens=max_tokens)
    layers = _layers_of(op, model)
    most = max(layer.num_experts for layer in layers)
    room = layers[-1].index + 1, batch_size, max_tokens, layers[0].num_chosen
    experts = torch.zeros(room, dtype=torch.uint8 if most <= 256 else torch.int16)
    with _running(_Context(op, model, layers, experts), model):
        yield Recording(layers[0].context)


@contextmanager
def replay_routing(model: nn.Module, routing: Tensor) -> Iterator[None]:
    """Have a model's tokens go to given experts, those that another model or call chose.

    The model's routers compute their logits, and of these the weights of the given experts, as they
    always do, so gradients reach the routers. ``routing[b, s]`` is of the token in ``[b, s]`` of
    the model's input, whatever its position: padding may be on either side, and several sequences
    packed into one. A context is of one batch: each micro-batch gets one of its own, of
    ``routing[rows]``. Its calls have all B x S tokens or, without gradients, go on behind those in
    their cache. With activation checkpointing the backward belongs into the context.

    Args:
        model: see :func:`record_routing`.
        routing: [B, S, L, C] integers; :func:`pad_routing` makes it of vLLM's and SGLang's. Where
            all C are -1, the router chooses. Numbers are checked here, in one wait for the device.

    Raises:
        ValueError: for a routing of another shape or dtype than the model's, for the number of an
            expert that a layer has not, for an expert twice in a token, in a model that replays a
            routing already, and where :func:`record_routing` raises it. At the end, in one wait,
            if calls were of other sequences, or of fewer tokens than the routing.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    >>> model, ids = MixtralForCausalLM(config), torch.tensor([[1, 2, 3]])
    >>> routing = torch.tensor([5, 2]).expand(1, 3, 2, 2)
    >>> with replay_routing(model, routing), record_routing(model, 1, 3) as recording:
    ...     model(ids).logits.sum().backward()
    >>> torch.equal(recording.take(), routing.to(torch.uint8))
    True
    """
    op = "replay_routing"
    layers = _layers_of(op, model)
    pads = _check_routing(op, routing, layers)
    context = _Context(op, model, layers, routing.detach().permute(2, 0, 1, 3), pads)
    with _running(context, model):
        yield
        column = context.check_calls()
        if column != context.S:
            raise ValueError(
                f"{op}: the model ran {column} tokens of a sequence, the routing has {context.S}: "
                "give the routing of these tokens alone"
            )
        if any(layer.waits for layer in layers):
            raise ValueError(
                f"{op}: activation checkpointing with use_reentrant=True runs routers again in the "
                "backward, which did not run in this context: call backward() in it"
            )


def pad_routing(model: nn.Module, routed_experts: Sequence[Any], attention_mask: Tensor) -> Tensor:
    """Make one routing of what vLLM or SGLang returned for each sequence.

    The rows of sequence b go, in their order, to the tokens that ``attention_mask[b]`` shows, with
    padding on any side. Tokens without a row get -1: the router chooses.

    Args:
        model: the one that replays; see :func:`record_routing`.
        routed_experts: for each of B sequences integers [tokens, layers, C] of torch, numpy or
            lists, or a tuple of these, one after the other, as vLLM 0.21 returns prompt and
            generation. A str is base64 of int32, as SGLang's ``meta_info`` has it. A number in a
            tuple stands for as many tokens without a row, as before SGLang's
            ``routed_experts_start_len``. Layers are those with experts, or all; flat arrays, as
            SGLang's, have all. The last token, which was never computed, may be missing.
        attention_mask: [B, S], nonzero where the model will get a token.

    Returns:
        [B, S, L, C] int16 beside `attention_mask`. :func:`replay_routing` checks the numbers.

    Raises:
        ValueError: for other layers, choices or tokens than those of the model and the mask.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> with torch.device("meta"):  # no weight is read
    ...     model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=1))
    >>> prompt, generated = [[[-1, -1]], [[5, 2]]], [[[0, 1]]]  # -1 was in a prefix cache
    >>> mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    >>> pad_routing(model, [(prompt, generated), generated], mask)[:, :, 0, 0].tolist()
    [[-1, -1, 5, 0, -1], [0, -1, -1, -1, -1]]
    """
    op = "pad_routing"
    cpu, device = torch.device("cpu"), getattr(attention_mask, "device", "cpu")
    layers, mask = _layers_of(op, model), torch.as_tensor(attention_mask, device=cpu).bool()
    L, C = layers[-1].index + 1, layers[0].num_chosen
    if mask.dim() != 2 or len(mask) != len(routed_experts):
        got = f"{list(mask.shape)} for {len(routed_experts)} sequences"
        raise ValueError(f"{op}: attention_mask must be [B, S], got {got}")
    lists = [re.search(r": (.*?)\.(\d+)\.", layer.where + ".") for layer in layers]
    numbers = sorted({int(found[2]) for found in lists if found})  # of those with experts
    first = lists[0] if len(numbers) == L else None
    depth = len(model.get_submodule(first[1])._modules) if first else L
    routing = torch.full((*mask.shape, L, C), -1, dtype=torch.int16, device=cpu)
    for b, given in enumerate(routed_experts):
        parts = []
        for part in given if isinstance(given, tuple) else (given,):
            t = _part_of(f"{op}: sequence {b}", part, L, C)
            if t.dim() == 1 and t.numel() % (depth * C) == 0:
                t = t.view(t.numel() // (depth * C), depth, C)
            fits = t.dim() == 3 and t.size(1) in (L, depth) and t.size(2) == C
            if not fits or (t.numel() and t.dtype not in (*INTEGERS, torch.uint16)):
                wanted = f"integers [tokens, {L} layers with experts or all {depth}, {C}]"
                got = f"{t.dtype} {list(t.shape)}"
                raise ValueError(f"{op}: sequence {b}: a routing is {wanted}, got {got}")
            parts.append(t.long() if t.size(1) == L else t.long()[:, numbers])
        rows, at = torch.cat(parts), mask[b].nonzero()[:, 0]
        if len(at) - len(rows) not in (0, 1):
            got = f"{op}: sequence {b} has {len(at)} tokens and a routing of {len(rows)}"
            few = "only the last may have no row; if the first n have none, give (n, rows)"
            raise ValueError(f"{got}: {few if len(at) > len(rows) else 'these are too many'}")
        routing[b, at[: len(rows)]] = rows.clamp(-2, 2**15 - 1).short()  # wrong ones stay wrong
    return routing.to(device)


def _part_of(where: str, part: Any, L: int, C: int) -> Tensor:
    """A part of a sequence's routing as a tensor; of a number as many tokens without a row."""
    try:
        if isinstance(part, str):
            part = torch.frombuffer(bytearray(base64.b64decode(part)), dtype=torch.int32)
        part = 0 if part is None else part
        t = part.cpu() if isinstance(part, Tensor) else torch.tensor(part, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where}: no integers [tokens, layers, {C}]: {error}") from None
    if t.dim() > 0:
        return t
    if t.dtype == torch.bool or t < 0:
        raise ValueError(
            f"{where}: a number of tokens without a row must not be negative, got {part}"
        )
    return torch.full((int(t), L, C), -1, device=t.device)


def _check_routing(op: str, routing: Any, layers: "list[_Layer]") -> bool:
    """Whether some tokens are padding; ValueError unless these routers could choose all others."""
    L = layers[-1].index + 1
    is_integers = isinstance(routing, Tensor) and routing.dtype in INTEGERS
    if not is_integers or routing.dim() != 4 or routing.size(2) != L or not routing.numel():
        got = f"{routing.dtype} {list(routing.shape)}" if isinstance(routing, Tensor) else routing
        raise ValueError(f"{op}: a routing is integers [B, S, {L}, C], of {L} layers, got {got}")
    facts = []
    for experts_BSC in routing.unbind(2):
        order = experts_BSC.sort().values
        first, last = order[..., 0], order[..., -1]
        partly = (first < 0) & (last >= 0)
        twice = (order[..., 1:] == order[..., :-1]).any(-1) & (last >= 0)
        facts += [t.long() for t in (first.min(), last.max(), partly.any(), twice.any())]
    found = torch.stack(facts).view(L, 4).tolist()
    for layer in layers:
        first, last, partly, twice = found[layer.index]
        C, E = layer.num_chosen, layer.num_experts
        if routing.size(3) != C:
            wrong = f"chooses {C} experts for a token, the routing has {routing.size(3)}"
        elif first < -1 or last >= E:
            wrong = f"has experts 0 to {E - 1}, the routing has {first if first < -1 else last}"
        elif partly:
            wrong = "gets -1 beside other experts: all of a token are -1 for padding"
        elif twice:
            wrong = "gets an expert twice for a token: padding must be -1"
        else:
            continue
        raise ValueError(f"{layer.where} {wrong}")
    return any(first < 0 for first, *_ in found)


# --- which modules -------------------------------------------------------------------------------


def _layers_of(op: str, model: nn.Module) -> "list[_Layer]":
    """The routers of a model, in the order of its layers.

    A router lies beside a module named ``experts``, inside of wrappers or not, and calls topk.
    Copies that PEFT's modules_to_save makes of it are one layer, of which one runs.
    """
    check_model(op, model)
    layers: list[_Layer] = []
    indices: dict[str, int] = {}
    for name, block in model.named_modules():
        experts = block._modules.get("experts")
        if experts is None:
            continue
        name = re.sub(r"\.(original_module|modules_to_save\.\w+)", "", name)
        children = [child for child in block.children() if child is not experts]
        found = [[*filter(_calls_topk, child.modules())] for child in children]
        found = [routers for routers in found if routers]
        where = f"{op}: {name or type(model).__name__}"
        if len(found) != 1:
            raise ValueError(
                f"{where}: the router of {type(block).__name__} is not known: one module beside "
                f"its experts must choose by torch.topk, and {len(found)} do"
            )
        index = indices.setdefault(name, len(indices))
        layers += [_Layer(where, index, router, experts) for router in found[0]]
    if not layers:
        raise ValueError(f"{op}: {type(model).__name__} has no router beside a module `experts`")
    return layers


def _calls_topk(module: nn.Module) -> bool:
    """Whether the forward of a module's class calls topk."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "topk" in code.co_names


@cache
def _forward_of(cls: Any) -> Callable[..., Any]:
    """The forward of a :class:`_Model` with the signature of a class's, by which generate goes."""
    return wraps(cls.forward)(lambda model, *args, **kwargs: model.run(*args, **kwargs))


def _models_of(context: "_Context", model: nn.Module) -> "list[_Model]":
    """The modules that get tokens and have all routers inside: a model, and the one it calls."""
    found, routers = [], {layer.router for layer in context.layers}
    for module in model.modules():
        names = [*inspect.signature(type(module).forward).parameters][1:]  # without self
        takes = "inputs_embeds" in names or ("input_ids" in names and "hidden_states" not in names)
        if takes and routers <= set(module.modules()):
            found.append(_Model(context, module, names))
    if not found:
        raise ValueError(
            f"{context.op}: nothing in {type(model).__name__} has all routers inside and takes "
            "input_ids: give the model that gets the tokens"
        )
    return found


@contextmanager
def _running(context: "_Context", model: nn.Module) -> Iterator[None]:
    """Have a model and its routers run the forwards of a context until the end.

    They are set on the modules, as accelerate sets forwards, which would hide a class's forward.
    """
    models = _models_of(context, model)
    around: Any = models[0]
    while isinstance(around := getattr(around.inner, "__self__", None), _Model):
        if context.replays and around.context.replays:
            raise ValueError(
                f"{context.op}: the model replays a routing already: leave that context first"
            )
    with ExitStack() as stack:

        def put(module: nn.Module, name: str, function: Any) -> None:
            own = vars(module)
            undo = (own.update, {name: own[name]}) if name in own else (own.pop, name)
            stack.callback(*undo)
            own[name] = function

        for layer in context.layers:
            put(layer.router, "forward", layer.forward)
        for of in models:
            cls: Any = type(of.module)
            put(of.module, "forward", MethodType(_forward_of(cls), of))
        for module in model.modules():
            if hasattr(type(module), "generate"):
                put(module, "generate", _generate(context, module))
        yield


def _generate(context: "_Context", module: Any) -> Callable[..., Any]:
    """A model's ``generate`` that raises unless it returns the tokens that ran."""
    plain = module.generate

    @wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        column = context.check_calls()
        returned = getattr(output, "sequences", output)[:, :-1]  # the last one never runs
        returned = returned.to(context.tokens)
        ran = context.tokens[:, column - returned.size(1) : column]
        if ran.shape != returned.shape or bool(((ran >= 0) & (ran != returned)).any()):
            raise ValueError(
                f"{context.op}: generate returned other sequences than those that ran, as beams "
                "do: decode greedily, or sample"
            )
        return output

    return generate


# --- what runs in the place of forwards ----------------------------------------------------------


class _State(nn.Module):
    """Lives as long as a context. Its bound ``forward`` takes the place of another module's.

    A module, because torch.compile takes its buffers for memory that stays, as CUDA graphs need it.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "record_routing, replay_routing: a copy or a pickle of the model would go on with this "
            "context: make it outside"
        )


class _Context(_State):
    """The experts of a batch, and where in it the model's calls are.

    Tensors say where, so that no graph depends on values. `faults` has the rules that calls broke,
    which the end of the context reads.
    """

    experts: Tensor  # [L, B, S + 1, C]; the last column takes tokens past the end
    tokens: Tensor  # [B, S + 1]: the numbers that calls had, -1 where none is known
    column: Tensor  # where the last call ended
    faults: Tensor  # [3]
    columns: Tensor | None  # [n], of the call that runs

    def __init__(
        self, op: str, model: Any, layers: "list[_Layer]", experts: Tensor, pads: bool | None = None
    ) -> None:
        super().__init__()
        self.op, self.layers, self.replays, self.pads = op, layers, pads is not None, pads
        _, self.B, self.S, self.C = experts.shape
        self.columns, self.with_grad = None, False
        device = next(model.parameters()).device
        with torch.inference_mode(False):
            self.number = torch.tensor(next(_numbers), device="cpu")
            tokens = torch.full((self.B, self.S + 1), -1, device=device)
            self.register_buffer("experts", pad(experts, (0, 0, 0, 1)).to(device))
            self.register_buffer("tokens", tokens)
            self.register_buffer("column", torch.zeros((), dtype=torch.int64, device=device))
            self.register_buffer("faults", torch.zeros(3, dtype=torch.bool, device=device))
        for layer in layers:
            layer.context = self

    def begin(self, n: int, ids: Tensor | None, start: int | Tensor) -> Tensor:
        """Begin a call with n tokens of each sequence behind `start`; where each one is, [n]."""
        columns = torch.arange(n, device=self.tokens.device) + start
        first, last, at = columns[0], columns[-1], columns.clamp(max=self.S)
        if ids is None:  # nothing shows whether these are the same sequences again
            differ = (first == 0) & (self.column > 0)
        else:
            seen = self.tokens.index_select(1, at)
            differ = ((seen >= 0) & (seen != ids.to(seen))).any()
        skipped = (first != 0) & (first != self.column)
        self.faults.logical_or_(torch.stack([skipped, last >= self.S, differ]))
        self.columns = at
        for layer in self.layers:
            layer.ran = False
        return columns

    def end(self, columns: Tensor, ids: Tensor | None) -> None:
        """End a call that raised nothing; ValueError for a layer that did not run in it."""
        ran = {layer.index for layer in self.layers if layer.ran}
        for layer in self.layers:
            layer.ran = False  # as at first, so that no graph is compiled again
            if layer.index not in ran:
                raise ValueError(
                    f"{layer.where} did not run in the model's call: it has another router now, or "
                    "the model left a layer out"
                )
        if ids is not None:
            self.tokens.index_copy_(1, columns.clamp(max=self.S), ids.to(self.tokens))
        self.column.copy_(columns[-1] + 1)

    def check_calls(self) -> int:
        """The tokens of a sequence that ran; ValueError if they were not those of one batch."""
        *faults, column = torch.cat([self.faults, self.column[None]]).tolist()
        way_out = "make a context for each" if self.replays else "take the recording before"
        sentences = (
            "a call went on behind tokens that did not run in this context, or took some back: run "
            "every token in it, once",
            f"the model ran more than the {self.S} tokens of a sequence of this context",
            f"the model ran other sequences in the same context: {way_out}",
        )
        for fault, sentence in zip(faults, sentences, strict=True):
            if fault:
                raise ValueError(f"{self.op}: {sentence}")
        return int(column)


class _Model(_State):
    """The forward of a model: it says which tokens run."""

    module: nn.Module

    def __init__(self, context: _Context, module: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.context, self.names = context, names
        self.inner: Callable[..., Any] = module.forward
        vars(self)["module"] = module  # not a submodule

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        context = self.context
        op, B, S = context.op, context.B, context.S
        given = dict(zip(self.names, args, strict=False)) | kwargs
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        tokens = embeds if ids is None else ids
        if tokens is None or tokens.dim() != (3 if ids is None else 2):
            raise ValueError(f"{op}: a call needs input_ids [B, n] or inputs_embeds [B, n, H]")
        b, n = tokens.shape[:2]
        around = context.columns  # of the call of a model around this one
        if b != B or n > S or (around is not None and n != around.size(0)):
            raise ValueError(
                f"{op}: a call of the model has {b} x {n} tokens, the context {B} x {S}: make a "
                "context for each micro-batch, with its own routing or batch_size"
            )
        if around is not None:
            return self.inner(*args, **kwargs)
        context.with_grad = torch.is_grad_enabled()
        if context.replays and n != S and context.with_grad:
            raise ValueError(
                f"{op}: with gradients a call must have all {B} x {S} tokens, got {b} x {n}"
            )
        cache = given.get("past_key_values", given.get("cache"))
        if cache is not None and not hasattr(cache, "get_seq_length"):
            raise ValueError(
                f"{op}: a {type(cache).__name__} does not say how many tokens it holds: use a "
                "cache of transformers, without continuous batching"
            )
        columns = context.begin(n, ids, 0 if cache is None else cache.get_seq_length())
        try:
            output = self.inner(*args, **kwargs)
        finally:
            context.columns = None
        context.end(columns, ids)
        return output


class _Layer(_State):
    """The forward of a router.

    Outside of the model's call a backward repeats it: then it takes all tokens again.
    """

    context: _Context
    router: nn.Module

    def __init__(self, where: str, index: int, router: Any, experts: nn.Module) -> None:
        super().__init__()
        self.where, self.index, self.ran = where, index, False
        self.waits = False  # for a backward that runs it again, with use_reentrant=True
        self.learns = any(p.requires_grad for p in experts.parameters())
        self.inner: Callable[..., Any] = router.forward
        vars(self)["router"] = router  # not a submodule
        numbers = (getattr(m, "num_experts", None) for m in (router, *experts.modules()))
        self.num_experts: Any = next((n for n in numbers if isinstance(n, int)), None)
        of_gemma = getattr(getattr(router, "config", None), "top_k_experts", None)
        self.num_chosen: Any = getattr(router, "top_k", of_gemma)
        self.check(None not in (self.num_experts, self.num_chosen))

    def check(self, is_known: bool) -> None:
        """Raise ValueError for a router that is made in another way than transformers'."""
        if not is_known:
            raise ValueError(
                f"{self.where}: {type(self.router).__name__} must be as a router of transformers: "
                "with top_k and num_experts, and a forward that returns logits, weights, experts"
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The router's forward, recorded, or with the experts of a replay."""
        context = self.context
        columns = context.columns
        self.waits = (
            columns is not None
            and context.with_grad
            and not torch.is_grad_enabled()
            and (torch.compiler.is_compiling() or _is_in_function())  # not just under no_grad
        )
        if columns is not None:
            if self.ran:
                raise ValueError(
                    f"{self.where} runs twice in a call of the model: layers that share a router "
                    "cannot be told apart"
                )
            self.ran = True
        if not context.replays:
            output = self.inner(*args, **kwargs)
            if columns is not None:
                self.check(isinstance(output, tuple) and len(output) > 2)
                chosen_TC = output[2].detach()
                self.experts_of(chosen_TC.numel() // context.C)
                chosen = chosen_TC.reshape(context.B, -1, context.C).to(context.experts)
                context.experts[self.index].index_copy_(1, columns, chosen)
            return output
        choose = _Choose(self)
        with choose:
            output = self.inner(*args, **kwargs)
        if choose.times != 1:
            raise ValueError(
                f"{self.where}: {type(self.router).__name__} chooses its {self.num_chosen} of "
                f"{self.num_experts} experts in a way that is not known"
            )
        self.check(isinstance(output, tuple) and len(output) > 2)
        logits, weights, *others = output  # not topk's values: some routers take its indices alone
        if not torch.compiler.is_compiling():
            if self.learns and torch.is_grad_enabled() and not weights.requires_grad:
                weights = weights.detach().requires_grad_()  # which the check needs
            if weights.requires_grad:
                weights = _SameContext.apply(weights, context.number)
        return logits, weights, *others

    def experts_of(self, T: int) -> Tensor:
        """[B, n, C] of a call; ValueError unless its router gets all tokens."""
        context = self.context
        B, S, columns = context.B, context.S, context.columns
        n = S if columns is None else columns.size(0)
        if B * n != T:
            raise ValueError(
                f"{self.where}: the router gets {T} tokens, the model's call has {B} x {n}: models "
                "that give a router a part of the tokens are not supported"
            )
        experts = context.experts[self.index]
        return experts[:, :S] if columns is None else experts.index_select(1, columns)


def _is_in_function() -> bool:
    """Whether an autograd Function with a backward runs this, as reentrant checkpoints do."""
    frame: Any = inspect.currentframe()
    while (frame := frame.f_back) is not None:
        name, first = frame.f_code.co_name, (*frame.f_code.co_varnames, "")[0]
        if name == "forward" and first != "self":  # to read others' locals keeps them alive
            ctx: Any = frame.f_locals.get(first)
            if isinstance(ctx, FunctionCtx) and any(getattr(ctx, "needs_input_grad", ())):
                return True
    return False


class _Choose(TorchFunctionMode):
    """Gives the topk of a router's scores [T, E] the experts of a replay.

    The router computes all else as it always does. Its other topk, of scores in groups of experts,
    have another shape.
    """

    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self.layer, self.times = layer, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, layer = kwargs or {}, self.layer
        if func in TOPK:
            scores = args[0]
            k = args[1] if len(args) > 1 else kwargs["k"]
            if scores.dim() == 2 and (scores.size(1), k) == (layer.num_experts, layer.num_chosen):
                self.times += 1
                experts_BnC = layer.experts_of(scores.size(0))
                experts_TC = experts_BnC.reshape(-1, k).to(scores.device, torch.int64)
                if layer.context.pads:
                    experts_TC = torch.where(experts_TC < 0, func(*args, **kwargs)[1], experts_TC)
                # Two indices where topk saves one tensor: a recompute without the replay then has
                # fewer saved tensors than the forward, and torch.utils.checkpoint says so.
                row_T1 = torch.arange(scores.size(0), device=scores.device)[:, None]
                return torch.return_types.topk((scores[row_T1, experts_TC], experts_TC))
        return func(*args, **kwargs)


class _SameContext(torch.autograd.Function):
    """Weights as they are. What it saves comes from a recompute, which may be in another context.

    Its number shows that then. Numbers are on the CPU, where reading one waits for nothing.
    """

    @staticmethod
    def forward(weights: Tensor, number: Tensor) -> Tensor:
        return weights.clone()  # which experts may write

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.number = inputs[1].item()

    @staticmethod
    def backward(ctx: Any, d_weights: Tensor) -> tuple[Tensor, None]:
        if ctx.saved_tensors[0].item() != ctx.number:
            raise ValueError(
                "replay_routing: activation checkpointing has run a router again in another "
                "context than its forward's: call backward() in that one"
            )
        return d_weights, None
