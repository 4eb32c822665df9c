"""recipes/on_manifold.py, and the rows that it collects."""

import csv

import pytest
import torch
from recipe_helpers import make_config, start
from tensordict import TensorDict

import on_manifold  # isort: skip
from nmer_recipes.errors import UsageError  # isort: skip
from benchmarks.experience import TrainingRun, collect  # isort: skip

pytestmark = pytest.mark.xdist_group("recipes_manifold")
SMALL = ["total_frames=300", "random_frames=200", "hidden=[8,8]", "stretch=20", "rows=60"]


def small_config(tmp_path, *overrides: str):
    return make_config("on_manifold", *SMALL, f"cache={tmp_path}", f"out={tmp_path}", *overrides)


def numbers(path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_run_compares_all_methods_at_all_sizes_and_draws_them(tmp_path, monkeypatch):
    arguments = ["env=Hopper", "sizes=[100,300]", "repeats=2", "out=out", "cache=cache", *SMALL]
    start("on_manifold", *arguments, cwd=tmp_path)
    rows = numbers(tmp_path / "out" / "Hopper.csv")
    methods = [*make_config("on_manifold").methods, "floor"]
    assert [(row["size"], row["method"]) for row in rows] == [
        (size, method) for size in ("100", "300") for method in methods
    ]
    for row in rows:
        unmixed = row["method"] == "floor"
        assert (float(row["state"]) < 1e-5) == (float(row["reward"]) < 1e-5) == unmixed
        assert (float(row["moved"]) == 0) == unmixed
        assert float(row["compared"]) > 0.3
        assert row["repeats"] == "2"
    table = (tmp_path / "out" / "Hopper.md").read_text().splitlines()
    assert len(table) == 2 + len(methods)
    assert (tmp_path / "out" / "Hopper.png").stat().st_size > 10_000
    monkeypatch.setattr(TrainingRun, "step", None)  # the rows are there already
    monkeypatch.chdir(tmp_path)
    on_manifold.run(make_config("on_manifold", *arguments))
    assert numbers(tmp_path / "out" / "Hopper.csv") == rows


def test_a_killed_collection_goes_on_number_for_number(tmp_path, monkeypatch):
    cfg = small_config(tmp_path, "env=Walker2d", "replay_ratio=1", "total_frames=240")
    whole = collect(cfg).clone()
    assert whole["next", "terminated"].any()
    (path,) = tmp_path.glob("*.pt")
    path.unlink()
    step = TrainingRun.step

    def killed(self):
        if self.frame == 230:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(TrainingRun, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        collect(cfg)
    monkeypatch.setattr(TrainingRun, "step", step)
    torch.randn(10)
    assert torch.load(path, weights_only=True)["frame"] == 216
    resumed = collect(cfg)
    assert (resumed == whole).all()


def test_rows_follow_one_another_and_hold_the_state(tmp_path):
    rows = collect(small_config(tmp_path, "env=HalfCheetah"))
    torch.testing.assert_close(rows["observation"][1:], rows["next", "observation"][:-1])
    torch.testing.assert_close(rows["observation"][:, :8], rows["qpos"][:, 1:])
    torch.testing.assert_close(rows["observation"][:, 8:], rows["qvel"])
    torch.testing.assert_close(rows["next", "observation"][:, 8:], rows["next", "qvel"])


def test_a_part_of_the_rows_is_made_of_stretches():
    rows = TensorDict(number=torch.arange(1_000), batch_size=[1_000])
    chosen = on_manifold.choose(rows, 250, 50, torch.Generator().manual_seed(0))["number"]
    assert len(chosen.unique()) == 250
    for stretch in chosen.split(50):
        assert (stretch.diff() == 1).all()
    assert chosen.max() - chosen.min() > 500


def test_tasks_without_joints_are_compared_too(tmp_path):
    cfg = small_config(tmp_path, "env=Pendulum", "sizes=[300]", "repeats=1")
    on_manifold.run(cfg)
    rows = {row["method"]: row for row in numbers(tmp_path / "Pendulum.csv")}
    assert float(rows["floor"]["state"]) < 1e-5
    assert float(rows["nmer_1"]["state"]) < float(rows["mixup"]["state"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sizes=[400]", "above total_frames=300"),
        ("rows=0", "rows=0 is not valid; give an integer, at least 1"),
        ("replay_ratio=-1", "replay_ratio=-1 is not valid; give a number, at least 0"),
        ("sizes=[]", "nothing to compare"),
        ("+methods.mixup.k=3", "methods.mixup: .* does not accept k=3"),
        ("+methods.new={kind: newest}", "methods.new: There is no replay method newest"),
        ("env.version=v0", "cannot be created"),
    ],
)
def test_values_that_no_run_could_use_are_refused(tmp_path, override, message):
    with pytest.raises(UsageError, match=message):
        on_manifold.check(small_config(tmp_path, "sizes=[100]", override))


def test_methods_that_cannot_be_compared_are_refused(tmp_path):
    def try_with(method: str) -> None:
        on_manifold.run(small_config(tmp_path, "sizes=[100]", "repeats=1", f"+methods.{method}"))

    with pytest.raises(UsageError, match=r"was changed by every method"):
        try_with("none={kind: uniform}")
    with pytest.raises(UsageError, match=r"methods.per draws other anchors"):
        try_with("per={kind: per}")


def test_methods_draw_the_same_anchors_and_weights(tmp_path):
    cfg = small_config(tmp_path, "env=HalfCheetah")
    rows = collect(cfg)
    draws = {
        name: on_manifold.draw(dict(method), rows, 50, seed=3)
        for name, method in cfg.methods.items()
    }
    others = ("noisy", "neighborhood", "gp")  # those without weights, and with one for each row
    weights = [
        batch["state_weight" if name == "s4rl" else "mixup_weight"]
        for name, (batch, _) in draws.items()
        if name not in others
    ]
    for weight in weights:
        assert ((weight == weights[0]) | (weight == 1)).all()
    assert torch.equal(draws["neighborhood"][0]["mixup_weight"], draws["gp"][0]["mixup_weight"])
    for _, anchors in draws.values():
        assert (anchors == draws["ct"][1]).all()
