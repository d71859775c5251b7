# SPDX-License-Identifier: Apache-2.0
"""The activations of transformers' experts."""

from typing import Any

from torch import nn
from torch.nn.functional import silu
from transformers.activations import GELUActivation, GELUTanh, ReLUSquaredActivation, SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from grouped_linear.ops.activation import Activation, GeGLU, SquaredReLU, SwiGLU

# Classes of transformers whose _apply_gate is a form of SwiGLU, and the names of the attributes
# for alpha and the limit. With an alpha, 1 is added to up.
SWIGLU_FORMS = {
    "BeamExperts": (None, None),
    "DeepseekV4Experts": (None, "limit"),
    "FP8Experts": ("swiglu_alpha", "swiglu_limit"),
    "Glm5NextTextExperts": (None, "swiglu_limit"),
    "GptOssExperts": ("alpha", "limit"),
    "HYV4Experts": (None, "swiglu_limit"),
    "HYV4VLExperts": (None, "swiglu_limit"),
    "MiniMaxM3VLExperts": ("swiglu_alpha", "swiglu_limit"),
    "OpenAIPrivacyFilterExperts": ("alpha", "limit"),
}


def activation_of(experts: Any) -> Activation | None:
    """The activation that grouped_mlp can compute in the experts' place.

    None for any other, or if a norm follows the second layer.
    """
    if experts.has_post_expert_norm or "_apply_gate" in vars(experts):
        return None
    cls = type(experts)
    act_fn = getattr(experts, "act_fn", silu)
    if not experts.has_gate:
        return SquaredReLU() if isinstance(act_fn, ReLUSquaredActivation) else None
    alpha = limit = None
    if cls._apply_gate is not _default_apply_gate:
        # The class that defines it: FSDP2 and convert make subclasses.
        owner = next(base for base in cls.__mro__ if "_apply_gate" in vars(base))
        replaced = cls._apply_gate.__module__ != owner.__module__
        in_library = owner.__module__.startswith("transformers.")
        if owner.__name__ not in SWIGLU_FORMS or not in_library or replaced:
            return None
        alpha_name, limit_name = SWIGLU_FORMS[owner.__name__]
        alpha = getattr(experts, alpha_name) if alpha_name else None
        limit = getattr(experts, limit_name) if limit_name else None
    if getattr(experts, "gate_softcap", None) is not None or (limit is not None and limit <= 0):
        return None
    if alpha is not None:
        return SwiGLU(alpha, 1.0, limit, interleaved=not experts.is_concatenated)
    if not experts.is_concatenated:
        return None
    if act_fn is silu or isinstance(act_fn, nn.SiLU | SiLUActivation):
        return SwiGLU(limit=limit)
    if limit is None and isinstance(act_fn, GELUActivation | GELUTanh):
        return GeGLU("tanh" if isinstance(act_fn, GELUTanh) else "none")
    return None


def same_activation(experts: Any, fp8_experts: Any) -> bool:
    """Whether transformers' FP8 experts have the same activation."""
    own, other = activation_of(experts), activation_of(fp8_experts)
    if own is not None or other is not None:
        return own == other
    if experts.has_gate and type(experts)._apply_gate is not _default_apply_gate:
        return False
    return type(experts.act_fn) is type(fp8_experts.act_fn)
