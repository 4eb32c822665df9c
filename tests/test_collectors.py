"""Collectors that return rows of several environments, in this process and in others."""

import math
from dataclasses import dataclass

import pytest
import torch
from recipe_helpers import TINY, make_config, train, train_and_kill
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torchrl.data import RandomSampler
from torchrl.envs.transforms import MultiStepTransform

from nmer_recipes import batches, config  # isort: skip
from nmer_recipes.collect import FrameCollector, make_collector  # isort: skip
from nmer_recipes.envs import make_env  # isort: skip
from nmer_recipes.replay import make_buffer  # isort: skip
from nmer_recipes.reporting.read import read_directory  # isort: skip
from nmer_recipes.seeding import Stream, seeds  # isort: skip
from nmer_torchrl import Method, make_replay_buffer

CPU = torch.device("cpu")
BATCHES = ["collector=torchrl", "collector.frames_per_batch=8"]
PROCESSES = ["collector=multiprocess", "collector.frames_per_batch=8"]


class Acts(TensorDictModuleBase):
    """Repeats recorded actions, or always returns the same one."""

    in_keys, out_keys = ["observation"], ["action"]

    def __init__(self, actions=None):
        super().__init__()
        self.actions = None if actions is None else iter(actions)

    def forward(self, tensordict):
        shape = (*tensordict["observation"].shape[:-1], 1)
        action = torch.zeros(shape) if self.actions is None else next(self.actions)
        return tensordict.set("action", action)


def make(*overrides: str):
    """Builds a collector as a recipe does."""
    import td3

    cfg = make_config("td3", *TINY, "device=cpu", *overrides)
    env = make_env(cfg.env)
    sizes = env.observation_space.shape[0], env.action_space.shape[0]
    make_policy = lambda: td3.make_agent(cfg, *sizes, CPU)[1]  # noqa: E731
    return make_collector(cfg, env, make_policy(), make_policy, seeds(0))


def make_local(cfg, policy, *, seed=0, random_frames=0):
    tasks = [make_env(cfg) for _ in range(cfg.count)]
    stream = Stream(0, CPU)
    return FrameCollector(
        tasks, policy, seed=seed, random_frames=random_frames, stream=stream, device=CPU
    )


def take(collector, rows: int) -> TensorDict:
    return torch.stack([collector.step() for _ in range(rows)])


def assert_counts(rows):
    """Checks the frames, updates and rows of a run with `TINY`, with any collector."""
    assert [row["frames"] for row in rows] == ["24", "48"]
    assert [row["train/updates"] for row in rows] == ["0", "8"]
    assert [float(row["replay/size"]) for row in rows] == [24, 48]
    assert math.isfinite(float(rows[-1]["train/loss_qvalue"]))
    # A reward of 1 for each frame: what ended is no more than what was seen.
    ended = [row for row in rows if row["train/return"]]
    assert 0 < sum(float(r["train/return"]) * int(r["train/episodes"]) for r in ended) <= 48


@pytest.mark.parametrize("recipe", ["sac", "td3"])
def test_several_environments_are_killed_and_go_on_as_if_nothing_had_happened(recipe, tmp_path):
    whole = train(recipe, tmp_path / "whole", "env.count=3")  # 16 and 32 are within a round
    assert_counts(whole)
    train_and_kill(recipe, tmp_path / "killed", "env.count=3")
    state = torch.load(tmp_path / "killed" / "checkpoint.pt", weights_only=True)
    assert (len(state["collector"]["envs"]), len(state["collector"]["rows"])) == (3, 1)
    assert train(recipe, tmp_path / "killed", "env.count=3", "resume=auto") == whole


@pytest.mark.parametrize("count", [1, 4])
def test_torchrls_collector_trains_and_goes_on_with_new_episodes(count, tmp_path, capsys):
    options = [*BATCHES, f"env.count={count}"]
    whole = train("td3", tmp_path / "whole", *options)
    assert_counts(whole)
    assert train("td3", tmp_path / "again", *options) == whole  # a seed gives the same numbers
    train_and_kill("td3", tmp_path / "killed", *options)
    assert "new episode" not in capsys.readouterr().err
    assert_counts(train("td3", tmp_path / "killed", *options, "resume=auto"))
    said = "collector=torchrl resumes with a new episode in every environment"
    assert said in capsys.readouterr().err


def test_processes_train_in_step_and_go_on_out_of_step(tmp_path, capsys):
    train_and_kill("td3", tmp_path / "run", *PROCESSES, "env.count=2")
    stored = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    actions = stored["buffer"]["_storage"]["_storage"]["action"][:32]
    assert len(actions.unique()) == 32  # workers have seeds of their own
    options = [*PROCESSES, "env.count=2", "collector.sync=false", "resume=auto"]
    assert_counts(train("td3", tmp_path / "run", *options))
    assert "collector=multiprocess resumes with a new episode" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["env.count=3"], [*BATCHES, "env.count=2"]])
def test_they_train_on_cuda(options, cuda, tmp_path):
    assert_counts(train("td3", tmp_path / "run", "device=cuda:0", *options))


@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_a_worker_are_those_of_the_local_collector(count, monkeypatch):
    collector = make("env=Hopper", *BATCHES, f"env.count={count}", "collector.frames_per_batch=9")
    task = collector.cfg.env
    batch = batches.make_envs(task, 3).rollout(100, break_when_any_done=False)
    monkeypatch.setattr(collector, "_receive", batch.clone)
    local = make_local(task, Acts(batch["action"].unbind(-2)), seed=3)
    local._observations = list(local._upload(*(env.reset()[0] for env in local.envs)))
    for _ in range(100 * count):  # after a reset, since workers reset once more
        row, expected = collector.step(), local.step()
        assert set(row.keys(True, True)) == set(expected.keys(True, True))
        assert (row == expected).all()
        assert row.batch_size == ()
        assert (collector.ended is None) == (local.ended is None)
    assert len(collector.returns) > 2
    assert collector.returns == pytest.approx(local.returns, rel=1e-5)
    assert collector.frames == 100 * count


def test_the_time_limit_ends_no_value(monkeypatch):
    collector = make(*BATCHES)
    flags = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]], dtype=torch.bool)
    step = TensorDict(
        observation=torch.zeros(4, 4),
        reward=torch.ones(4, 1),
        terminated=flags[:, :1],
        truncated=flags[:, 1:],
        done=flags.any(1, keepdim=True),
        episode_reward=torch.arange(4.0).unsqueeze(1),
        batch_size=[4],
    )
    rows = TensorDict(
        observation=torch.zeros(4, 4), action=torch.zeros(4, 1), next=step, batch_size=[4]
    )
    monkeypatch.setattr(collector, "_receive", lambda: rows)
    assert take(collector, 4)["next", "terminated"].flatten().tolist() == [0, 1, 0, 0]
    assert collector.returns == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("options", [[], [*BATCHES, "collector.frames_per_batch=6"]])
def test_successors_of_rows_that_alternate_are_those_of_their_environment(options):
    collector = make("env.count=3", *options)
    buffer = make_replay_buffer("ct", capacity=50, batch_size=8)
    ended = []
    with collector:
        for _ in range(130):  # the ring is full after 50
            buffer.add(collector.step())
            ended.append(collector.ended is not None)
    assert 5 < sum(ended) < 60
    stored = range(80, 130)  # row n is of environment n % 3, and at position n % 50
    expected = {n % 50: (n + 3) % 50 if n + 3 in stored and not ended[n] else -1 for n in stored}
    found = buffer.sampler.unit.successors(buffer.storage, torch.arange(50))
    assert found.tolist() == [expected[position] for position in range(50)]


def test_a_batch_of_several_workers_comes_in_the_order_of_time(monkeypatch):
    collector = make(*BATCHES)
    times = torch.arange(8.0).reshape(2, 4)  # [workers, time]
    step = {name: torch.zeros(2, 4, 1, dtype=torch.bool) for name in ("truncated", "terminated")}
    step |= {"done": step["truncated"], "observation": times.unsqueeze(-1)}
    step |= {"reward": torch.ones(2, 4, 1), "episode_reward": torch.ones(2, 4, 1)}
    rows = {"observation": times.unsqueeze(-1), "action": torch.zeros(2, 4, 1), "next": step}
    monkeypatch.setattr(collector, "_receive", lambda: TensorDict(rows, batch_size=[2, 4]))
    assert take(collector, 8)["observation"].flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_random_frames_are_counted_over_all_environments():
    cfg = make_config("td3", *TINY, "env.count=3").env
    collector = make_local(cfg, Acts(), random_frames=4)
    acted = take(collector, 12)["action"].flatten() == 0
    assert acted.tolist() == [False] * 6 + [True] * 6  # a round that begins at random ends so


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_may_go_on_with_another_collector(count):
    there = make(*BATCHES, f"env.count={count}")
    there.frames, there.returns = 7, [1.0]
    here = make(f"env.count={count}")
    here.load_state_dict(there.state_dict())
    assert (here.frames, here.returns, here.episode_returns) == (7, [1.0], [0.0] * count)
    here.step()
    there.load_state_dict(here.state_dict())
    assert there.frames == 8


def test_a_state_from_before_several_environments_is_understood():
    first, second = make(), make("seed=1")
    take(first, 3)
    state = first.state_dict()
    for name in ("env", "observation", "episode_return"):
        (state[name],) = state.pop(f"{name}s")
    del state["rows"]
    second.load_state_dict(state)
    assert (take(second, 20) == take(first, 20)).all()
    assert second.returns == first.returns


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env.count=0"], "env.count=0 is not valid; give an integer, at least 1"),
        (
            ["collector=torchrl", "env.count=5"],
            "frames_per_batch=32 is not a multiple of env.count=5",
        ),
        (["collector=multiprocess", "collector.workers=0"], "collector.workers=0"),
        (["collector=multiprocess", "collector.sync=1"], "sync=1 is not valid; give true or false"),
        (["collector.kind=slurm"], "collector.kind=slurm is not valid; give local, torchrl"),
    ],
)
def test_bad_values_are_named(overrides, message):
    with pytest.raises(config.UsageError, match=message):
        config.check(make_config("sac", *overrides))


@dataclass(frozen=True)
class NStep(Method[RandomSampler]):
    """Three-step returns, which need rows in temporal order."""

    def make_sampler(self, capacity):
        return RandomSampler()

    def make_transform(self, sampler):
        return MultiStepTransform(n_steps=3, gamma=0.99)


def test_a_method_with_n_step_returns_is_refused(monkeypatch):
    cfg = make_config("td3", *TINY)
    monkeypatch.setattr("nmer_recipes.replay.make_method", lambda _: NStep())
    with pytest.raises(config.UsageError, match="MultiStepTransform, but the recipes store single"):
        make_buffer(cfg, 0)


def test_a_run_from_before_several_environments_goes_on_as_the_same_setting(tmp_path):
    train_and_kill("td3", tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    now = path.read_text()
    path.write_text(now.replace("  count: 1\n", ""))
    assert "count" not in path.read_text()
    assert_counts(train("td3", tmp_path / "run", "resume=auto"))
    before = read_directory(tmp_path / "run", print).setting
    path.write_text(now)
    assert read_directory(tmp_path / "run", print).setting == before
    path.write_text(now.replace("  count: 1\n", "  count: 2\n"))
    assert read_directory(tmp_path / "run", print).setting != before
