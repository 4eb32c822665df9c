"""The recipes on CUDA: on a real device if there is one, else on a simulated one."""

import json
from contextlib import nullcontext

import pytest
import torch
from recipe_helpers import ALGORITHMS, train, train_and_kill

import counts  # isort: skip

from nmer_torchrl.methods import METHODS, option_names

# Copies to the host of a frame with one update: the action, and what a method cannot do without.
COPIES = {
    "per": 3,  # random numbers and TD errors, to priorities on the CPU
    "per_nmer": 4,  # the same, and partners
}


def waits(method: str) -> dict[str, int]:
    """Returns how often a frame waits for the device. KeOps waits for its own reduction."""
    searches = "search" in option_names(METHODS[method])
    return {"to_host": COPIES.get(method, 1)} | ({"keops": 1} if searches else {})


# Every method with two agents, and every agent with the methods that differ in what a batch holds.
PAIRS = [(recipe, method) for recipe in ("sac", "td3") for method in METHODS]
PAIRS += [(recipe, method) for recipe in ALGORITHMS for method in ("uniform", "nmer", "per_nmer")]


@pytest.mark.parametrize(("recipe", "method"), dict.fromkeys(PAIRS))
def test_every_method_trains_on_cuda_and_waits_as_seldom_as_can_be(recipe, method, cuda, tmp_path):
    few = ["total_frames=24", "random_frames=20", "eval_every=24"]
    with nullcontext() if cuda is None else counts.watch_frames(cuda) as frames:
        rows = train(recipe, tmp_path / "run", "device=cuda:0", f"replay={method}", *few)
    if cuda is not None:
        usual = frames[22]  # after the first updates, within an episode
        assert usual.pop("sent") >= 1  # the row of the environment
        assert usual == waits(method), "mend the method, or say what it needs in COPIES"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["frames"], summary["updates"]) == (24, 4)
    assert len(rows) == 1


@pytest.mark.parametrize("recipe", ALGORITHMS)
def test_a_run_on_cuda_is_killed_and_goes_on_as_if_nothing_had_happened(recipe, cuda, tmp_path):
    whole = train(recipe, tmp_path / "whole", "device=cuda:0")
    train_and_kill(recipe, tmp_path / "killed", "device=cuda:0")
    assert train(recipe, tmp_path / "killed", "device=cuda:0", "resume=auto") == whole


@pytest.mark.parametrize(("first", "then"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
@pytest.mark.parametrize("recipe", ALGORITHMS)
def test_a_run_goes_on_on_the_other_device(recipe, first, then, cuda, tmp_path):
    train_and_kill(recipe, tmp_path / "run", f"device={first}")
    rows = train(recipe, tmp_path / "run", f"device={then}", "resume=auto")
    assert [row["frames"] for row in rows] == ["24", "48"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real device has numbers of its own")
@pytest.mark.parametrize("method", ["uniform", "nmer"])
@pytest.mark.parametrize("recipe", ALGORITHMS)
def test_the_curve_on_the_pretended_device_is_that_of_the_cpu(recipe, method, cuda, tmp_path):
    task = [f"replay={method}", "total_frames=64", "eval_every=8"]
    task += ["replay.search=torch"] if method == "nmer" else []
    there = train(recipe, tmp_path / "there", "device=cuda:0", *task)
    here = train(recipe, tmp_path / "here", "device=cpu", *task)
    assert there == here
    assert len({row["train/loss_qvalue"] for row in here}) > 2
