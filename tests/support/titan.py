# SPDX-License-Identifier: Apache-2.0
"""torchtitan's models and its Trainer in a test: on a GPU as they are, on a CPU where they can be.

Importing this module without torchtitan raises ImportError: ask for torchtitan first.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components import metrics
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, utils
from torchtitan.models import deepseek_v3
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from grouped_linear import convert

SPMD = "partial_dtensor"  # the default backend needs a nightly torch
VOCABULARY = 2048  # of its debug models


def causal(
    self: nn.Module, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, **options: Any
) -> Tensor:
    """Attention for a CPU, where torchtitan has none for language models."""
    q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
    scale = options["scale"]
    y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return y.transpose(1, 2)


def in_float32(self: nn.Module, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """torchtitan's grouped matrix multiplication for a CPU.

    torch multiplies bfloat16 without vectors on a CPU that has no instructions for it: a step took
    18 s there in place of 0.8 s.
    """
    return torch._grouped_mm(A.float(), B_t.float(), offs=offs).to(A.dtype)


def prepare(device_type: str) -> None:
    """What torchtitan takes for granted: a GPU, and with its default backend a nightly torch."""
    utils.set_spmd_backend(SPMD)
    if not hasattr(dist, "set_timeout"):  # torch 2.14 has it; timeouts then stay as they are
        utils.set_pg_timeouts = lambda *args, **options: None
    if device_type != "cpu":
        return
    for name, module in list(sys.modules.items()):  # each has its own copy of these two
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            module.device_type = "cpu"
            if hasattr(module, "device_module"):
                module.device_module = torch.cpu
    FlexAttention.forward = causal
    GroupedExperts._grouped_mm = in_float32
    utils.set_pg_timeouts = lambda *args, **options: None  # it asks for a number of a GPU
    nothing = SimpleNamespace(
        max_reserved_gib=0.0,
        max_reserved_pct=0.0,
        max_active_gib=0.0,
        max_active_pct=0.0,
        num_alloc_retries=0,
        num_ooms=0,
    )
    memory = SimpleNamespace(
        device_name="CPU", get_peak_stats=lambda: nothing, reset_peak_stats=lambda: None
    )
    metrics.build_device_memory_monitor = lambda: memory


def sum_in_force(model: nn.Module) -> None:
    """Gloo cannot scale while it reduces."""
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)


def converting(parallelize: Callable[..., nn.Module], **how: Any) -> Callable[..., nn.Module]:
    """As docs/from_other_libraries.md has it."""

    def convert_and_parallelize(model: nn.Module, **options: Any) -> nn.Module:
        convert(model, **how)
        return parallelize(model, **options)

    return convert_and_parallelize


def deepseek(layers: int, how: dict[str, Any] | None) -> ModelSpec:
    """The debug model of DeepSeek-V3, its experts converted or not; one dense layer is first."""
    spec = deepseek_v3.model_registry("debugmodel")
    if how is not None:
        spec = replace(spec, parallelize_fn=converting(spec.parallelize_fn, **how))
    spec.model.layers = spec.model.layers[:layers]
    return spec


class Counting(BaseDataLoader):
    """Endless sequences of 64 tokens in turn, in steps of 1 to 4: soon learnt, and no files."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        positions: bool = False
        """Whether to number tokens, from which torchtitan makes the masks of its attention."""

    def __init__(
        self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self.config, self.shape = config, (local_batch_size, seq_len)
        self.generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        B, L = self.shape
        while True:
            start = torch.randint(64, (B, 1), generator=self.generator)
            step = torch.randint(1, 5, (B, 1), generator=self.generator)
            tokens = (start + step * torch.arange(L + 1)) % 64
            inputs = {"input": tokens[:, :-1]}
            if self.config.positions:
                inputs["positions"] = torch.arange(L).repeat(B, 1)
            yield inputs, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """Nothing here is text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Losses(MetricsProcessor):
    """Keeps the loss of each step."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        self.losses: list[float] = []

    def log(self, step: int, loss: float, *others: float, **extra: Any) -> None:
        self.losses.append(loss)


class InGroup(Trainer):
    """The Trainer, in a process group that is there already."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def init_distributed(self) -> ParallelDims:
        return ParallelDims.from_config(self.config.parallelism, dist.get_world_size())


def losses(
    how: dict[str, Any] | None,
    layers: int,
    device_type: str,
    directory: str,
    steps: int,
    expert_parallel_degree: int = 2,
) -> list[float]:
    """What torchtitan's Trainer logs, step by step, for the tokens of all processes together.

    FSDP2 is over all of them. A process calls prepare() first.

    Args:
        how: of convert(), or None for the model as it is.
        layers: of the model.
        device_type: cpu or cuda.
        directory: what the Trainer may write goes here.
        steps: of training.
        expert_parallel_degree: processes among which a layer's experts are spread.
    """
    spec, on_cpu = deepseek(layers, how), device_type == "cpu"
    parallelize = spec.parallelize_fn

    def parallelize_for_gloo(model: nn.Module, **options: Any) -> nn.Module:
        model = parallelize(model, **options)
        sum_in_force(model)
        return model

    config = InGroup.Config(
        model_spec=replace(spec, parallelize_fn=parallelize_for_gloo) if on_cpu else spec,
        dump_folder=directory,
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        metrics=Losses.Config(log_freq=1),
        tokenizer=NoTokenizer.Config(),
        dataloader=Counting.Config(positions=not on_cpu),
        optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=8,
            seq_len=32,
            steps=steps,
            disable_cuda_graphs=True,
            mixed_precision_param="float32" if on_cpu else "bfloat16",
        ),
        parallelism=ParallelismConfig(
            spmd_backend=SPMD,
            data_parallel_shard_degree=dist.get_world_size(),
            expert_parallel_degree=expert_parallel_degree,
        ),
        activation_checkpoint=None,
    )
    config.debug.seed = 0
    trainer: Any = config.build()
    trainer.train()
    trainer.close()
    found: list[float] = trainer.metrics_processor.losses
    return found
