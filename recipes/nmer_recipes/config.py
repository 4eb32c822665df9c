"""Composes and checks the config: resolvers for the paper's settings, and the entry point."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmer_recipes import paper
from nmer_recipes.directories import flatten, place_in_sweep, place_in_wandb_sweep, read_score
from nmer_recipes.errors import UsageError
from nmer_recipes.methods import make_method, register_methods
from nmer_recipes.resume import add_choices, continue_config
from nmer_recipes.settings import CONF, TASK_PAGE, check_names, check_values, check_words, show


def _paper(name: str, *, _root_: DictConfig) -> int | float | None:
    return paper.setting(
        name, _root_.algorithm, _known_task(_root_.env), _root_.replay.kind, _root_.total_frames
    )


def _known_task(env: DictConfig) -> str:
    """Returns the name of a task from `recipes/conf/env`, or the id of any other task.

    A user's task may share the name of one of the paper's tasks, but not its settings.
    """
    return env.name if "version" in env else env.id


def _task_name(*, _parent_: DictConfig) -> str:
    """Returns a name for a task from its id: `my_package:MyRobot-v0` becomes `MyRobot-v0`."""
    separator = "." if _parent_.get("kind") == "torchrl" else ":"
    return re.sub(r"[^\w.-]+", "-", _parent_.id.rpartition(separator)[2])


def _share(total: int, parts: int) -> int:
    return max(1, int(total) // parts)


def _steps_of_a_frame(replay_ratio: float) -> int:
    return max(1, int(replay_ratio))


def _mbpo_entropy(*, _root_: DictConfig) -> float | None:
    return paper.MBPO_ENTROPY.get(_known_task(_root_.env))


def _default_device() -> str:
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def register_resolvers() -> None:
    """Registers resolvers such as `${paper:...}`, the replay methods and the open settings."""
    register_methods()
    opened = OmegaConf.create({"env": {"kwargs": {}}})
    OmegaConf.set_struct(opened.env.kwargs, False)  # accepts any name without `+`
    ConfigStore.instance().store("open", opened, provider="recipes")
    for name, resolver in {
        "paper": _paper,
        "task_name": _task_name,
        "share": _share,
        "steps_of_a_frame": _steps_of_a_frame,
        "mbpo_entropy": _mbpo_entropy,
        "default_device": _default_device,
    }.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


# Defaults of a cluster job; `hydra.launcher.NAME=...` overrides them. A job whose time is up is
# requeued at most `max_num_timeout` times, and continues from its last checkpoint.
_SLURM = {
    "cpus_per_task": "${threads}",
    "mem_gb": 8,
    "timeout_min": 720,
    "max_num_timeout": 20,
    "array_parallelism": 64,
}


# Optuna maximizes the score. Its seed is fixed, so that the same command draws the same trials
# again: complete trials are read, and a killed one continues.
_OPTUNA = {"direction": "maximize", "n_jobs": 1}
_SAMPLERS = ("tpe", "random", "cmaes", "nsgaii")


def register_plugins() -> None:
    """Sets defaults for installed launchers and sweepers that suit a run."""
    # Jobs in other processes need this path to find the recipes' modules.
    paths = [str(CONF.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    Plugins.instance()  # makes the plugins register their configs
    _add_defaults("hydra/launcher", "submitit_slurm", _SLURM)
    _add_defaults("hydra/sweeper", "optuna", _OPTUNA)
    for name in _SAMPLERS:
        _add_defaults("hydra/sweeper/sampler", name, {"seed": 0})


def _add_defaults(group: str, name: str, defaults: dict[str, Any]) -> None:
    """Changes the defaults of a config if a plugin has registered it."""
    store = ConfigStore.instance()
    try:
        found = store.load(f"{group}/{name}.yaml")
    except ConfigLoadError:
        return
    node = OmegaConf.merge(found.node, defaults)
    store.store(name=name, node=node, group=group, provider="recipes")


def with_overrides(arguments: list[str], overrides: list[str]) -> list[str]:
    """Inserts overrides before the command line's own: Hydra accepts them only in one group."""
    given = (i for i, word in enumerate(arguments) if "=" in word and not word.startswith("-"))
    at = next(given, len(arguments))
    return [*arguments[:at], *overrides, *arguments[at:]]


def run_recipe(
    train: Callable[[DictConfig], float | None],
    name: str,
    validate: Callable[[DictConfig], None] | None = None,
) -> None:
    """Composes the config `name` from the command line, checks it and trains with it."""
    register_resolvers()
    register_plugins()
    shows = re.search(r"(--cfg|-c)[ =]job\b", " ".join(sys.argv))
    if shows and "--resolve" not in sys.argv:
        sys.argv.append("--resolve")  # so that the paper's values are shown

    typed = [re.sub("^data=", "data.source=", word) for word in sys.argv[1:]]
    try:
        sys.argv[1:] = with_overrides(typed, add_choices(typed))
        register_methods(sys.argv[1:])
        check_words(sys.argv[1:], name)
    except UsageError as error:
        raise SystemExit(f"{name}.py: {error}") from None

    def job(cfg: DictConfig) -> float | None:
        logging.getLogger("torchrl").setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", module="torchrl|tensordict|gymnasium|glfw")
        task = HydraConfig.get()
        sweep = task.mode == RunMode.MULTIRUN
        try:
            check_names(cfg, name, task.runtime.choices)
            trains = "run_dir" in cfg  # other recipes measure, and have no directory of their own
            if trains and not sweep and cfg.resume not in (None, "auto"):
                cfg = continue_config(cfg, typed)
            by_rule = _set_by_rule(cfg)
            _resolve_checked(cfg, validate or check)
            folder, overrides = task.sweep.dir, task.job.override_dirname
            if trains and not sweep:
                place_in_wandb_sweep(cfg, overrides)
            if not (sweep and trains) or place_in_sweep(cfg, folder, overrides):
                _tell_rule(cfg, by_rule)
                return train(cfg)
            print(f"Skipping {cfg.run_dir}: the run is already complete.")
            return read_score(Path(cfg.run_dir))
        except KeyboardInterrupt:
            if sweep:
                raise
            raise SystemExit(
                f"{name}.py: interrupted; progress since the last checkpoint is lost"
            ) from None
        except UsageError as error:
            message = f"{name}.py: {error}"
            # A run that fails must not stop the other runs of a sweep.
            raise (RuntimeError if sweep else SystemExit)(message) from None

    hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(job)()


def _set_by_rule(cfg: DictConfig) -> list[str]:
    """Returns the settings that were not given and that depend on task and method."""
    settings = flatten(OmegaConf.to_container(cfg))
    return [name for name, value in settings.items() if str(value).startswith("${paper:")]


def _tell_rule(cfg: DictConfig, names: list[str]) -> None:
    """Prints which rule has set these settings, and their values."""
    if names:
        rule = paper.rule(cfg.algorithm, _known_task(cfg.env), cfg.replay.kind)
        values = " ".join(f"{name}={show(OmegaConf.select(cfg, name))}" for name in names)
        print(f"{rule}: {values}", file=sys.stderr)


def _resolve_checked(cfg: DictConfig, validate: Callable[[DictConfig], None]) -> None:
    """Checks the settings, then resolves those that depend on others."""
    try:
        validate(cfg)
        OmegaConf.resolve(cfg)
    except OmegaConfBaseException as error:
        raise UsageError(str(error).splitlines()[0]) from None


def check(cfg: DictConfig) -> None:
    """Raises a `UsageError` for settings that cannot run."""
    check_task_settings(cfg.env)
    make_method(cfg.replay)
    check_run(cfg)


def check_task_settings(env: DictConfig) -> None:
    """Raises a `UsageError` if the task is not named or its settings contradict each other."""
    if OmegaConf.is_missing(env, "id"):
        example = "torchrl.envs.PendulumEnv" if "kind" in env else "my_package:MyRobot-v0"
        raise UsageError(
            f"No task was given; add env.id, as in env.id={example} (see {TASK_PAGE})."
        )
    known = "version" in env and env.name in (*paper.LOCOMOTION, *paper.SMALL)
    if known and env.id != f"{env.name}-{env.version}":
        raise UsageError(
            f"env.id={env.id} does not match the settings of {env.name}-{env.version}; for your "
            f"own task, give env=gym env.id={env.id} (see {TASK_PAGE})."
        )
    wrappers = env.get("wrappers")
    if wrappers is not None and not isinstance(wrappers, ListConfig):
        raise UsageError(
            f"env.wrappers={wrappers} is not a list of paths; give env.wrappers=[{wrappers}]."
        )


_OF_DATA = ("share", "across", "clip", "max_steps", "rows")  # settings that need data.source


def check_run(cfg: DictConfig) -> None:
    """Raises a `UsageError` for settings that cannot run; ignores the replay method."""
    check_values(cfg)
    if cfg.get("random_frames", 0) >= cfg.total_frames:
        raise UsageError(
            f"random_frames={cfg.random_frames} must be less than total_frames={cfg.total_frames}; "
            "lower random_frames or raise total_frames."
        )
    if cfg.get("total_updates", cfg.total_frames) != cfg.total_frames:
        raise UsageError(
            f"total_frames={cfg.total_frames} cannot be set for {cfg.algorithm}.py, which collects "
            "no frames; give only total_updates."
        )
    idle = [f"data.{name}" for name in _OF_DATA if cfg.data.get(name)]
    if cfg.data.source is None and idle:
        raise UsageError(
            f"{', '.join(idle)} has no effect without recorded data; add data=FILE or leave it out."
        )
    if cfg.data.get("part") == "last" and cfg.data.rows is None:
        raise UsageError(
            "data.part=last has no effect without data.rows; give the number of rows or leave "
            "data.part out."
        )
    if cfg.data.get("across") and cfg.buffer_size < cfg.total_frames:
        raise UsageError(
            f"data.across=true would overwrite the data, because buffer_size={cfg.buffer_size} is "
            f"less than total_frames={cfg.total_frames}; raise buffer_size."
        )
    if cfg.data.get("across") and cfg.data.share is not None:
        raise UsageError(
            f"data.share={cfg.data.share} has no effect with data.across=true, which draws from "
            "all rows alike; leave one of the two out."
        )
    if "total_updates" in cfg and cfg.data.source is None:
        raise UsageError(
            f"{cfg.algorithm}.py needs recorded data; add data=FILE, or data= with a run directory "
            "or a Minari id (see docs/howto/offline.md)."
        )
    if cfg.eval_every > cfg.total_frames:
        raise UsageError(
            f"eval_every={cfg.eval_every} is greater than total_frames={cfg.total_frames}, so the "
            "run would never be evaluated; lower eval_every."
        )
    if cfg.get("losses") == "torchrl" and cfg.compile is True:
        raise UsageError("losses=torchrl does not support compile=true; leave one of the two out.")
    if cfg.get("losses") == "torchrl" and cfg.get("precision", "float32") != "float32":
        raise UsageError(
            f"losses=torchrl does not support precision={cfg.precision}; leave one of the two out."
        )
    if (
        "collector" in cfg
        and cfg.collector.kind != "local"
        and cfg.collector.frames_per_batch % cfg.env.count
    ):
        raise UsageError(
            f"collector.frames_per_batch={cfg.collector.frames_per_batch} is not a multiple of "
            f"env.count={cfg.env.count}; change one of the two."
        )
    for name in ("device", "storage_device"):
        try:
            torch.empty(0, device=torch.device(cfg[name]))
        except (RuntimeError, AssertionError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(
                f"{name}={cfg[name]} is not available ({reason}); try {name}=cpu."
            ) from None
    if cfg.storage_device not in (cfg.device, "cpu"):
        raise UsageError(
            f"storage_device={cfg.storage_device} differs from device={cfg.device}; give "
            f"storage_device={cfg.device} or storage_device=cpu."
        )
    if cfg.storage == "memmap" and torch.device(cfg.storage_device).type != "cpu":
        raise UsageError(
            f"storage=memmap keeps rows in files, not on storage_device={cfg.storage_device}; add "
            "storage_device=cpu."
        )
