"""Caches of a Hugging Face model's quantized expert weights, for training.

E experts, N out_features and K in_features of a weight as it is stored.
"""

from typing import Any

from torch import nn
from transformers import TrainerCallback

from grouped_linear.integrations.fp8_checkpoint import weight_names
from grouped_linear.integrations.implementation import check_stateless
from grouped_linear.integrations.plan import check_weights
from grouped_linear.integrations.quantize_experts import check_has_experts, experts_of
from grouped_linear.nn.functional import check_whole
from grouped_linear.nn.options import check_recipe
from grouped_linear.quantized.refresh import caches_of, refresh_weights
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight_cache import WeightCache
from grouped_linear.recipes import Float8BlockScaling, Recipe


def cache_experts(model: nn.Module, recipe: Recipe | None = None) -> None:
    """Give a model's experts caches of their quantized weights, which every call then reads.

    For training: the weights stay as they are, learn and are saved, and
    :func:`grouped_linear.refresh_weights` quantizes them into the caches once a step, on a stream
    of its own, while the GPU runs what comes before the experts. Without caches each call quantizes
    its weights, once more where activations are checkpointed. A call raises where the caches hold
    no weight yet, or where a weight was written since; compiled, an empty cache gives NaN.
    ``transformers.Trainer`` refreshes them with :class:`RefreshWeights`.

    The results have the bits of a model without caches. A cache takes two bytes an element.

    Args:
        model: on its device, not sharded. Experts of a checkpoint in FP8 are left alone.
        recipe: of the name that the model uses; ``Float8BlockScaling()`` by default. A call under
            another recipe raises.

    Raises:
        ValueError: for a model without experts that use the interface, for experts that are sharded
            as DTensors or that :func:`quantize_experts` quantized, and for a recipe that caches no
            weights or has a state.

    >>> import torch
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> from grouped_linear import Float8BlockScaling, refresh_weights
    >>> from grouped_linear.integrations.transformers import register
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config)
    >>> register("grouped_linear_fp8", recipe=Float8BlockScaling())
    >>> model.set_experts_implementation("grouped_linear_fp8")
    >>> cache_experts(model)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> hook = optimizer.register_step_post_hook(lambda *_: refresh_weights(model))
    >>> refresh_weights(model)
    >>> for tokens in torch.randint(64, (2, 1, 8)):
    ...     model(tokens, labels=tokens).loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """
    check_recipe("cache_experts", recipe)
    recipe = Float8BlockScaling() if recipe is None else recipe
    check_stateless("cache_experts", recipe)
    check_has_experts("cache_experts", model)
    found = experts_of(model)
    weights = [(experts, name) for experts in found.values() for name in weight_names(experts)]
    check_whole("cache_experts", (getattr(*place) for place in weights), "cache")
    for experts, name in weights:
        if isinstance(getattr(experts, name), GroupedTensor):
            raise ValueError(f"cache_experts: {name} is quantized already, by quantize_experts")
    for where, experts in found.items():
        named = ((name, getattr(experts, name)) for name in weight_names(experts))
        check_weights(f"cache_experts: {where or type(experts).__name__}", named)
    for experts, name in weights:
        w = getattr(experts, name)
        E, N, K = w.shape  # as it is stored
        experts.add_module(f"{name}_cache", WeightCache(recipe, E, N, K, w.device, of=(name,)))


class RefreshWeights(TrainerCallback):
    """Calls :func:`grouped_linear.refresh_weights` before training and after each optimizer step.

    With a ``transformers.Trainer`` and a model whose experts have caches::

        cache_experts(model, recipe)
        Trainer(model, arguments, train_dataset=..., callbacks=[RefreshWeights()])

    On several processes, which ``DistributedDataParallel`` sends buffers to, it needs
    ``TrainingArguments(ddp_broadcast_buffers=False)``: caches are buffers. A checkpoint that is
    loaded after training (``load_best_model_at_end``) makes the caches cold: call
    ``refresh_weights`` before the model is used again.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fill the caches.

        Raises:
            ValueError: for a model without caches, and where caches are sent between processes.
        """
        if args.world_size > 1 and args.ddp_broadcast_buffers is not False:
            raise ValueError(
                "RefreshWeights: DistributedDataParallel overwrites all weight caches with rank "
                "0's: pass ddp_broadcast_buffers=False to TrainingArguments"
            )
        if next(caches_of(kwargs["model"]), None) is None:
            raise ValueError("RefreshWeights: the model has no weight caches: call cache_experts")
        refresh_weights(kwargs["model"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Quantize the weights that the optimizer has written."""
        refresh_weights(kwargs["model"])
