"""What a run has learned: its policies, loaded, played, filmed and exported."""

import os
import pickle

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from recipe_helpers import ALGORITHMS, make_config, train

import play  # isort: skip
from nmer_recipes import policy as policies, video  # isort: skip
from nmer_recipes.envs import make_env  # isort: skip
from nmer_recipes.errors import UsageError  # isort: skip
from nmer_recipes.policy import load_policy  # isort: skip

FIRST = 10_000  # seed of the first episode of every evaluation


@pytest.fixture(scope="module", params=ALGORITHMS)
def run(request, tmp_path_factory):
    """A complete run and its rows of metrics."""
    directory = tmp_path_factory.mktemp("play") / request.param
    task = ["env=InvertedDoublePendulum", "eval_episodes=2", "eval_every=6"]
    rows = train(request.param, directory, *task)
    return directory, rows


def mean_return(policy, episodes=2):
    with make_env(policy.cfg.env, rescale=False) as env:
        played = [play.play_episode(policy, env, FIRST + i) for i in range(episodes)]
    return np.mean([sum(rewards) for rewards in played])


def test_a_loaded_policy_has_the_return_of_its_evaluation(run):
    directory, rows = run
    last, best = load_policy(directory, "last"), load_policy(directory)
    returns = [float(row["eval/return"]) for row in rows]
    assert len(set(returns)) > 1
    assert (last.frames, last.mean_return) == (int(rows[-1]["frames"]), returns[-1])
    assert best.mean_return == max(returns)
    for each in (last, best):
        assert mean_return(each) == pytest.approx(each.mean_return)


def test_one_observation_or_several(run):
    policy = load_policy(run[0])
    several = np.random.default_rng(0).normal(size=(50, 9))
    actions = policy.act(several)
    assert (actions.shape, actions.dtype) == ((50, 1), np.float32)
    np.testing.assert_allclose(actions[3], policy.act(several[3]), rtol=1e-5)
    with pytest.raises(ValueError, match=r"shape \(5,\), but the policy takes \[9\] or \[B, 9\]"):
        policy.act(np.zeros(5))


def test_playing_tells_films_and_exports(run, tmp_path, capsys):
    film, program = tmp_path / "film.mp4", tmp_path / "policy.pt2"
    words = [str(run[0]), "--episodes", "2", "--seed", "10000", "--which", "last"]
    play.main([*words, "--video", str(film), "--export", str(program)])
    told = capsys.readouterr().out
    assert f"| mean ± std | {float(run[1][-1]['eval/return']):.1f} ±" in told
    assert f"last policy, after {run[1][-1]['frames']} frames" in told
    assert film.stat().st_size > 1_000
    observation = torch.randn(7, 9)
    exported = torch.export.load(program).module()(observation)
    torch.testing.assert_close(exported, load_policy(run[0], "last")(observation))


def test_a_policy_from_elsewhere_executes_nothing(run, tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.yaml").write_text((run[0] / "config.yaml").read_text())
    (directory / "policy_best.pt").write_bytes(pickle.dumps(Payload(), protocol=2))
    with pytest.raises(UsageError, match=r"cannot be read as a checkpoint.*give another run"):
        load_policy(directory)
    assert not (tmp_path / "executed").exists()


def test_what_is_no_run_is_told(tmp_path):
    with pytest.raises(SystemExit, match=r"play.py: .* has no policy_best.pt; give the dir"):
        play.main([str(tmp_path)])
    with pytest.raises(UsageError, match="which='newest' is not valid; give 'best' or 'last'"):
        load_policy(tmp_path, "newest")


def test_a_task_that_cannot_be_filmed_is_refused_before_it_trains():
    cfg = make_config("td3", "env=Pendulum", "video=true")
    OmegaConf.resolve(cfg)
    with pytest.raises(UsageError, match=r"Pendulum-v1 cannot be filmed: .*; leave the video out"):
        video.check_video(cfg)


def test_files_are_named_by_what_they_hold(tmp_path):
    names = [policies.policy_file(tmp_path, which).name for which in policies.WHICH]
    assert names == ["policy_best.pt", "policy_last.pt"]
