"""Compares mixed transitions with the simulator: the error of every method by buffer size.

python recipes/on_manifold.py env=HalfCheetah                   # as in docs/manifold.md
python recipes/on_manifold.py env=Hopper sizes=[1000,5000] total_frames=5000 random_frames=1000
python recipes/on_manifold.py env=HalfCheetah --cfg job         # every setting of that run

Trains TD3 and keeps the transitions it stores. Fills buffers of every size and method with parts of
them, samples from each, and sets the simulator to the sampled states. Writes a table and a figure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from benchmarks.error_figure import draw_figure, summarize, write_summary
from benchmarks.experience import collect
from benchmarks.measure import write_table
from nmer_recipes.config import run_recipe
from nmer_recipes.errors import UsageError
from nmer_recipes.methods import find_method, make_method
from nmer_recipes.settings import check_values
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from tqdm import tqdm

from nmer_torchrl import make_replay_buffer
from nmer_torchrl.diagnostics import manifold_error
from nmer_torchrl.diagnostics.simulate import Simulator
from nmer_torchrl.keys import POINT_KEYS, VALUE_KEYS, next_key
from nmer_torchrl.methods import option_names

FLOOR = "floor"  # name of the unmixed rows among the methods
MIXED = (*POINT_KEYS, *VALUE_KEYS)
JOINTS = ("qpos", "qvel")


def choose(rows: TensorDict, size: int, stretch: int, generator: torch.Generator) -> TensorDict:
    """Returns `size` rows, in stretches from random places of the run.

    The first rows of a run would come from a different policy than the run as a whole, so buffers
    would differ in more than size. Rows within a stretch stay consecutive, as CT needs.
    """
    parts = torch.arange(len(rows)).split(stretch)
    order = torch.randperm(len(parts), generator=generator)
    return rows[torch.cat([parts[i] for i in order])[:size]]


def draw(
    method: dict[str, Any], stored: TensorDict, count: int, seed: int
) -> tuple[TensorDictBase, Tensor]:
    """Returns rows `[count]` drawn by the method, and their anchors' positions `[count]`."""
    generator = torch.Generator().manual_seed(seed)
    options = {**state_keys(method["kind"], stored), **method}
    buffer = make_replay_buffer(
        make_method(options), capacity=len(stored), batch_size=count, generator=generator
    )
    buffer.extend(stored)
    generator.manual_seed(seed)  # so that all methods draw the same anchors
    batch = buffer.sample()
    return batch, batch["index"].reshape(count, -1)[:, 0]


def state_keys(kind: str, stored: TensorDict) -> dict[str, Any]:
    """Returns keys that make a buffer treat stored joints like the observation.

    They matter where the observation hides the state: it shows no velocity beyond a bound.
    """
    options = option_names(find_method(kind))
    if not set(JOINTS) <= set(stored.keys()) or "value_keys" not in options:
        return {}
    following = [next_key(key) for key in JOINTS]
    if kind == "s4rl":  # perturbs entries that have a next value, and measures no distance
        return {"keys": [*POINT_KEYS, *JOINTS], "value_keys": [*VALUE_KEYS, *following]}
    keys: dict[str, Any] = {"value_keys": [*VALUE_KEYS, *JOINTS]}
    if "anchor_keys" in options:
        keys["anchor_keys"] = following  # nothing reads them
    return keys


def draw_all(cfg: DictConfig, stored: TensorDict, seed: int) -> dict[str, TensorDictBase]:
    """Returns rows `[rows]` of every method from the same anchors, and the anchors as the floor."""
    batches: dict[str, TensorDictBase] = {}
    entries = [key for key in (*MIXED, *JOINTS) if stored.get(key, None) is not None]
    anchors = None
    for name, method in cfg.methods.items():
        method = OmegaConf.to_container(method, resolve=True)
        batch, index = draw(method, stored, cfg.rows, seed)
        if anchors is not None and not torch.equal(index, anchors):
            raise UsageError(
                f"methods.{name} draws other anchors than the methods before it, so they cannot be "
                "compared; leave it out."
            )
        anchors, batches[name] = index, batch.select(*entries)
    return {**batches, FLOOR: stored[anchors].select(*entries)}


def compare(
    cfg: DictConfig, stored: TensorDict, reference: TensorDict, seed: int
) -> dict[str, dict[str, float]]:
    """Returns each method's means over the same rows: those that all methods changed."""
    batches = draw_all(cfg, stored, seed)
    error = manifold_error(
        cfg.env.id, torch.cat(list(batches.values())), reference=reference, action_bounds=(-1, 1)
    )
    parts = zip(error.state.split(cfg.rows), error.reward.split(cfg.rows), strict=True)
    errors = dict(zip(batches, parts, strict=True))
    anchors = batches[FLOOR]
    changed = {
        name: torch.stack([(batch[key] != anchors[key]).any(1) for key in MIXED]).any(0)
        for name, batch in batches.items()
    }
    known = error.state.isfinite().reshape(len(batches), -1).all(0)
    every = torch.stack([changed[name] for name in cfg.methods]).all(0) & known
    if not every.any():
        raise UsageError(
            f"Of rows={cfg.rows}, no row was changed by every method and has a known state; "
            "raise `rows`, or leave out methods."
        )
    return {
        name: {
            "state": float(state[every].mean()),
            "reward": float(reward[every].mean()),
            "moved": float(distance(batches[name], anchors, reference)[every].mean()),
            "changed": float(changed[name].double().mean()),
            "left out": float(state.isnan().double().mean()),
            "compared": float(every.double().mean()),
            "state median": float(state[every].median()),
            "reward median": float(reward[every].median()),
        }
        for name, (state, reward) in errors.items()
    }


def distance(batch: TensorDictBase, anchors: TensorDictBase, reference: TensorDict) -> Tensor:
    """Returns each row's distance from its anchor `[n]`, in the units of the errors."""
    steps = []
    for key in POINT_KEYS:
        spread = reference[key].std(0)
        steps.append((batch[key] - anchors[key]) / spread.where(spread > 0, 1.0))
    return torch.cat(steps, 1).square().mean(1).sqrt()


def run(cfg: DictConfig) -> None:
    """Collects rows, fills the buffers, measures errors, and writes the table and the figure."""
    torch.set_num_threads(cfg.threads)
    rows = collect(cfg)
    results = []
    repeats = [(size, repeat) for size in cfg.sizes for repeat in range(cfg.repeats)]
    for size, repeat in tqdm(repeats, desc="comparison", unit="buffer", disable=None):
        seed = 1_000 * cfg.seed + repeat
        stored = choose(rows, size, cfg.stretch, torch.Generator().manual_seed(seed))
        for name, means in compare(cfg, stored, rows, seed).items():
            results.append({"size": size, "repeat": repeat, "method": name, **means})
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    summary = summarize(results)
    write_table(summary, out / f"{cfg.env.name}.csv")
    write_summary(summary, out / f"{cfg.env.name}.md")
    draw_figure(summary, out / f"{cfg.env.name}.png", cfg.env.id, floor=FLOOR)


def check(cfg: DictConfig) -> None:
    """Raises a `UsageError` for settings that cannot run, before the long part begins."""
    check_values(cfg)
    if any(size > cfg.total_frames for size in cfg.sizes):
        raise UsageError(
            f"sizes={list(cfg.sizes)} has a size above total_frames={cfg.total_frames}; lower it "
            "or raise total_frames."
        )
    if not cfg.methods or not cfg.sizes:
        raise UsageError("There is nothing to compare; give at least one method and one size.")
    for name, method in cfg.methods.items():
        try:
            make_replay_buffer(make_method(method), capacity=2, batch_size=1)
        except (TypeError, ValueError, ImportError, UsageError) as error:
            raise UsageError(f"methods.{name}: {error}") from None
    try:
        Simulator(cfg.env.id).close()
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from None


if __name__ == "__main__":
    run_recipe(run, "on_manifold", check)
