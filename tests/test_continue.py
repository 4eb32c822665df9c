"""Runs that go on by the name of their directory, to where they were to end or further."""

import json

import pytest
from recipe_helpers import train


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("td3", ["replay=uniform"]), ("td3", ["replay=nmer"]), ("td3", ["replay=per"]), ("sac", ["replay=per_nmer"]), ("sac", ["replay=ct"]), ("td3", ["replay=ero"]),
    ("td3", ["replay=nmer", "storage=memmap"]),
    ("td3", ["replay=tuned_ct"]), ("td3", ["replay=noisy"]), ("td3", ["replay=gp"]), ("td3", ["replay=nmer", "replay.metric=product"]), ("td3", ["replay=nmer", "buffer_size=60"])
    ],
)
def test_a_complete_run_is_taken_further_number_for_number(recipe, options, tmp_path):
    options = [*options, "random_frames=20"]
    whole = train(recipe, tmp_path / "whole", *options, "total_frames=72")
    part = tmp_path / "part"
    assert train(recipe, part, *options) == whole[:2]
    rows = train(recipe, part, *options, "total_frames=72", f"resume={part}")
    assert rows == whole
    assert json.loads((part / "summary.json").read_text())["frames"] == 72
