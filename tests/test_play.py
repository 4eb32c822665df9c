"""What a run has learned: its policies are loaded, played, filmed and exported."""

import gc
import os
import pickle
import re
import shutil
import warnings

import imageio.v3
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from recipe_helpers import ALGORITHMS, make_config, train

import play  # isort: skip
from nmer_recipes import policy as policies, video  # isort: skip
from nmer_recipes.envs import frame_rate, make_env  # isort: skip
from nmer_recipes.errors import UsageError  # isort: skip
from nmer_recipes.policy import load_policy  # isort: skip
from nmer_recipes.video import make_filmed  # isort: skip

FIRST = 10_000  # seed of the first episode of every evaluation


@pytest.fixture(scope="module", params=ALGORITHMS)
def run(request, tmp_path_factory):
    """Provides a complete run and its rows of metrics."""
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


# -- several runs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Provides two runs of one task with different replay methods."""
    folder = tmp_path_factory.mktemp("pair")
    for seed, method in enumerate(("uniform", "nmer")):
        task = ["env=InvertedDoublePendulum", f"seed={seed}"]
        train("td3", folder / method, *task, f"replay={method}")
    return [str(folder / "uniform"), str(folder / "nmer")]


def change_config(run, directory, old, new):
    """Copies a run and changes a line of its config."""
    shutil.copytree(run, directory)
    text = (directory / "config.yaml").read_text()
    assert old in text
    (directory / "config.yaml").write_text(text.replace(old, new))
    return str(directory)


def read_film(path):
    """Returns the pictures of a video `[n, height, width, 3]`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # imageio-ffmpeg leaves its pipes open
        pictures = imageio.v3.imread(path)
        gc.collect()
    return pictures


def captions_of(monkeypatch):
    """Records the captions that are drawn."""
    texts, draw = [], play.add_caption
    monkeypatch.setattr(play, "add_caption", lambda p, text: texts.append(text) or draw(p, text))
    return texts


def test_several_runs_are_played_as_each_alone(pair, capsys):
    told = []
    for runs in (pair, pair[:1], pair[1:]):
        play.main([*runs, "--episodes", "3", "--seed", "4"])
        told.append(capsys.readouterr().out)
    assert told[0] == f"{told[1]}\n{told[2]}"
    assert told[1].splitlines()[1:] != told[2].splitlines()[1:]


@pytest.mark.parametrize("ending", ["mp4", "gif"])
def test_several_runs_are_filmed_side_by_side(pair, ending, tmp_path, capsys, monkeypatch):
    texts, film = captions_of(monkeypatch), tmp_path / f"film.{ending}"
    play.main([*pair, "--episodes", "1", "--video", str(film)])
    told = capsys.readouterr().out
    rows = re.findall(r"^\| 0 \| (.*) \| (\d+) \|$", told, re.MULTILINE)
    returns, steps = [float(row[0]) for row in rows], [int(row[1]) for row in rows]
    assert told.endswith(f"Wrote {film}\n")
    pictures = read_film(film)
    assert pictures.shape == (max(steps), 240, 480, 3)  # InvertedDoublePendulum takes 20 a second
    assert [text.split("\n")[0] for text in texts] == ["uniform"] * steps[0] + ["nmer"] * steps[1]
    for number, at in enumerate((steps[0] - 1, steps[0] + steps[1] - 1)):
        assert texts[at].endswith(f"\nreturn so far: {returns[number]:.0f}")


def test_captions_of_one_method_name_the_seed(pair, tmp_path, monkeypatch):
    texts = captions_of(monkeypatch)
    other = change_config(pair[1], tmp_path / "other", "seed: 1", "seed: 7")
    film = str(tmp_path / "film.gif")
    play.main([pair[1], other, "--episodes", "1", "--video", film, "--seconds", "0.05"])
    assert [text.split("\n")[0] for text in texts] == ["nmer, seed 1", "nmer, seed 7"]


def test_a_caption_is_drawn_into_the_upper_corner():
    picture = np.full((480, 640, 3), 128, dtype=np.uint8)
    first, second = (video.add_caption(picture, text) for text in ("uniform", "nmer"))
    assert first.shape == (240, 320, 3)
    assert (first[:40, :160] == 255).any()
    assert (first[:40, :160] != second[:40, :160]).any()
    assert (first[60:] == 128).all()
    assert video.add_caption(picture[:, :335], "nmer").shape == (240, 168, 3)  # even


def make_film(*shades):
    return [np.full((240, 240, 3), shade, dtype=np.uint8) for shade in shades]


@pytest.mark.parametrize("name", ["film.mp4", "film.gif", "FILM.GIF"])
def test_a_film_that_ends_early_keeps_its_last_picture(name, tmp_path):
    video.write_clip(tmp_path / name, [make_film(0, 60), make_film(240, 180, 120, 0)], rate=10)
    pictures = read_film(tmp_path / name).astype(int)
    shades = pictures[:, 120, [120, 360], 0]
    expected = np.array([[0, 240], [60, 180], [60, 120], [60, 0]])
    np.testing.assert_allclose(shades, expected, atol=4)  # mp4 is not exact


@pytest.mark.parametrize(("rate", "pictures", "pause"), [(20, 12, 50), (40, 6, 50), (50, 4, 60)])
def test_a_gif_shows_at_most_twenty_pictures_a_second(rate, pictures, pause, tmp_path):
    film = tmp_path / "film.gif"
    video.write_clip(film, [make_film(*range(0, 240, 20))], rate)
    with Image.open(film) as gif:
        assert (gif.n_frames, gif.info["duration"]) == (pictures, pause)
        assert gif.info["loop"] == 0  # without end


def test_the_rate_of_a_control_suite_task_is_real_time():
    pytest.importorskip("shimmy")
    cfg = OmegaConf.create({"id": "dm_control/walker-walk-v0"})
    with make_env(cfg, rescale=False) as env:
        assert frame_rate(env) == pytest.approx(40)  # steps of 25 ms
    with make_env(OmegaConf.create({"id": "HalfCheetah-v5"}), rescale=False) as env:
        assert frame_rate(env) == 20


def test_the_camera_follows_a_control_suite_task():
    pytest.importorskip("shimmy")
    with make_filmed(OmegaConf.create({"id": "dm_control/walker-walk-v0"})) as env:
        physics, columns = env.unwrapped._env.physics, []
        for camera in (-1, env.unwrapped.render_kwargs["camera_id"]):  # the default, and ours
            env.unwrapped.render_kwargs = {"camera_id": camera}
            for place in (0.0, 1.0):
                env.reset(seed=0)
                physics.named.data.qpos["rootx"] = place
                physics.forward()
                picture = env.render().astype(int)
                orange = picture[..., 0] - picture[..., 2] > 60  # the walker
                columns.append(orange.any(0).nonzero()[0].mean())
    assert columns[1] - columns[0] > 30
    assert columns[3] == pytest.approx(columns[2], abs=2)


def test_seconds_shorten_the_video_of_one_run(pair, tmp_path, monkeypatch):
    texts, film = captions_of(monkeypatch), str(tmp_path / "film.mp4")
    play.main([pair[0], "--episodes", "1", "--video", film, "--seconds", "0.1"])
    assert read_film(film).shape == (2, 480, 480, 3)
    assert texts == []


WRONG = {
    "film.avi does not end in .mp4 or .gif; rename it": ["--video", "film.avi"],
    "film does not end in .mp4 or .gif; rename it": ["--video", "film"],
    "there is no directory missing; create it": ["--video", "missing/film.gif"],
    "--seconds 0 is out of range; give a number above 0": ["--video", "film.gif", "--seconds", "0"],
    "--seconds needs --video": ["--seconds", "8"],
    "--export writes a single policy, but 2 runs were given": ["--export", "policy.pt2"],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_are_refused_before_playing(message, pair, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(play, "load_policy")
    with pytest.raises(SystemExit):
        play.main([*pair, *WRONG[message]])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("id: InvertedDoublePendulum-v5", "id: Hopper-v5", "env.id=Hopper-v5;"),
        ("max_steps: null", "max_steps: 5", "env.id=InvertedDoublePendulum-v5 env.max_steps=5;"),
    ],
)
def test_runs_of_different_tasks_are_refused(old, new, named, pair, monkeypatch, tmp_path):
    monkeypatch.delattr(play, "play_episode")
    other = change_config(pair[1], tmp_path / "other", old, new)
    told = f"but {other} has {named} give runs of the same task, or play each one alone"
    with pytest.raises(SystemExit, match=re.escape(told)):
        play.main([*pair, other])


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
