"""Acts in the environments: builds a run's collector, and acts frame by frame."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor
from tqdm import tqdm

from nmer_recipes import envs
from nmer_recipes.seeding import Stream

if TYPE_CHECKING:
    from nmer_recipes.batches import BatchCollector


class UpdateCounter:
    """Replaces the collector in a run on fixed data; it only counts updates."""

    ended = None

    def __init__(self, stream: Stream) -> None:
        self.stream, self.frames = stream, 0
        self.returns: list[float] = []  # of training episodes; always empty

    def __enter__(self) -> UpdateCounter:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def step(self) -> None:
        """Counts an update."""
        self.frames += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the count and the state of the updates' generators."""
        return {"frames": self.frames, "stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the count and the generators."""
        self.frames = state["frames"]
        self.stream.load_state_dict(state["stream"])


def make_collector(
    cfg: DictConfig,
    env: gymnasium.Env,
    policy: TensorDictModuleBase,
    make_copy: Callable[[], TensorDictModuleBase],
    seed: dict[str, int],
) -> FrameCollector | BatchCollector | UpdateCounter:
    """Builds the collector that `cfg.collector` describes.

    `make_copy` returns a policy like the one given, on the CPU.
    """
    device = torch.device(cfg.device)
    stream = Stream(seed["exploration"], device)
    if "collector" not in cfg:
        return UpdateCounter(stream)
    if cfg.collector.kind != "local":
        from nmer_recipes.batches import find_collector

        collector = find_collector(cfg.collector.kind)
        return collector(cfg, policy, make_copy, seed=seed["environment"], stream=stream)
    return FrameCollector(
        [env, *(envs.make_env(cfg.env) for _ in range(cfg.env.count - 1))],
        policy,
        seed=seed["environment"],
        random_frames=cfg.random_frames,
        stream=stream,
        device=device,
        storage_device=torch.device(cfg.storage_device),
    )


class FrameCollector:
    """Acts in Gymnasium tasks frame by frame; can be resumed within an episode.

    Several environments act in rounds: one policy call for all of them, then one step of each.
    Their rows are returned one at a time, in the order of the environments, before the next round.
    A row is therefore stored up to `len(envs) - 1` frames after the weights that produced it.

    TorchRL's `Collector` spends several milliseconds on a batch of one frame; its environments take
    one of them. Its state leaves out the next observation to act on, so a resumed run takes a
    different path.

    Args:
        envs: One or several copies of the task, with actions in [-1, 1].
        policy: The exploring policy that acts after the random frames.
        seed: Seed of the first environment; the others use the numbers that follow.
        random_frames: Number of first frames with uniform actions, over all environments. A round
            that begins within them is entirely random.
        stream: The random stream for exploration.
        device: The policy's device.
        storage_device: The rows' device. Defaults to the policy's.
    """

    def __init__(
        self,
        envs: Sequence[gymnasium.Env],
        policy: TensorDictModuleBase,
        *,
        seed: int,
        random_frames: int,
        stream: Stream,
        device: torch.device,
        storage_device: torch.device | None = None,
    ) -> None:
        self.envs, self.policy, self.stream = list(envs), policy, stream
        self.device, self.storage_device = device, storage_device or device
        self._choose = _without_tensordicts(policy)
        self.random_frames = random_frames
        self.frames = 0
        self.episode_returns = [0.0] * len(self.envs)
        self.ended: float | None = None  # return of the episode that ended with the last frame
        self.returns: list[float] = []  # of the episodes that ended since the list was last taken
        self._rows: deque[tuple[TensorDict, float | None]] = deque()  # not yet returned
        width = 2 * self.envs[0].observation_space.shape[0] + 2
        self._host = _host_memory(len(self.envs) * width, self.storage_device)
        starts = [env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)]
        self._observations = list(self._upload(*starts))

    def __enter__(self) -> FrameCollector:
        return self

    def __exit__(self, *_: Any) -> None:
        for env in self.envs:
            env.close()

    def step(self) -> TensorDict:
        """Returns the next transition, without a batch dimension; acts if no row is left.

        A truncated step is stored as not terminated, even if it also terminated.
        """
        if not self._rows:
            self._act()
        row, self.ended = self._rows.popleft()
        self.frames += 1
        if self.ended is not None:
            self.returns.append(self.ended)
        return row

    @torch.no_grad()
    def _act(self) -> None:
        """Acts once in every environment."""
        seen = self._observations
        with self.stream:
            if self.frames < self.random_frames:
                shape = self.envs[0].action_space.shape
                shape = shape if len(seen) == 1 else (len(seen), *shape)
                action = 2 * torch.rand(shape, device=self.device) - 1
            else:
                batch = _join(seen).to(self.device, non_blocking=True)
                action = self._choose(batch)
        chosen = action.cpu()  # the only wait of a round: the device finishes its queue
        steps, ended = [], []
        for i, (env, taken) in enumerate(zip(self.envs, _part(chosen, len(seen)), strict=True)):
            after, reward, terminated, truncated, _ = env.step(taken.numpy())
            self.episode_returns[i] += float(reward)
            start, over = np.empty(0), terminated or truncated
            ended.append(self.episode_returns[i] if over else None)
            if over:
                after = np.array(after)  # a task may return the array that its reset changes
                self.episode_returns[i], start = 0.0, env.reset()[0]
            steps += [after, np.array([reward, terminated and not truncated]), start]
        parts = self._upload(*steps)
        following, rest, starts = parts[::3], parts[1::3], parts[2::3]
        self._observations = [
            start if len(start) else after for after, start in zip(following, starts, strict=True)
        ]
        actions = _part(chosen if self.storage_device.type == "cpu" else action, len(seen))
        for before, done, after, other, end in zip(
            seen, actions, following, rest, ended, strict=True
        ):
            step = TensorDict(observation=after, reward=other[:1], terminated=other[1:].bool())
            self._rows.append((TensorDict(observation=before, action=done, next=step), end))

    def _upload(self, *arrays: np.ndarray) -> tuple[Tensor, ...]:
        """Copies vectors to the storage device as float32, in one transfer and without waiting.

        They pass through host memory that the next call reuses. By then the device has read it,
        since an action was waited for in between.
        """
        widths = [len(array) for array in arrays]
        host = self._host[: sum(widths)]
        host.copy_(torch.from_numpy(np.concatenate(arrays)))
        return host.to(self.storage_device, non_blocking=True, copy=True).split(widths)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the episodes, the rows that are left, and the counters."""
        return {
            "envs": [envs.get_state(env) for env in self.envs],
            # Clone, so that only these values are saved and not the memory they share.
            "observations": [observation.clone() for observation in self._observations],
            "episode_returns": list(self.episode_returns),
            "rows": [{"row": row.clone().to_dict(), "ended": end} for row, end in self._rows],
            "frames": self.frames,
            "returns": list(self.returns),
            "stream": self.stream.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state, and continues within the episodes if they can be restored.

        The state of a different collector has no episodes.
        """
        if "env" in state:  # written by a version with a single environment
            single = ("env", "observation", "episode_return")
            state = state | {f"{name}s": [state[name]] for name in single}
        saved, fresh = state.get("envs", ()), {}
        for i, env in enumerate(self.envs):
            env.reset()
            if i < len(saved) and envs.set_state(env, saved[i]):
                self._observations[i] = state["observations"][i].to(self.storage_device)
                self.episode_returns[i] = state["episode_returns"][i]
            else:
                fresh[i], self.episode_returns[i] = env.reset()[0], 0.0
        if fresh:
            tqdm.write(
                "The state of the task cannot be restored, so the run resumes with a new episode "
                f"(see {envs.TASK_PAGE}#resume-a-run).",
                file=sys.stderr,
            )
            for i, observation in zip(fresh, self._upload(*fresh.values()), strict=True):
                self._observations[i] = observation
        self._rows = deque(
            (TensorDict(left["row"]).to(self.storage_device), left["ended"])
            for left in state.get("rows", ())
        )
        self.frames, self.returns = state["frames"], list(state["returns"])
        self.stream.load_state_dict(state["stream"])


def _without_tensordicts(policy: TensorDictModuleBase) -> Callable[[Tensor], Tensor]:
    """Returns the policy as a function of observations, which saves a third of its time."""
    if type(policy) is TensorDictModule and (policy.in_keys, policy.out_keys) == (
        ["observation"],
        ["action"],
    ):
        return policy.module
    return lambda observations: policy(TensorDict(observation=observations))["action"]


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Stacks tensors to a batch; returns a single one as it is, which is faster to act on."""
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors))


def _part(batch: Tensor, number: int) -> Sequence[Tensor]:
    """Splits a batch into the tensors that `_join` joined."""
    return [batch] if number == 1 else batch.unbind(0)


def _host_memory(size: int, device: torch.device) -> Tensor:
    """Returns float32 host memory, pinned for CUDA if possible, to be copied in the background."""
    try:
        return torch.empty(size, pin_memory=device.type == "cuda")
    except RuntimeError:  # the system pins no more memory: copies still work but may wait
        return torch.empty(size)
