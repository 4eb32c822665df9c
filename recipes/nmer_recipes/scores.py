"""Defines how runs and reports score and print durations."""

WINDOW = 11  # number of evaluations that the score averages


def duration(seconds: float) -> str:
    """Formats seconds in words, such as "12 min"."""
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 2:
        return f"{hours:.0f} h"
    return f"{minutes:.0f} min" if minutes >= 2 else f"{seconds:.0f} s"


# Returns of a random and of an expert policy, which D4RL (Fu et al., 2020) uses to normalize the
# returns of its version 2 tasks. Ours are later versions of the same tasks.
REFERENCES = {
    "Ant": (-325.6, 3879.7),
    "HalfCheetah": (-280.178953, 12135.0),
    "Hopper": (-20.272305, 3234.3),
    "Walker2d": (1.629008, 4592.3),
}


def normalize(task: str, mean_return: float) -> dict[str, float]:
    """Returns the normalized return of a task by its column; empty without a reference.

    It is 0 for a random policy and 100 for an expert.
    """
    if task not in REFERENCES:
        return {}
    low, high = REFERENCES[task]
    return {"eval/normalized": 100 * (mean_return - low) / (high - low)}
