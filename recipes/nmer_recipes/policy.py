"""Saves trained policies, and loads them for use without a task or a replay buffer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.envs import ExplorationType, set_exploration_type

from nmer_recipes.checkpoint import read_state
from nmer_recipes.errors import UsageError
from nmer_recipes.files import told_of_errors, write_state
from nmer_recipes.runs import Run
from nmer_recipes.settings import CONF

WHICH = ("best", "last")


def save_policy(run: Run, actor: TensorDictModuleBase, env: gymnasium.Env) -> None:
    """Saves the actor after an evaluation: as the last one, and as the best if it is."""
    bounds = env.env.action_space  # the task's own bounds, before rescaling
    state = {
        "actor": actor.state_dict(),
        "observations": env.observation_space.shape[0],
        "entries": find_entries(env),
        "low": torch.from_numpy(bounds.low.copy()),
        "high": torch.from_numpy(bounds.high.copy()),
        "frames": run.rows[-1]["frames"],
        "return": run.rows[-1]["eval/return"],
    }
    best = state["return"] >= max(row["eval/return"] for row in run.rows)
    paths = [policy_file(run.directory, which) for which in (WHICH if best else WHICH[1:])]
    with told_of_errors(paths[0]):
        for path in paths:
            write_state(path, state)


def find_entries(env: gymnasium.Env) -> list[list[str]] | None:
    """Returns the paths of a task's Dict observation in vector order, or None for a Box.

    `env` has rescaled actions and a flattened Dict.
    """
    flat = env.env
    if not isinstance(flat, gymnasium.wrappers.FlattenObservation):
        return None

    def paths(space: gymnasium.Space, path: list[str]) -> list[list[str]]:
        if not isinstance(space, gymnasium.spaces.Dict):
            return [path]
        return [found for key, part in space.items() for found in paths(part, [*path, key])]

    return paths(flat.env.observation_space, [])


def policy_file(directory: Path, which: str) -> Path:
    """Returns the path of a run's best or last policy."""
    return directory / f"policy_{which}.pt"


class Policy(nn.Module):
    """A trained policy without exploration.

    Call `act` with a NumPy observation `[n]`, or several `[B, n]`, to get actions within the task's
    bounds. For a task with Dict observations, pass the dict. As a module, the policy maps a float32
    tensor `[B, n]` to actions `[B, m]`.

    Attributes:
        frames: Number of frames after which it was evaluated.
        mean_return: Mean return of that evaluation.
        actor_width: Number of entries of an observation.
    """

    def __init__(self, cfg: DictConfig, state: dict[str, Any]) -> None:
        super().__init__()
        self.cfg = cfg
        self.frames, self.mean_return = int(state["frames"]), float(state["return"])
        self.register_buffer("low", state["low"].float())
        self.register_buffer("high", state["high"].float())
        self.entries = state.get("entries")
        recipe = load_recipe(cfg.algorithm)
        self.actor_width = int(state["observations"])
        agent = recipe.make_agent(cfg, self.actor_width, len(self.low), torch.device("cpu"))
        self.actor = agent[0]
        self.actor.load_state_dict(state["actor"])
        self.requires_grad_(False)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Maps observations `[B, n]` to actions `[B, m]` within the task's bounds."""
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            results = self.actor(observation=observation)
        action = results[-1] if isinstance(results, tuple) else results  # after mean and scale
        return self.low + (action + 1) / 2 * (self.high - self.low)

    def act(self, observation: NDArray[Any] | dict[str, Any]) -> NDArray[np.float32]:
        """Returns the action for one NumPy observation `[n]`, or for several `[B, n]`."""
        if isinstance(observation, dict):
            observation = self._flatten(observation)
        array = np.asarray(observation, dtype=np.float32)
        width = self.actor_width
        if array.ndim not in (1, 2) or array.shape[-1] != width:
            raise ValueError(
                f"The observation has shape {array.shape}, but the policy takes [{width}] or "
                f"[B, {width}]."
            )
        with torch.no_grad():
            action = self(torch.from_numpy(array.reshape(-1, width)))
        return action.numpy().reshape(*array.shape[:-1], -1)

    def _flatten(self, observation: dict[str, Any]) -> NDArray[Any]:
        if self.entries is None:
            raise ValueError(
                "The observation is a dict, but this policy takes an array; give one of shape "
                f"[{self.actor_width}]."
            )
        parts = []
        for path in self.entries:
            part: Any = observation
            for key in path:
                if key not in part:
                    raise ValueError(
                        f"The observation has no {'.'.join(path)!r}; give all entries that the "
                        "policy was trained on."
                    )
                part = part[key]
            parts.append(np.asarray(part))
        axes = max(1, *(part.ndim for part in parts))  # an entry of one number has an axis less
        return np.concatenate([p[..., None] if p.ndim < axes else p for p in parts], axis=-1)


def load_recipe(name: str) -> ModuleType:
    """Returns the recipe that trains an algorithm.

    Only this project's recipes are loaded: a run's files cannot choose another module, and a module
    of the same name elsewhere is ignored.
    """
    known = sorted(path.stem for path in CONF.parent.glob("*.py") if _trains(path.stem))
    if name not in known:
        raise UsageError(f"algorithm={name!r} is not known; the recipes are {', '.join(known)}.")
    spec = importlib.util.spec_from_file_location(f"_recipe_{name}", CONF.parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _trains(recipe: str) -> bool:
    path = CONF / f"{recipe}.yaml"
    return path.exists() and "algorithm" in OmegaConf.load(path)


def load_policy(directory: Path | str, which: str = "best") -> Policy:
    """Loads the policy that a run has trained. No code from its files is executed.

    Args:
        directory: The run's directory.
        which: `"best"`, the policy with the highest mean return in an evaluation, or `"last"`.
    """
    directory = Path(directory)
    if which not in WHICH:
        raise UsageError(f"which={which!r} is not valid; give 'best' or 'last'.")
    path = policy_file(directory, which)
    if not path.exists():
        raise UsageError(
            f"{directory} has no {path.name}; give the directory of a run that has completed an "
            "evaluation with a finite return."
        )
    cfg = OmegaConf.load(directory / "config.yaml")
    return Policy(cfg, read_state(path, "train again, or give another run"))


def export_policy(policy: Policy, path: Path) -> None:
    """Exports a policy with `torch.export`, so that it runs without this project.

    Raises if the exported program acts differently.
    """
    examples = torch.randn(3, policy.actor_width)
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(policy, (examples,), dynamic_shapes=({0: batch},))
    torch.testing.assert_close(program.module()(examples[:2]), policy(examples[:2]))
    torch.export.save(program, path)
