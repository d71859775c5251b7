"""Quantize a model's weights into their caches once a step, beside what else the GPU does."""

import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from grouped_linear.quantized.weight_cache import WeightCache
from grouped_linear.recipes import Experts, Format


def caches_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, WeightCache]]:
    """Every weight cache in a model: its name, the module whose parameters it caches, and it."""
    for prefix, module in model.named_modules():
        for name, cache in module.named_children():
            if isinstance(cache, WeightCache) and cache.of:
                yield f"{prefix}.{name}".lstrip("."), module, cache


def _check_keeps_caches(parallel: DistributedDataParallel) -> None:
    if dist.get_world_size(parallel.process_group) == 1 or not parallel.will_sync_module_buffers():
        return
    sent = {id(buffer) for buffer in parallel.modules_buffers}
    if any(isinstance(m, WeightCache) and id(m.values) in sent for m in parallel.modules()):
        raise RuntimeError(
            "refresh_weights: DistributedDataParallel overwrites all weight caches with rank 0's "
            "before each forward: construct it with broadcast_buffers=False"
        )


def refresh_weights(model: nn.Module) -> None:
    """Quantize the weights of a model into all its weight caches: once a step, after the optimizer.

    The caches are those of layers with ``cache_weights=True``, which read them in calls with
    ``is_first_microbatch=False``, and those that
    :func:`grouped_linear.integrations.transformers.cache_experts` adds to a Hugging Face model,
    which reads them in every call. On a GPU the kernels run on a stream of their own, one launch a
    weight in the order of the modules, and each layer's forward waits for its own weights alone, on
    the device. So quantization runs beside the forward of the layers before.

    Call it before the first step, and after whatever writes weights: ``load_state_dict`` makes a
    cache cold, and an optimizer makes it stale. A forward that reads a cold or stale cache raises;
    a compiled one that reads a cold cache computes NaN; a CUDA graph cannot tell a stale one. As an
    optimizer's hook::

        refresh_weights(model)
        optimizer.register_step_post_hook(lambda *_: refresh_weights(model))

    Under ``DelayedScaling`` call it after :func:`grouped_linear.update_scales`. While a CUDA graph
    is captured the kernels are captured too, on the stream of the capture. Call it once before a
    forward is compiled or captured, so that the graph waits.

    Args:
        model: any module. A module without caches is left alone.

    Raises:
        RuntimeError: if parameters are sharded (FSDP2). Their layers are given
            ``is_first_microbatch=True``, which quantizes what was gathered for the forward. If the
            model is a DistributedDataParallel that overwrites every process's caches with rank 0's;
            construct it with ``broadcast_buffers=False``. Inside a compiled function.

    >>> from grouped_linear import Float8BlockScaling, GroupedLinear
    >>> layer = GroupedLinear(2, 16, 32, recipe=Float8BlockScaling(), cache_weights=True)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> hook = optimizer.register_step_post_hook(lambda *_: refresh_weights(layer))
    >>> refresh_weights(layer)
    >>> for step in range(3):
    ...     for micro_batch in range(2):
    ...         y = layer(torch.randn(5, 16), [2, 3], is_first_microbatch=False)
    ...         y.square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("refresh_weights: call it outside of what is compiled")
    for parallel in model.modules():
        if isinstance(parallel, DistributedDataParallel):
            _check_keeps_caches(parallel)
    work: list[tuple[WeightCache, Experts, Format]] = []
    for place, module, cache in caches_of(model):
        owner, _, name = place.rpartition(".")
        weights = tuple(getattr(module, of) for of in cache.of)
        if any(hasattr(type(w), "to_local") for w in weights):  # a DTensor
            raise RuntimeError(
                f"refresh_weights: the weights of {owner or 'the model'} are sharded: call the "
                "layer with is_first_microbatch=True, which quantizes what was gathered"
            )
        state = getattr(module, name.removesuffix("_cache") + "_state", None)
        recipe = cache.recipe if state is None else state.of_call()
        work.append((cache, weights, recipe.weight))
    streams: dict[torch.device, torch.cuda.Stream | None] = {}
    with torch.no_grad():
        for cache, weights, format in work:
            device = cache.values.device
            if device not in streams:
                streams[device] = _stream_after_current(device)
            cache.refresh(weights, format, streams[device])


def _stream_after_current(device: torch.device) -> "torch.cuda.Stream | None":
    """A stream that waits for the current one; None for the current one itself."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = _own_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
    return stream


@functools.cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all refreshes: memory that a stream has used is kept for that stream."""
    return torch.cuda.Stream(device)
