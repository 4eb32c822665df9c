"""Runs that are resumed by the name of their directory, to their end or further."""

import json
import os
import shlex
import signal
from pathlib import Path

import pytest
import yaml
from recipe_helpers import TINY, metrics, start, train, train_and_kill, without_times
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nmer_recipes.directories import name_directory, read_config  # isort: skip
from nmer_recipes.errors import UsageError  # isort: skip
from nmer_recipes.files import DirectoryLock  # isort: skip
from nmer_recipes.runs import Run  # isort: skip

NAME = "env=a,replay=b"  # as in a sweep


@pytest.mark.parametrize(
    ("recipe", "options", "first"),
    [
        ("td3", ["replay=uniform"], train),
        ("td3", ["replay=nmer", "storage=memmap"], train_and_kill),
        ("sac", ["replay=per_nmer"], train),
        ("sac", ["replay=ct"], train_and_kill),
    ],
)
def test_a_run_is_taken_further_number_for_number(recipe, options, first, tmp_path):
    options = [*options, "random_frames=20"]
    whole = train(recipe, tmp_path / "whole", *options, "total_frames=72")
    part = tmp_path / "part"
    first(recipe, part, *options)
    start(recipe, f"resume={part}", "total_frames=72", cwd=tmp_path)
    assert without_times(metrics(part)) == whole
    assert len({row["train/loss_qvalue"] for row in whole}) == 3
    assert json.loads((part / "summary.json").read_text())["frames"] == 72
    assert yaml.safe_load((part / "config.yaml").read_text())["total_frames"] == 72


def test_arguments_of_the_task_that_are_new_are_refused(tmp_path):
    train_and_kill("td3", tmp_path / "run")
    with pytest.raises(UsageError, match=r"env.kwargs.frame_skip=nothing \(1 was given\)"):
        train("td3", tmp_path / "run", "resume=auto", "env.kwargs.frame_skip=1")


def test_a_directory_belongs_to_one_run_at_a_time(tmp_path):
    train_and_kill("td3", tmp_path / "run")
    lock = DirectoryLock(tmp_path / "run")
    with pytest.raises(UsageError, match=r"Another run uses .*run; wait"):
        train("td3", tmp_path / "run", "resume=auto")
    assert DirectoryLock.is_held(tmp_path / "run")
    lock.release()
    assert not DirectoryLock.is_held(tmp_path / "run")
    train("td3", tmp_path / "run", "resume=auto")


def test_resuming_by_config_passes_over_a_run_that_is_running(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["run_dir=null", "name=one"]
    train_and_kill("td3", tmp_path, *options)
    (first,) = (tmp_path / "runs" / "one").iterdir()
    lock = DirectoryLock(first)
    with pytest.raises(FileNotFoundError):  # the helper does not know the directory
        train("td3", tmp_path, *options, "resume=auto")
    assert len(list((tmp_path / "runs" / "one").iterdir())) == 2
    lock.release()


@pytest.mark.parametrize("replay", ["nmer", "noisy"])
def test_few_updates_per_frame_are_described_alike_after_resuming(replay, tmp_path):
    options = [f"replay={replay}", "replay_ratio=0.1", "random_frames=10", "eval_every=4"]
    whole = train("td3", tmp_path / "whole", *options)
    train_and_kill("td3", tmp_path / "part", *options)
    assert train("td3", tmp_path / "part", *options, "resume=auto") == whole
    drawn = [row["replay/neighbor_distance"] for row in whole]
    assert bool(drawn[-1]) == (replay == "nmer")


def test_times_of_the_first_row_after_resuming_count_what_was_before(tmp_path):
    """A run that was killed halfway between two rows has spent half of the frames before."""
    train_and_kill("sac", tmp_path / "run", "eval_every=48", "random_frames=10")
    train("sac", tmp_path / "run", "eval_every=48", "random_frames=10", "resume=auto")
    (row,) = metrics(tmp_path / "run")
    seconds = 48 / float(row["time/frames_per_second"])
    assert seconds == pytest.approx(float(row["time/seconds"]), rel=0.2)
    parts = ("environment", "upkeep", "sample", "update", "evaluation")
    shares = [float(row[f"time/share_{part}"]) for part in parts]
    assert all(share > 0 for share in shares)
    assert sum(shares) < 1


@pytest.mark.parametrize(("algorithm", "interval"), [("td3", 2), ("sac", None)])
def test_runs_from_before_target_interval_keep_their_targets(algorithm, interval, tmp_path):
    (tmp_path / "config.yaml").write_text(f"algorithm: {algorithm}\nhidden: [8]\n")
    assert read_config(tmp_path).get("target_interval") == interval
    (tmp_path / "config.yaml").write_text("algorithm: td3\ntarget_interval: 1\n")
    assert read_config(tmp_path)["target_interval"] == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds the complete run NAME."""
    folder = tmp_path_factory.mktemp("runs")
    options = ["replay=per_nmer", "replay.k=3", "compile=auto", "target_entropy=null"]
    start("sac", *TINY, *options, f'run_dir="{NAME}"', cwd=folder)
    return folder


def test_the_config_of_a_run_has_what_it_used(folder):
    config = yaml.safe_load((folder / NAME / "config.yaml").read_text())
    assert (config["replay"]["search"], config["replay"]["k"]) == ("graph", 3)
    assert (config["compile"], config["target_entropy"]) == (False, -1.0)
    (source,) = json.loads((folder / NAME / "summary.json").read_text())["sources"]
    assert all(source[name] for name in ("version", "commit", "processor", "platform", "python"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"is complete; .* give 'resume=\S*' and a total_frames above 48"),
        (["total_frames=72", "gamma=0.9"], r"another config: gamma=0\.99 \(0\.9 was given\)\."),
        (
            ["total_frames=72", "replay=nmer"],
            r"another config: replay\.kind=per_nmer \(nmer was given\)\.",
        ),
        (["total_frames=44"], r"another config: total_frames=48 \(44 was given\)\."),
    ],
)
def test_what_is_given_beside_a_run_must_agree_with_it(words, message, folder):
    with pytest.raises(SystemExit, match=message):
        start("sac", f'resume="{NAME}"', *words, cwd=folder)
    assert (folder / NAME / "summary.json").exists()


def test_a_directory_without_a_run_and_a_run_of_another_recipe_are_refused(folder):
    with pytest.raises(SystemExit, match=r"nowhere has no config\.yaml"):
        start("td3", "resume=nowhere", cwd=folder)
    with pytest.raises(SystemExit, match=r"holds a run of sac, but td3\.py"):
        start("td3", f'resume="{NAME}"', cwd=folder)


def test_another_logger_receives_the_rows_so_far(folder, capsys):
    same = ["replay=per_nmer", "seed=0"]  # as the run has them; its k stays
    words = [*same, "total_frames=60", "eval_every=24", "logger=tensorboard"]
    start("sac", f'resume="{NAME}"', *words, cwd=folder)
    assert f"resumes in {NAME} after frame 48 of 60" in capsys.readouterr().err
    events = EventAccumulator(str(folder / NAME)).Reload()
    assert [event.step for event in events.Scalars("eval/return")] == [24, 48]
    assert yaml.safe_load((folder / NAME / "config.yaml").read_text())["replay"]["k"] == 3


def test_ctrl_c_in_a_sweep_prints_a_command_that_runs(tmp_path, monkeypatch, capsys):
    sweep = ["-m", *TINY, "replay=uniform", "seed=0,1"]
    count = Run.count

    def interrupt(self, frame):
        count(self, frame)
        if frame == 20:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "count", interrupt)
        with pytest.raises(SystemExit) as ended:
            start("td3", *sweep, cwd=tmp_path)
    assert ended.value.code == 130
    told = capsys.readouterr().err
    assert "To resume the sweep, run its command again." in told
    _, script, word = shlex.split(told.split("To resume: ")[1].splitlines()[0])
    start(Path(script).stem, word, cwd=tmp_path)
    assert "after frame 20 of 48" in capsys.readouterr().err
    (done,) = tmp_path.glob("runs/td3/*/summary.json")
    before = done.stat().st_mtime_ns
    start("td3", *sweep, cwd=tmp_path)
    assert len(list(tmp_path.glob("runs/td3/*/summary.json"))) == 2
    assert done.stat().st_mtime_ns == before


def test_directories_of_a_sweep_are_short_and_apart():
    results = Path(__file__).parents[1] / "docs" / "results"
    plain = [path.parent.name for path in results.glob("*/*/config.yaml")]
    assert len(plain) > 50
    assert [name_directory(name, "td3") for name in plain] == plain
    long = ",".join(f"setting_{n}=a/value" for n in range(30))
    texts = ["env.id=ALE/Arm-v5", "env.id=ALE-Arm-v5", long, long + "s", "é" * 150]
    names = [name_directory(text, "td3-Arm-nmer-seed0") for text in texts]
    assert len(set(names)) == len(texts)
    for name in names:
        assert len(name.encode()) <= 255
        assert "/" not in name
    assert names[0].startswith("td3-Arm-nmer-seed0,env.id=ALE-Arm-v5-")
    assert names[1] == texts[1]


def test_a_run_from_before_a_setting_goes_on_and_keeps_to_what_it_was(tmp_path):
    train_and_kill("td3", tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    cfg = yaml.safe_load(file.read_text())
    assert (cfg.pop("layer_norm"), cfg.pop("critic_hidden")) == (False, [8, 8])
    file.write_text(yaml.safe_dump(cfg))
    for given in ("layer_norm=true", "critic_hidden=[9,9]"):
        with pytest.raises(SystemExit, match=f"another config: {given[:6]}"):
            start("td3", "resume=run", given, cwd=tmp_path)
    start("td3", "resume=run", cwd=tmp_path)
    assert without_times(metrics(tmp_path / "run")) == train("td3", tmp_path / "whole")


@pytest.mark.parametrize("recipe", ["td3", "ddpg"])
def test_a_run_from_before_precision_goes_on_in_float32(recipe, tmp_path):
    train_and_kill(recipe, tmp_path / "run", "random_frames=20")
    file = tmp_path / "run" / "config.yaml"
    cfg = yaml.safe_load(file.read_text())
    assert cfg.pop("precision") == "float32"
    file.write_text(yaml.safe_dump(cfg))
    with pytest.raises(SystemExit, match=r"another config: precision=float32 \(bf16 was given\)"):
        start(recipe, "resume=run", "precision=bf16", cwd=tmp_path)
    start(recipe, "resume=run", cwd=tmp_path)
    whole = train(recipe, tmp_path / "whole", "random_frames=20")
    assert without_times(metrics(tmp_path / "run")) == whole
