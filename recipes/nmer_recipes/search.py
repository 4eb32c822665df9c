"""Searches for the best settings, by Hydra's Optuna sweeper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

RESULTS = "optimization_results.yaml"  # that the sweeper writes into the directory of the sweep


class TellBest(Callback):
    """Prints what a search has found; other sweeps find nothing."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Leaves out Optuna's line about a study that it forgets at the end."""
        if _searches(config):
            import optuna

            optuna.logging.set_verbosity(optuna.logging.WARNING)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Prints the best settings as overrides."""
        if _searches(config):
            path = Path(config.hydra.sweep.dir) / RESULTS
            found = OmegaConf.load(path)
            if "best_params" in found:  # rather than several solutions
                best = " ".join(f"{name}={value}" for name, value in found.best_params.items())
                print(f"Best of the search: score {found.best_value:.1f} with {best}; see {path}")


def _searches(config: DictConfig) -> bool:
    return "optuna" in config.hydra.runtime.choices.get("hydra/sweeper", "")
