"""Reports searches for the best settings with Hydra's Optuna sweeper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

RESULTS = "optimization_results.yaml"  # the sweeper writes it to the sweep's directory


class TellBest(Callback):
    """Prints the result of a search; does nothing in other sweeps."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Hides Optuna's message about a study that is not kept."""
        if _searches(config):
            import optuna

            optuna.logging.set_verbosity(optuna.logging.WARNING)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Prints the best settings as overrides."""
        if _searches(config):
            path = Path(config.hydra.sweep.dir) / RESULTS
            found = OmegaConf.load(path)
            if "best_params" in found:  # there is one solution, not several
                best = " ".join(f"{name}={value}" for name, value in found.best_params.items())
                print(f"Best of the search: score {found.best_value:.1f} with {best}; see {path}")


def _searches(config: DictConfig) -> bool:
    return "optuna" in config.hydra.runtime.choices.get("hydra/sweeper", "")
