# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer on a CPU, as its tests use it; only tests of clients import this."""

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments


def trainer_of(model: Any, dataset: Any, directory: Path, **options: Any) -> Any:
    """Of 4 steps in which even a tiny model learns; options are TrainingArguments'."""
    steps: dict[str, Any] = {"max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1}
    batch = {"per_device_train_batch_size": 2}
    quiet: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(str(directory), **steps | batch | quiet | options)
    return Trainer(model, arguments, train_dataset=dataset)


def losses(trainer: Any) -> list[float]:
    """Of every step."""
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]
