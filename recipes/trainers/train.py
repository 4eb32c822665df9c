"""Trains one of TorchRL's own trainers with a replay buffer of this package, chosen by name.

python recipes/trainers/train.py --config-name sac                         # NMER
python recipes/trainers/train.py --config-name sac replay_buffer=uniform   # the baseline
python recipes/trainers/train.py --config-name sac --cfg job               # every setting
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

import nmer_torchrl.configs  # noqa: F401, so that `replay_buffer=nmer` is known


def train(cfg: DictConfig) -> None:
    """Builds the trainer that the config describes, and trains."""
    hydra.utils.instantiate(cfg.trainer).train()


if __name__ == "__main__":
    hydra.main(version_base="1.3", config_path=".", config_name="sac")(train)()
