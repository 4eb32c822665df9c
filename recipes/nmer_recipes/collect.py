"""Acting in the environments: the collectors of a run, and the one that acts frame by frame."""

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
        self.returns: list[float] = []  # of training episodes, of which there are none

    def __enter__(self) -> UpdateCounter:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def step(self) -> None:
        """Counts."""
        self.frames += 1

    def state_dict(self) -> dict[str, Any]:
        """What has been counted, and the generators of the updates."""
        return {"frames": self.frames, "stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.frames = state["frames"]
        self.stream.load_state_dict(state["stream"])


def make_collector(
    cfg: DictConfig,
    env: gymnasium.Env,
    policy: TensorDictModuleBase,
    make_copy: Callable[[], TensorDictModuleBase],
    seed: dict[str, int],
) -> FrameCollector | BatchCollector | UpdateCounter:
    """What `cfg.collector` describes; `make_copy` makes a policy like the one given, on the CPU."""
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
    """Acts in Gymnasium tasks by one frame, and can stop and go on within an episode.

    Several environments act in rounds: one call of the policy for all of them, then one step of
    each. Their rows are handed out one at a time, in the order of the environments, before the next
    round, so that a row is stored up to `len(envs) - 1` frames after the weights that it was acted
    by.

    TorchRL's `Collector` spends several milliseconds on a batch of one frame, its environments one
    of them, and its state leaves out the observation to act on next, without which a resumed run
    takes another path.

    Args:
        envs: The task, once or several times, with actions in [-1, 1].
        policy: What acts, with its exploration, after the random frames.
        seed: Of the first environment; the others have the numbers that follow.
        random_frames: Number of first frames with uniform actions, over all environments; a round
            that begins within them is random as a whole.
        stream: Where exploration draws from.
        device: Of the policy.
        storage_device: Of the rows; that of the policy unless given.
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
        self.ended: float | None = None  # the return of an episode that ended with the last frame
        self.returns: list[float] = []  # of episodes that ended since someone took them
        self._rows: deque[tuple[TensorDict, float | None]] = deque()  # to be handed out
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
        """Acts unless a row is left; returns the next transition, which has no batch dimension.

        A step that ends by the time limit is stored as not terminated, whatever else it was.
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
        chosen = action.cpu()  # the only wait of a round, for what the device has to do until here
        steps, ended = [], []
        for i, (env, taken) in enumerate(zip(self.envs, _part(chosen, len(seen)), strict=True)):
            after, reward, terminated, truncated, _ = env.step(taken.numpy())
            self.episode_returns[i] += float(reward)
            start, over = np.empty(0), terminated or truncated
            ended.append(self.episode_returns[i] if over else None)
            if over:
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
        """Copies vectors to where rows are stored as float32, at once and without waiting.

        They go through memory of the host that is used again by the next call. By then the device
        has read it, since an action was waited for in between.
        """
        widths = [len(array) for array in arrays]
        host = self._host[: sum(widths)]
        host.copy_(torch.from_numpy(np.concatenate(arrays)))
        return host.to(self.storage_device, non_blocking=True, copy=True).split(widths)

    def state_dict(self) -> dict[str, Any]:
        """Where the episodes stand, which rows are left, and what has been counted."""
        return {
            "envs": [envs.get_state(env) for env in self.envs],
            # Clones: alone, without what came with them.
            "observations": [observation.clone() for observation in self._observations],
            "episode_returns": list(self.episode_returns),
            "rows": [{"row": row.clone().to_dict(), "ended": end} for row, end in self._rows],
            "frames": self.frames,
            "returns": list(self.returns),
            "stream": self.stream.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there, in the middle of the episodes where these can be restored.

        The state of another collector has none of them.
        """
        if "env" in state:  # written before there could be several
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
                "The state of the task is not known, so the run goes on with a new episode "
                f"({envs.TASK_PAGE}#stop-and-go-on).",
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
    """Returns a policy as a function of observations, which saves a third of its time."""
    if type(policy) is TensorDictModule and (policy.in_keys, policy.out_keys) == (
        ["observation"],
        ["action"],
    ):
        return policy.module
    return lambda observations: policy(TensorDict(observation=observations))["action"]


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a batch of them; one alone as it is, which is acted on in less time."""
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors))


def _part(batch: Tensor, number: int) -> Sequence[Tensor]:
    """Returns what `_join` would join to this."""
    return [batch] if number == 1 else batch.unbind(0)


def _host_memory(size: int, device: torch.device) -> Tensor:
    """Returns float32 memory that CUDA can copy from in the background, where there is some."""
    try:
        return torch.empty(size, pin_memory=device.type == "cuda")
    except RuntimeError:  # the system lets no more be pinned: copies are right, and may wait
        return torch.empty(size)
