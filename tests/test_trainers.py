"""Trains by the commands of the page on TorchRL's own trainers, with few frames."""

import runpy
import shlex

import pytest
import torch
from hydra import compose, initialize_config_dir
from page_helpers import ROOT, blocks
from torchrl.trainers import Trainer

from nmer_torchrl import loop

FOLDER = ROOT / "recipes" / "trainers"
FEW = [
    "collector.total_frames=120",
    "collector.frames_per_batch=40",
    "collector.init_random_frames=40",
    "trainer.optim_steps_per_batch=4",
    "trainer.progress_bar=false",
    "replay_buffer.batch_size=16",
    "actor_network.num_cells=[16]",
    "critic_network.num_cells=[16]",
]
COMMANDS = [
    line.partition(" #")[0].rstrip()
    for block in blocks(ROOT / "docs" / "howto" / "trainers.md", "sh")
    for line in block.splitlines()
]


@pytest.mark.no_cover  # Hydra composes all of TorchRL's configs, five times as slowly with it
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*experimental:UserWarning")
@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_s_commands_train(command, monkeypatch):
    _, script, _, name, *overrides = shlex.split(command)
    seen = []
    training = Trainer.train

    def watch(trainer):
        before = [parameter.detach().clone() for parameter in trainer.loss_module.parameters()]
        training(trainer)
        seen.append((trainer, before))

    monkeypatch.setattr(Trainer, "train", watch)
    module = runpy.run_path(str(ROOT / script))
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        module["train"](compose(name, overrides=[*FEW, *overrides]))
    ((trainer, before),) = seen
    after = list(trainer.loss_module.parameters())
    assert all(parameter.isfinite().all() for parameter in after)
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    buffer = trainer.replay_buffer
    assert len(buffer) == 120
    batch = buffer.sample()
    if "replay_buffer=uniform" in overrides:
        assert "mixup_weight" not in batch
    else:
        assert (batch["mixup_weight"] < 1).float().mean() > 0.5
    if loop.learns(buffer):  # priorities have followed the TD errors
        assert len(batch["priority_weight"].unique()) > 4
