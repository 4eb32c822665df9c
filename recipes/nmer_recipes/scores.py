"""What runs and reports tell alike."""

WINDOW = 11  # evaluations whose mean is the score


def duration(seconds: float) -> str:
    """Seconds in words, such as "12 min"."""
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 2:
        return f"{hours:.0f} h"
    return f"{minutes:.0f} min" if minutes >= 2 else f"{seconds:.0f} s"
