"""Times a training loop of Stable-Baselines3 or SBX; `loops.py` runs it.

    python recipes/benchmarks/peers.py sbx TD3 --ratio 20 --frames 75 --first 10

It imports nothing from this project, so that the other library can have its own environment.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from typing import Any

# JAX would use every core for a matrix product.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def time_peer(
    package: str, name: str, *, ratio: int, frames: int, first: int, batch: int, hidden: list[int]
) -> float:
    """Returns the seconds per update of an agent on HalfCheetah-v5.

    Args:
        package: The library, `stable_baselines3` or `sbx`.
        name: The agent's class in the library.
        ratio: Number of updates after each frame.
        frames: Number of timed frames, after as many untimed ones.
        first: Number of frames with updates before the timed ones.
        batch: Batch size.
        hidden: Units of the layers of all networks.
    """
    import gymnasium
    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    torch.set_num_threads(1)
    times: dict[int, float] = {}

    class Watch(BaseCallback):  # type: ignore[misc]
        def _on_step(self) -> bool:
            times[self.num_timesteps] = time.perf_counter()
            return True

    options: dict[str, Any] = {} if package == "sbx" else {"device": "cpu"}
    model = getattr(importlib.import_module(package), name)(
        "MlpPolicy",
        gymnasium.make("HalfCheetah-v5"),
        buffer_size=2 * frames,
        learning_starts=frames - first,
        batch_size=batch,
        train_freq=1,
        gradient_steps=ratio,
        policy_kwargs={"net_arch": hidden},
        **options,
    )
    model.learn(2 * frames + 1, callback=Watch())
    return (times[2 * frames + 1] - times[frames + 1]) / (frames * ratio)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = " (default: %(default)s)"
    add = parser.add_argument
    add("package", choices=["stable_baselines3", "sbx"], help="library to time")
    add("name", help="class of the agent, such as TD3 or SAC")
    add("--ratio", type=int, default=1, help=f"updates per frame{default}")
    add("--frames", type=int, default=1_500, help=f"frames to time{default}")
    add("--first", type=int, default=200, help=f"frames before the clock starts{default}")
    add("--batch", type=int, default=256, help=f"batch size{default}")
    add("--hidden", type=int, nargs="+", default=[256, 256], help=f"units per layer{default}")
    print(time_peer(**vars(parser.parse_args())))
