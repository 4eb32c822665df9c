"""Trains every agent: seed, environment, agent, buffer, loop, evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from omegaconf import DictConfig
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.objectives import LossModule

from nmer_recipes.blocks import Batch, as_block, join_blocks
from nmer_recipes.checkpoint import Checkpoint
from nmer_recipes.collect import make_collector
from nmer_recipes.compiling import Results
from nmer_recipes.data import make_sources
from nmer_recipes.envs import check_task, make_env
from nmer_recipes.errors import UsageError
from nmer_recipes.evaluate import Evaluator
from nmer_recipes.memory import check_memory
from nmer_recipes.optim import Adam, no_denormals
from nmer_recipes.policy import save_policy
from nmer_recipes.replay import describe, draw, store
from nmer_recipes.runs import Run
from nmer_recipes.scores import normalize
from nmer_recipes.seeding import seeds
from nmer_recipes.video import check_video, write_video
from nmer_torchrl.loop import report_errors

# The policy without exploration, the policy with it, and the module that holds all weights.
Agent: TypeAlias = tuple[TensorDictModuleBase, TensorDictModuleBase, LossModule]
# A function that takes gradient steps on a block `[K, B]` given the number of earlier steps; and
# the optimizers by name.
Update: TypeAlias = tuple[Callable[[Batch, int], Results], dict[str, Adam]]


@no_denormals()
def train(
    cfg: DictConfig,
    *,
    make_agent: Callable[[DictConfig, int, int, torch.device], Agent],
    make_update: Callable[[DictConfig, Any], Update],
    add_entries: Callable[[DictConfig, TensorDictBase], None] | None = None,
    prepare: Callable[[DictConfig, Any, TensorDictBase], None] | None = None,
) -> float:
    """Trains an agent and returns the score of the run.

    Args:
        cfg: The run's config.
        make_agent: Builds the agent from the config, the number of observation entries, the number
            of action dimensions, and the device.
        make_update: Builds the agent's update from the config and its weights.
        add_entries: Adds entries to a row before it is stored, for the agent to find in batches.
        prepare: Reads what the agent needs from fixed data, before training.
    """
    if cfg.data.source is not None and add_entries is not None:
        raise UsageError(
            f"data={cfg.data.source} cannot be used: {cfg.algorithm}.py needs entries that "
            "recorded rows do not have; leave the data out, or use another agent."
        )
    check_task(cfg.env)
    check_video(cfg)
    # Seed: one stream each, so that a replay method changes neither the networks nor the resets.
    torch.set_num_threads(cfg.threads)
    device, seed = torch.device(cfg.device), seeds(cfg.seed)
    torch.manual_seed(seed["networks"])

    # Environment
    env = make_env(cfg.env)
    evaluate = Evaluator(cfg.env, cfg.eval_episodes, gamma=cfg.gamma, device=device)
    observations, actions = env.observation_space.shape[0], env.action_space.shape[0]

    # Agent
    if "target_entropy" in cfg and cfg.target_entropy is None:
        cfg.target_entropy = -float(actions)  # so that the run's config includes it
    actor, explorer, agent = make_agent(cfg, observations, actions, device)
    update, optimizers = make_update(cfg, agent)

    # Buffer: for the collected rows, for recorded rows, or both.
    if "collector" in cfg:
        check_memory(cfg, observations, actions)
    run = Run(cfg)
    with run.preparing():
        named = make_sources(cfg, env, seed, run.directory)
    buffers = {name: source.buffer for name, source in named.items()}
    sources = [source for source in named.values() if source.rows]
    if prepare is not None:
        prepare(cfg, agent, buffers["data"].storage.get(slice(None)))
    collector = make_collector(
        cfg,
        env,
        explorer,
        lambda: make_agent(cfg, observations, actions, torch.device("cpu"))[1],
        seed,
    )

    # Loop
    checkpoint = Checkpoint(
        run.directory, agent=agent, **buffers, collector=collector, run=run, **optimizers
    )
    if run.resumed:
        checkpoint.load()
    clock = run.clock

    def evaluate_and_save(frame: int) -> None:
        """Evaluates and saves if due, and repeats an evaluation that a signal has interrupted."""
        if run.due is not None:
            with clock("evaluation"):
                scores = evaluate(actor, agent, run.stops)
            if scores is not None:
                if "total_updates" in cfg:
                    scores |= normalize(cfg.env.name, scores["eval/return"])
                run.log(frame, collector.returns, scores, run.due)
                save_policy(run, actor, env)
        stopping, done = run.stops(), frame == cfg.total_frames
        if stopping or done or frame % cfg.checkpoint_every == 0:
            checkpoint.save(last=stopping or done)
        if stopping:
            run.stop()

    with collector, run:
        if run.due is not None:
            evaluate_and_save(collector.frames)
        for frame in range(collector.frames + 1, cfg.total_frames + 1):
            with clock("environment"):
                row = collector.step()
            if row is not None:
                with clock("upkeep"):
                    if add_entries is not None:
                        add_entries(cfg, row)
                    store(buffers["buffer"], row, collector.ended)
            learned = frame - cfg.get("random_frames", 0)
            due = math.floor(learned * cfg.get("replay_ratio", 1)) - run.updates
            for drawn in draw(sources, max(due, 0), clock):
                with clock("update"):
                    pairs = zip(sources, drawn, strict=True)
                    block = join_blocks([as_block(rows, each.rows, device) for each, rows in pairs])
                    losses, errors = update(block, run.updates)
                    run.note(losses, len(block.reward))
                run.batch = drawn[-1]
                with clock("upkeep"):
                    parts = errors.split([each.rows for each in sources], 1)
                    for each, rows, part in zip(sources, drawn, parts, strict=True):
                        report_errors(each.buffer, rows, part.flatten())
            run.count(frame)

            # Evaluation
            if frame % cfg.eval_every == 0:
                run.due = describe(sources[-1].buffer, run.batch)
            evaluate_and_save(frame)
        write_video(cfg, run.directory, evaluate, actor)
        return run.finish()
