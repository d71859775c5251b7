# SPDX-License-Identifier: Apache-2.0
"""The routers of a Hugging Face model, and other forwards in the place of theirs for a while."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

from torch import nn

from grouped_linear.integrations.experts import goes_through_interface
from grouped_linear.integrations.wrappers import named_unwrapped, unwrapped
from grouped_linear.nn.checks import check_model


@dataclass(frozen=True)
class Router:
    """The module that chooses the experts of one layer."""

    layer: str
    module: nn.Module
    num_experts: int
    num_chosen: int
    others: list[nn.Module]
    """Copies that PEFT's ``modules_to_save`` may put in its place."""


def routers_of(op: str, model: nn.Module) -> list[Router]:
    """The routers of a model's layers with experts, in their order, without wrappers."""
    check_model(op, model)
    modules = dict(named_unwrapped(model))
    found: dict[nn.Module, Router] = {}
    for name, experts in modules.items():
        if not goes_through_interface(experts):
            continue
        layer = name.rpartition(".")[0]
        block = modules[layer]
        children = [child for child in block.children() if _chooses(unwrapped(child))]
        if len(children) != 1:
            raise ValueError(
                f"{op}: {layer or type(model).__name__}: the router of {type(block).__name__} is "
                f"not known: {len(children)} modules beside its experts choose by torch.topk"
            )
        router: Any = unwrapped(children[0])
        others = [m for m in children[0].modules() if _chooses(m) and m is not router]
        config = cast(Any, experts.config)
        C = router.top_k if hasattr(router, "top_k") else config.top_k_experts
        E = router.num_experts if hasattr(router, "num_experts") else experts.num_experts
        found[router] = Router(layer, router, cast(int, E), C, others)
    if not found:
        raise ValueError(
            f"{op}: {type(model).__name__} has no experts that go through transformers' interface"
        )
    return list(found.values())


def _chooses(module: nn.Module) -> bool:
    """Whether a module's forward calls topk: of the modules beside experts, only their router does.

    tests/test_routing_replay.py runs the router of every model of the library.
    """
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and "topk" in code.co_names


def _generate(op: str, model: Any, layers: list[Any]) -> Callable[..., Any]:
    """A model's ``generate``, in the modes that keep the order of sequences and tokens.

    Without a cache to go on from, its first token is the first of a routing.
    """
    plain, signature = model.generate, inspect.signature(type(model).generate)

    @wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(model, *args, **kwargs).arguments
        config, options = given.get("generation_config"), given.get("kwargs", {})
        config, _ = model._prepare_generation_config(config, **options)
        mode = config.get_generation_mode(given.get("assistant_model")).value
        if given.get("custom_generate") is not None:
            mode = "custom_generate"
        if config.is_assistant:
            mode = "an assistant"
        if config.use_cache is False:
            mode = "use_cache=False"
        if mode not in ("greedy_search", "sample"):
            raise ValueError(
                f"{op}: generate by {mode} exchanges sequences, or takes tokens back or again: "
                "decode greedily, or sample, with a cache"
            )
        if options.get("past_key_values") is None:
            for layer in layers:
                layer.column.zero_()
        return plain(*args, **kwargs)

    return generate


def _refusal(sentence: str) -> Callable[..., Any]:
    """A function that raises ValueError."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(sentence)

    return refuse


@contextmanager
def in_place(op: str, model: nn.Module, layers: list[Any]) -> Iterator[None]:
    """Have routers run these forwards until the end, and ``generate`` refuse some modes.

    They are set on the modules, as accelerate sets forwards, which would hide a class's forward.
    """
    with ExitStack() as stack:

        def put(module: nn.Module, name: str, function: Any) -> None:
            before = vars(module).get(name)
            vars(module)[name] = function
            stack.callback(_restore, module, name, before)

        for layer in layers:
            put(layer.router.module, "forward", layer.forward)
            other_router = f"{op}: {layer.router.layer} has another router than at the beginning"
            for other in layer.router.others:
                put(other, "forward", _refusal(f"{other_router}: choose PEFT's adapter before"))
        for module in model.modules():
            if hasattr(type(module), "_prepare_generation_config"):  # transformers'
                put(module, "generate", _generate(op, module, layers))
                batches = f"{op}: continuous batching mixes sequences: use generate"
                put(module, "init_continuous_batching", _refusal(batches))
        yield


def _restore(module: nn.Module, name: str, function: Any) -> None:
    if function is None:
        del vars(module)[name]
    else:
        vars(module)[name] = function
