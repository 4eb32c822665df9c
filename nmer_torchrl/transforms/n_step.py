"""What a fold asks of TorchRL's `MultiStepTransform` beside it."""

from __future__ import annotations

from tensordict import NestedKey, unravel_key
from torchrl.envs.transforms import MultiStepTransform, Transform

from nmer_torchrl import _compat


def check_n_step(fold: Transform, terminated_key: NestedKey) -> None:
    """Raises if rows of the buffer's n-step transform would not tell which of them are terminal."""
    for transform in _compat.transforms_beside(fold):
        if not isinstance(transform, MultiStepTransform):
            continue
        if transform.n_steps == 1:
            raise ValueError(
                "MultiStepTransform(n_steps=1) leaves all rows as they are, but marks each as the "
                "end of an episode, so that none would be mixed; leave the transform out."
            )
        others = [k for k in transform.done_keys if unravel_key(("next", k)) != terminated_key]
        if len(others) < len(transform.done_keys):
            raise ValueError(
                f"MultiStepTransform(done_keys={transform.done_keys}) leaves {terminated_key!r} as "
                "that of the first of its steps, so that rows which lead to a terminal state would "
                "be mixed; make it that of the last step by "
                f"MultiStepTransform(..., done_keys={others})."
            )
