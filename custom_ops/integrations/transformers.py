# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's mixture-of-experts models on grouped_linear's ops.

transformers' experts interface lets any function that is registered under a name compute the
experts of a model. A model is given the name; its code does not change.
"""

import transformers

from grouped_linear.integrations.fp8_checkpoint import fp8_quantization_config, fp8_tensors
from grouped_linear.integrations.implementation import Implementation
from grouped_linear.nn.checks import check_flags, check_recipe
from grouped_linear.recipes import Recipe

__all__ = ["fp8_quantization_config", "fp8_tensors", "register"]

# Experts of older versions do not say whether a norm follows them (has_post_expert_norm).
OLDEST_TRANSFORMERS = (5, 23)
if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST_TRANSFORMERS:
    raise ImportError(
        "grouped_linear.integrations.transformers: transformers must be 5.23 or newer, "
        f"got {transformers.__version__}"
    )


def register(
    name: str = "grouped_linear", recipe: Recipe | None = None, *, save_gate_up_in_fp8: bool = False
) -> None:
    """Make ``model.set_experts_implementation(name)`` compute experts with grouped_linear.

    Any model that uses transformers' experts interface then accepts this name, also in
    ``from_pretrained(..., experts_implementation=name)``. The experts keep their parameters,
    activation, biases and layouts. Training, inference, ``generate`` and ``torch.compile`` all
    work. A name always means the options it was registered with, so models with different ones can
    be used side by side. A quantizing recipe quantizes all experts in every call;
    :func:`grouped_linear.convert` with ``weights`` does once, or once a step.

    Weights that a model stores as [E, in_features, out_features] (GPT-OSS, Aria) are read in place;
    only MXFP8 copies them before it rounds them. Their gradients are computed in the same layout,
    except with e5m2 gradients, where the result is copied into it. Experts of a checkpoint in FP8
    (``FineGrainedFP8Config``) are read in place under ``Float8BlockScaling``.

    Args:
        name: the implementation's name.
        recipe: how the GEMMs are computed; None for the activations' own dtype.
        save_gate_up_in_fp8: see :func:`grouped_linear.grouped_mlp`. Experts whose activation is not
            one of its activations then raise ValueError when they are called.

    Raises:
        ValueError: for a recipe with a state (``DelayedScaling``), which a function cannot keep,
            and for a name that is registered with other options or another implementation.

    >>> import torch
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> from grouped_linear import Float8BlockScaling
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config)
    >>> register("grouped_linear_fp8", recipe=Float8BlockScaling())
    >>> model.set_experts_implementation("grouped_linear_fp8")
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 64])
    """
    if not isinstance(name, str):
        raise ValueError(f"register: name must be a string, got {name!r}")
    check_recipe("register", recipe)
    check_flags("register", save_gate_up_in_fp8=save_gate_up_in_fp8)
    implementation = Implementation(name, recipe, save_gate_up_in_fp8)
    implementation.check("register")
    implementation.register()
