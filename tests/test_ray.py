"""Environments on Ray workers; tests that start some use a cluster of two nodes."""

import contextlib
import csv
import json
import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from recipe_helpers import make_config
from tensordict import TensorDict

from nmer_recipes import config, remote  # isort: skip
from nmer_recipes.collect import make_collector  # isort: skip
from nmer_recipes.envs import make_env  # isort: skip
from nmer_recipes.runs import Run  # isort: skip
from nmer_recipes.seeding import seeds  # isort: skip

needs_ray = pytest.mark.skipif(remote.ray is None, reason="Ray is not installed")
pytestmark = pytest.mark.xdist_group("ray")

CPU = torch.device("cpu")
SMALL = ["hidden=[16,16]", "batch_size=16", "eval_episodes=1", "logger=none", "device=cpu"]
TASK = ["collector=ray", "env=InvertedPendulum", "total_frames=600", "random_frames=200", *SMALL]


@pytest.fixture(scope="module")
def cluster():
    import td3
    from ray import cloudpickle
    from ray.cluster_utils import Cluster

    cloudpickle.register_pickle_by_value(td3)  # as it is where it is the script
    head = {"num_cpus": 1, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # else they starve beside other tests
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1)
        yield cluster
        cluster.shutdown()


def make_remote(*overrides: str):
    """Builds a collector as the recipe does, and the policy whose weights it sends."""
    import td3

    cfg = make_config("td3", *TASK, *overrides)
    env = make_env(cfg.env)
    sizes = env.observation_space.shape[0], env.action_space.shape[0]
    policy = td3.make_agent(cfg, *sizes, CPU)[1]
    collector = make_collector(
        cfg, env, policy, lambda: td3.make_agent(cfg, *sizes, CPU)[1], seeds(0)
    )
    return collector, policy


def take(collector, rows: int) -> TensorDict:
    return torch.stack([collector.step() for _ in range(rows)])


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(remote, "ray", None)
    with pytest.raises(config.UsageError, match="pip install"):
        make_remote()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("collector.workers=0", "collector.workers=0 is not valid; give an integer, at least 1"),
        ("collector.frames_per_batch=1.5", "collector.frames_per_batch=1.5"),
        ("collector.cpus=0", "collector.cpus=0"),
        ("collector.patience=-1", "collector.patience=-1"),
    ],
)
def test_bad_values_are_named(override, message):
    with pytest.raises(config.UsageError, match=message):
        config.check(make_config("sac", "collector=ray", override))


@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere"])
def test_an_address_where_no_one_listens_is_told_at_once(address):
    with pytest.raises(config.UsageError, match=f"address={address}: no Ray cluster was found"):
        make_remote(f"collector.address={address}")


@needs_ray
def test_a_run_may_go_on_with_another_collector():
    there, _ = make_remote()
    there.frames, there.returns = 7, [1.0]
    here, _ = make_remote("collector=local")
    here.load_state_dict(there.state_dict())
    assert (here.frames, here.returns, here.episode_returns) == (7, [1.0], [0.0])
    here.step()
    back, _ = make_remote()
    back.load_state_dict(here.state_dict())
    assert back.frames == 8


@needs_ray
def test_workers_act_at_random_and_then_by_the_learners_weights(cluster):
    options = ["random_frames=20", "exploration_noise=0.0", "collector.frames_per_batch=8"]
    # Of several workers a slow one may bring rows of old weights at any later time.
    place = [f"collector.address={cluster.address}", "collector.workers=1"]
    collector, policy = make_remote(*place, *options)

    def distance(rows):
        with torch.no_grad():
            return (policy(rows.select("observation"))["action"] - rows["action"]).abs()

    with collector:
        first = take(collector, 24)
        assert distance(first).median() > 0.1
        assert first["action"].abs().max() <= 1
        (worker,) = collector._collector.remote_collectors
        look = worker.__ray_call__.remote(lambda _: "nmer_recipes" in sys.modules)
        assert not remote.ray.get(look)  # so that other machines need no recipes
        assert distance(take(collector, 16)).max() < 1e-5
        take(collector, 1)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.neg_()
        assert distance(take(collector, 7)).min() > 0  # the rest of a batch
        assert distance(take(collector, 16)).max() < 1e-5


def where(worker) -> tuple[str, int]:
    """Returns node and process of a worker."""
    import ray

    look = worker.__ray_call__.remote(
        lambda _: (ray.get_runtime_context().get_node_id(), os.getpid())
    )
    return ray.get(look, timeout=60)


@needs_ray
def test_training_outlives_a_killed_worker_and_goes_on_after_a_lost_node(
    cluster, tmp_path, monkeypatch, capsys
):
    import ray
    import td3

    seen = SimpleNamespace(collector=None)

    def remember(*arguments):
        seen.collector = make_collector(*arguments)
        return seen.collector

    def kill_worker():
        workers = [where(worker) for worker in seen.collector._collector.remote_collectors]
        assert len({node for node, _ in workers}) == 2  # one on each
        os.kill(workers[0][1], signal.SIGKILL)

    def lose_node():
        gone = cluster.list_all_nodes()[-1]
        (worker,) = [
            worker
            for worker in seen.collector._collector.remote_collectors
            if where(worker)[0] == gone.node_id
        ]
        cluster.remove_node(gone)
        with contextlib.suppress(ray.exceptions.RayError):  # until it is noticed
            while True:
                where(worker)

    events, log = {250: kill_worker, 450: lose_node}, Run.log

    def log_and_act(run, frames, *arguments):
        log(run, frames, *arguments)
        events.pop(frames, lambda: None)()

    monkeypatch.setattr(td3, "make_collector", remember)
    monkeypatch.setattr(Run, "log", log_and_act)
    where_to = [f"collector.address={cluster.address}", f"run_dir={tmp_path / 'run'}"]
    arguments = [*TASK, *where_to, "eval_every=50", "checkpoint_every=100", "collector.patience=2"]
    with pytest.raises(config.UsageError, match=r"no room for collector.workers=2 .* resume=auto"):
        td3.train(make_config("td3", *arguments))
    assert not events
    assert "A worker was lost at frame 2" in capsys.readouterr().err
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert 400 <= state["collector"]["frames"] <= 500  # the other worker's rows may carry it there

    cluster.add_node(num_cpus=1)
    td3.train(make_config("td3", *arguments, "resume=auto"))
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["frames"]) for row in rows] == list(range(50, 601, 50))
    updates = [int(row["train/updates"]) for row in rows]
    assert updates == [max(0, frames - 200) for frames in range(50, 601, 50)]
    assert all(float(row["replay/size"]) == float(row["frames"]) for row in rows)
    assert float(rows[-1]["replay/mixed"]) > 0.3
    # A reward of 1 for each frame: what ended is most of what was seen, and no more than that.
    returned = sum(float(row["train/return"]) * int(row["train/episodes"]) for row in rows)
    assert 300 < returned <= 600
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["updates"] == 400
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    stored = state["buffer"]["_storage"]["_storage"]
    assert len(stored["observation"]) == 600
    assert len(stored["action"][:200].unique()) == 200  # workers have seeds of their own
    assert stored["action"][:200].std() == pytest.approx(1 / 3**0.5, abs=0.1)  # uniform
