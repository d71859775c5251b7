# SPDX-License-Identifier: Apache-2.0
"""Lightning: a fit, its checkpoint, and a fit that goes on from it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.compare import assert_same_bits, bits

lightning = pytest.importorskip("lightning")


def fit(module: Any, epochs: int, directory: Path, checkpoint: Path | None = None) -> Any:
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=True,
    )
    ids = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(0))
    trainer.fit(module, torch.utils.data.DataLoader(ids, batch_size=4), ckpt_path=checkpoint)
    return trainer


def test_fit_and_go_on(tiny: Any, tmp_path: Path) -> None:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny()

        def training_step(self, batch: Any) -> Any:
            return self.model(batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    whole, resumed = Module(), Module()
    fit(whole, 2, tmp_path / "whole")
    fit(Module(), 1, tmp_path / "first").save_checkpoint(tmp_path / "first.ckpt")
    fit(resumed, 2, tmp_path / "resumed", tmp_path / "first.ckpt")
    for name, t in whole.state_dict().items():
        assert_same_bits(bits(t), bits(resumed.state_dict()[name]))
