"""Experience replay optimization."""

from __future__ import annotations

from dataclasses import dataclass

from nmer_torchrl.methods.groups import Keyed
from nmer_torchrl.samplers import ReplayOptimizationSampler


@dataclass(frozen=True, kw_only=True)
class ERO(Keyed[ReplayOptimizationSampler]):
    """Draws rows uniformly among those that a learned policy keeps.

    A network scores each row by reward, TD error and age, and keeps it with that probability (see
    `ReplayOptimizationSampler`). TD errors are passed by `buffer.update_priority(index, error)`.
    Call `buffer.sampler.finish_episode` at the end of each episode.

    The options are those of `Keyed`.

    Source: D. Zha et al., *Experience replay optimization*, IJCAI, 2019.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> buffer = make_replay_buffer(ERO(), capacity=1_000, batch_size=32)
        >>> buffer.sampler.reward_key
        ('next', 'reward')
    """

    def __post_init__(self) -> None:
        """Raises an error unless the keys contain exactly one reward."""
        super().__post_init__()
        rewards = self.roles.rewards
        if len(rewards) != 1:
            raise ValueError(
                f"The method 'ero' scores rows by one reward, but `value_keys` names {rewards} "
                "besides next observations; name exactly one reward."
            )

    def make_sampler(self, capacity: int) -> ReplayOptimizationSampler:
        """Builds the sampler, which contains the policy."""
        return ReplayOptimizationSampler(reward_key=self.roles.rewards[0])
