"""Wrong compositions and their errors; correct ones give no error.

A new sampler that draws several rows for an anchor, or a new fold, is added to `WRONG`.
"""

import inspect
import pickle

import pytest
import torch
from helpers import make_transitions
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    RandomSampler,
    SampleUnit,
    SliceSampler,
)
from torchrl.envs import GymEnv, TransformedEnv
from torchrl.envs.transforms import Compose, DoubleToFloat, ExcludeTransform, RewardScaling
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss

from nmer_torchrl import (
    GaussianNoise,
    Mahalanobis,
    NeighborPairs,
    NeighborPairSampler,
    PairMixup,
    PrioritizedNeighborPairSampler,
    RandomPairSampler,
    StateMixup,
    TemporalPairSampler,
    make_replay_buffer,
    samplers,
    transforms,
)
from nmer_torchrl.buffers import PairPrioritizedReplayBuffer
from nmer_torchrl.samplers import NeighborhoodSampler, SpreadSampler
from nmer_torchrl.transforms import (
    Fraction,
    GaussianProcessMixup,
    MeanMixup,
    MixReg,
    NeighborhoodMixup,
    RewardMean,
    Same,
    TunedMixup,
)

N = 40  # rows in each buffer
DRAWN = r"drawn by {}; use a sampler that draws pairs"
UNFOLDED = r"{} draws {}.*folds them to one row each .*add a fold"


def compose(sampler, *transform, make=TensorDictReplayBuffer, **options):
    storage = LazyTensorStorage(N)
    return make(
        storage=storage,
        sampler=sampler,
        transform=Compose(*transform) if transform else None,
        batch_size=8,
        **options,
    )


def prioritized(*transform, **options):
    return TensorDictPrioritizedReplayBuffer(
        alpha=0.6,
        beta=0.4,
        storage=LazyTensorStorage(N),
        transform=Compose(*transform),
        batch_size=8,
        **options,
    )


def other(sampler=NeighborPairSampler):
    """Builds a sampler that serves another buffer."""
    return sampler()


def single(fold):
    """Returns a maker of a buffer that would fold single rows, and the error to expect."""
    name = type(fold()).__name__
    return lambda **o: compose(RandomSampler(), fold(), **o), rf"{name} folds.*" + DRAWN.format(
        "RandomSampler"
    )


def unfolded(sampler, *transform, draws=r"pairs \[B, 2\]"):
    """Returns a maker of a buffer that draws pairs without a fold, and the error to expect."""
    name = type(sampler()).__name__
    return lambda **o: compose(sampler(), *(t() for t in transform), **o), UNFOLDED.format(
        name, draws
    )


# What is wrong: how to make the buffer, and what its first `sample()` must say.
WRONG = {
    "PairMixup, single rows": single(PairMixup),
    "MeanMixup, single rows": single(MeanMixup),
    "TunedMixup, single rows": single(TunedMixup),
    "MixReg, single rows": single(MixReg),
    "RewardMean, single rows": single(RewardMean),
    "NeighborhoodMixup, single rows": single(NeighborhoodMixup),
    "GaussianProcessMixup, single rows": single(GaussianProcessMixup),
    "PairMixup, rows by priority": (
        lambda **o: compose(PrioritizedSampler(N, 0.6, 0.4), PairMixup(), **o),
        DRAWN.format("PrioritizedSampler"),
    ),
    "PairMixup, TorchRL's prioritized buffer": (
        lambda **o: prioritized(PairMixup(), **o),
        DRAWN.format("PrioritizedSampler"),
    ),
    "PairMixup, slices of episodes": (
        lambda **o: compose(
            SliceSampler(slice_len=2, end_key=("next", "terminated")),
            PairMixup(),
            **o,
        ),
        DRAWN.format("SliceSampler"),
    ),
    "PairMixup twice": (
        lambda **o: compose(NeighborPairSampler(), PairMixup(), PairMixup(), **o),
        r"drawn by NeighborPairSampler; use a single fold",
    ),
    "PairMixup, neighborhoods": (
        lambda **o: compose(NeighborhoodSampler(k=3), PairMixup(), **o),
        r"PairMixup folds pairs \[B, 2\].*shape \(8, 4\).*use NeighborhoodMixup",
    ),
    "NeighborPairSampler, no fold": unfolded(NeighborPairSampler),
    "RandomPairSampler, no fold": unfolded(RandomPairSampler),
    "TemporalPairSampler, no fold": unfolded(TemporalPairSampler),
    "NeighborhoodSampler, no fold": unfolded(NeighborhoodSampler, draws=r"neighborhoods"),
    "PrioritizedNeighborPairSampler, no fold": unfolded(lambda: PrioritizedNeighborPairSampler(N)),
    "pairs, and a transform of single rows": unfolded(NeighborPairSampler, StateMixup),
    "pairs, and a transform of TorchRL": unfolded(
        NeighborPairSampler, lambda: RewardScaling(0.0, 1.0, in_keys=[("next", "reward")])
    ),
    "priorities of pairs in a plain buffer": (
        lambda **o: compose(PrioritizedNeighborPairSampler(N), PairMixup(), **o),
        r"TensorDictReplayBuffer does not update them; use a PairPrioritizedReplayBuffer",
    ),
    "Gaussian process without a metric": (
        lambda **o: compose(RandomPairSampler(), GaussianProcessMixup(), **o),
        r"GaussianProcessMixup uses the metric of exactly one neighbor sampler",
    ),
    "noise by the spread of another sampler": (
        lambda **o: compose(
            SpreadSampler(), GaussianNoise(spread=other(SpreadSampler).spread), **o
        ),
        r"The spread of GaussianNoise belongs to another sampler",
    ),
}


def filled(make, **options):
    buffer = make(**options)
    buffer.extend(make_transitions(N, terminated=0.2))
    return buffer


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_composition_raises_at_the_first_sample(name):
    make, words = WRONG[name]
    buffer = filled(make)
    for _ in range(2):  # not only once
        with pytest.raises((TypeError, ValueError), match=words):
            buffer.sample()
    assert len(buffer.storage[:]) == N
    if "noise" not in name:  # which shows in what is read
        assert len(buffer[:]) == N


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_composition_raises_through_prefetch(name):
    make, words = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=words):
        filled(make, prefetch=2).sample()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_composition_raises_after_pickling(name):
    make, words = WRONG[name]
    buffer = pickle.loads(pickle.dumps(filled(make)))
    with pytest.raises((TypeError, ValueError), match=words):
        buffer.sample()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_composition_raises_in_an_ensemble(name):
    make, words = WRONG[name]
    ensemble = ReplayBufferEnsemble(filled(make), filled(make), sample_from_all=True, batch_size=16)
    words = words.replace("drawn by ", r"drawn by (\w+ and )?").partition("; ")[0]
    with pytest.raises((TypeError, ValueError), match=words):
        ensemble.sample()


def test_every_pairing_and_every_fold_is_in_the_table():
    made = " ".join(WRONG)
    for room, attribute in ((samplers, "draws"), (transforms, "folds")):
        for name, kind in inspect.getmembers(room, inspect.isclass):
            if getattr(kind, attribute, None) and not inspect.isabstract(kind):
                assert name in made, f"{name} is missing from WRONG in tests/test_misuse.py"


def count_measures(sampler):
    """Returns a list that grows with each call of the sampler's `embed`."""
    calls, embed = [], sampler.embed
    sampler.embed = lambda batch: calls.append(batch) or embed(batch)
    return calls


def test_a_sampler_that_is_replaced_leaves_no_measure_behind():
    buffer = compose(NeighborhoodSampler(k=3), GaussianProcessMixup())
    buffer.extend(make_transitions(N))
    buffer.sample()
    second = NeighborhoodSampler(k=3, metric=Mahalanobis())
    calls = count_measures(second)
    buffer.set_sampler(second)
    buffer.sample()
    assert len(calls) == 2  # of the rows, and of their mix
    with pytest.raises(TypeError, match="would still be used after the buffer gets another one"):
        GaussianProcessMixup(geometry=second)
    buffer.set_sampler(RandomSampler())
    with pytest.raises(TypeError, match=DRAWN.format("RandomSampler")):
        buffer.sample()


@pytest.mark.parametrize(
    ("fold", "rows"), [(PairMixup, 2), (MixReg, 2), (RewardMean, 2), (NeighborhoodMixup, 4)]
)
def test_rows_of_an_ensemble_that_look_like_pairs_are_refused(fold, rows):
    """Two single rows of each of three members have the shape `[3, 2]`."""
    members = [filled(lambda: compose(RandomSampler())) for _ in range(3)]
    ensemble = ReplayBufferEnsemble(
        *members, sample_from_all=True, batch_size=3 * rows, transform=fold()
    )
    for _ in range(2):
        with pytest.raises(
            TypeError, match=rf"shape \(3, {rows}\).*use a sampler that draws pairs"
        ):
            ensemble.sample()


def test_a_fold_of_an_ensemble_whose_members_draw_pairs_is_right():
    members = [filled(lambda: compose(NeighborPairSampler())) for _ in range(3)]
    ensemble = ReplayBufferEnsemble(
        *members, sample_from_all=True, batch_size=6, transform=PairMixup()
    )
    for _ in range(2):
        assert ensemble.sample().shape == (3, 2)
    with pytest.raises(TypeError, match=r"NeighborPairSampler draws pairs.*add a fold"):
        members[0].sample()


def test_a_fold_that_is_taken_out_is_missed():
    buffer = compose(NeighborPairSampler(), PairMixup())
    buffer.extend(make_transitions(N))
    buffer.sample()
    fold = buffer.transform.pop(0)
    with pytest.raises(TypeError, match=r"NeighborPairSampler draws pairs.*add a fold"):
        buffer.sample()
    buffer.append_transform(fold)
    assert buffer.sample().shape == (8,)
    bare = TensorDictReplayBuffer(storage=buffer.storage, sampler=buffer.sampler, batch_size=8)
    with pytest.raises(TypeError, match=r"NeighborPairSampler draws pairs.*add a fold"):
        bare.sample()


def test_a_fold_of_offline_and_online_rows_together_is_refused():
    offline = ReplayBuffer(storage=LazyTensorStorage(N))
    offline.extend(make_transitions(N))
    both = OfflineToOnlineReplayBuffer(
        offline_dataset=offline,
        online_storage=LazyTensorStorage(N),
        batch_size=8,
        transform=PairMixup(),
    )
    both.extend(make_transitions(N))
    with pytest.raises(TypeError, match=r"drawn by RandomSampler and RandomSampler; use a sampler"):
        both.sample()


def test_a_buffer_that_draws_in_its_own_way_is_checked():
    class Own(TensorDictReplayBuffer):
        def sample(self, batch_size=None):
            index, _ = self.sampler.sample(self.storage, 8)
            return self.transform(self.storage[index])

    def make(sampler, *transform):
        return filled(lambda: compose(sampler, *transform, make=Own))

    assert make(NeighborPairSampler(), PairMixup()).sample().shape == (8,)
    with pytest.raises(TypeError, match=r"NeighborPairSampler draws pairs.*add a fold"):
        make(NeighborPairSampler()).sample()
    with pytest.raises(TypeError, match="drawn by RandomSampler; use a sampler that draws pairs"):
        make(RandomSampler(), PairMixup()).sample()


def test_pairs_of_a_sample_unit_of_the_users_own_are_folded():
    class WithTheFirst(SampleUnit):
        def expand(self, index, info, storage):
            return torch.stack([index, torch.zeros_like(index)], -1), info

    buffer = compose(RandomSampler(), PairMixup(), sample_unit=WithTheFirst())
    buffer.extend(make_transitions(N))
    assert buffer.sample().shape == (8,)


@pytest.mark.parametrize("fold", [PairMixup, NeighborhoodMixup, MixReg, MeanMixup])
def test_an_entry_is_either_mixed_or_the_anchors(fold):
    with pytest.raises(ValueError, match="`anchor_keys` names 'action', which is mixed; remove"):
        fold(anchor_keys=["action"])


def test_a_single_gate_is_refused_with_what_to_do():
    with pytest.raises(
        TypeError, match=r"single gate; give a list, as in gates=\[Fraction\(0.5\)\]"
    ):
        PairMixup(gates=Fraction(0.5))


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (
            [PairMixup(), ExcludeTransform("mixup_weight")],
            "no entry 'mixup_weight', which priorities",
        ),
        ([lambda pairs: pairs[:, 0]], "no entry 'mixup_weight', which .* need; fold pairs with"),
        ([NeighborhoodMixup()], "each row needs one number; fold pairs with a transform"),
    ],
    ids=["left out", "never written", "of a neighborhood"],
)
def test_priorities_of_pairs_need_the_weight_of_each(transform, words):
    sampler = PrioritizedNeighborPairSampler(N)
    buffer = compose(sampler, *transform, make=PairPrioritizedReplayBuffer)
    buffer.extend(make_transitions(N))
    with pytest.raises((KeyError, ValueError), match=words):
        buffer.sample()


def test_a_mix_with_the_next_state_keeps_the_weights_of_the_pairs():
    buffer = compose(
        NeighborPairSampler(), PairMixup(), StateMixup(observation_keys=["observation"])
    )
    rows = make_transitions(N)
    buffer.extend(rows)
    batch = buffer.sample()
    anchor, partner = (rows["action"][index] for index in batch["index"].unbind(-1))
    torch.testing.assert_close(batch["action"], torch.lerp(partner, anchor, batch["mixup_weight"]))


def test_a_fold_of_the_users_own_is_a_fold():
    def average(pairs: TensorDict) -> TensorDict:
        return pairs.float().mean(dim=1)

    buffer = compose(NeighborPairSampler(), average)
    buffer.extend(make_transitions(N))
    assert buffer.sample().shape == (8,)


# -- entries -----------------------------------------------------------------------------------


def goals(n: int = N) -> TensorDict:
    """Builds rows of a task with goals."""
    rows = make_transitions(n)
    for name in ("achieved_goal", "desired_goal"):
        rows[name], rows["next", name] = torch.randn(n, 2), torch.randn(n, 2)
    return rows


LEFT = [key for name in ("achieved_goal", "desired_goal") for key in (name, ("next", name))]


def test_observations_that_stay_unmixed_are_named_once():
    buffer = compose(NeighborPairSampler(), PairMixup())
    with pytest.warns(
        UserWarning, match=r"'achieved_goal', 'desired_goal', \('next', 'achieved_goal'\)"
    ) as told:
        buffer.extend(goals())
    assert len(told) == 1
    assert "mix_keys" in str(told[0].message)
    assert "anchor_keys=['achieved_goal'" in str(told[0].message)
    buffer.extend(goals())  # a second warning would be an error
    pickle.loads(pickle.dumps(buffer)).extend(goals())


@pytest.mark.parametrize(
    "fold",
    [
        lambda: PairMixup(anchor_keys=LEFT),
        lambda: PairMixup(
            mix_keys=["observation", "action", ("next", "observation"), ("next", "reward"), *LEFT]
        ),
        RewardMean,
    ],
    ids=["left on purpose", "mixed", "mixes no observation"],
)
def test_observations_that_are_accounted_for_give_no_warning(fold):
    compose(NeighborPairSampler(), fold()).extend(goals())


def test_mixreg_names_the_inputs_alone():
    with pytest.warns(UserWarning, match=r"hold 'achieved_goal', 'desired_goal', which"):
        compose(RandomPairSampler(), MixReg()).extend(goals())


def test_integer_actions_are_refused_with_what_to_do():
    rows = make_transitions(N)
    rows["action"] = torch.randint(3, (N, 1))
    with pytest.raises(ValueError, match=r"torch.int64.*Same\('action'\)"):
        compose(NeighborPairSampler(), PairMixup()).extend(rows)


@pytest.mark.parametrize("fold", [PairMixup, NeighborhoodMixup, MixReg])
def test_one_hot_actions_are_refused_with_what_to_do(fold):
    rows = make_transitions(N)
    rows["action"] = torch.eye(3)[torch.randint(3, (N,))]
    buffer = compose(NeighborPairSampler(), fold())
    with pytest.raises(ValueError, match=r"'action' is one-hot.*Same\('action'\)"):
        buffer.extend(rows)
    assert len(buffer) == 0
    rows["action"] = torch.rand(N, 3)
    buffer.extend(rows)  # is not held against it
    assert len(buffer) == N


def test_several_one_hot_actions_side_by_side_are_refused():
    rows = make_transitions(N)
    choices = torch.randint(3, (2, N))
    rows["action"] = torch.cat([torch.eye(3)[choice] for choice in choices], -1)
    with pytest.raises(ValueError, match=r"'action' is one-hot.*Same\('action'\)"):
        compose(NeighborPairSampler(), PairMixup()).extend(rows)


def test_one_hot_actions_that_agree_may_be_mixed():
    rows = make_transitions(N)
    rows["action"] = torch.eye(3)[torch.randint(3, (N,))]
    buffer = compose(NeighborPairSampler(), PairMixup(gates=[Same("action")]))
    buffer.extend(rows)
    batch = torch.cat([buffer.sample() for _ in range(30)])
    assert (batch["action"].sort().values == torch.tensor([0.0, 0.0, 1.0])).all()
    assert (batch["mixup_weight"] < 1).any()


def test_a_task_with_discrete_actions_is_learned_from_rows_of_equal_action():
    """Trains TorchRL's DQN on CartPole: neighbors by observation, mixed if actions are equal."""
    torch.manual_seed(0)
    env = TransformedEnv(GymEnv("CartPole-v1"), DoubleToFloat())
    rows = torch.cat([env.rollout(50, break_when_any_done=True) for _ in range(20)])
    observations = ["observation", ("next", "observation")]
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(2_000),
        sampler=NeighborPairSampler(k=5, keys=["observation"]),
        transform=PairMixup(mix_keys=[*observations, ("next", "reward")], gates=[Same("action")]),
        batch_size=128,
    )
    buffer.extend(rows)
    network = QValueActor(MLP(in_features=4, out_features=2, num_cells=[32]), spec=env.action_spec)
    loss = DQNLoss(network, action_space=env.action_spec, delay_value=False)
    loss.make_value_estimator(gamma=0.5)  # so that values settle at once
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        batch = buffer.sample()
        anchor, partner = (buffer.storage[:]["action"][i] for i in batch["index"].unbind(-1))
        mixed = batch["mixup_weight"][:, 0] < 1
        assert torch.equal(batch["action"], anchor)
        assert torch.equal(anchor[mixed], partner[mixed])
        assert (mixed.any(), (~mixed).any()) == (True, True)
        value = loss(batch)["loss"]
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert sum(losses[-10:]) < sum(losses[:10]) / 2


def test_discrete_actions_that_are_left_out_but_may_differ_are_refused():
    rows = make_transitions(N)
    rows["action"] = torch.randint(3, (N, 1))
    buffer = make_replay_buffer("nmer", capacity=N, batch_size=8, keys=["observation"])
    with pytest.raises(ValueError, match=r"torch.int64, that is, a discrete action.*same_keys"):
        buffer.extend(rows)


def test_one_saturated_action_is_not_taken_for_a_discrete_one():
    rows = make_transitions(3)
    rows["action"] = torch.tensor([[0.0, 1.0], [0.3, 0.4], [0.5, 0.6]])
    buffer = compose(NeighborPairSampler(), PairMixup())
    for row in rows:
        buffer.add(row)
    buffer.sample()


def test_rows_that_were_stored_before_are_looked_at_when_they_are_drawn():
    rows = make_transitions(N)
    rows["action"] = torch.eye(3)[torch.randint(3, (N,))]
    buffer = make_replay_buffer("mixup", batch_size=64, storage=TensorStorage(rows))
    with pytest.raises(ValueError, match="'action' is one-hot"):
        buffer.sample()
    buffer = make_replay_buffer("mixup", batch_size=64, storage=TensorStorage(goals()))
    with pytest.warns(UserWarning, match="achieved_goal"):
        buffer.sample()
    buffer.sample()


@pytest.mark.parametrize("first", [1, 3])
def test_one_hot_actions_are_noticed_when_they_first_differ(first):
    """One row, or rows of one action, do not show what an action is."""
    rows = make_transitions(N)
    rows["action"] = torch.eye(3)[torch.randint(3, (N,))]
    rows["action"][:first] = torch.eye(3)[0]
    buffer = make_replay_buffer("mixup", batch_size=64, capacity=N)
    buffer.extend(rows[:first])
    buffer.sample()
    buffer.sample()
    for row in rows[first:]:
        buffer.add(row)
    with pytest.raises(ValueError, match="'action' is one-hot"):
        buffer.sample()


def test_a_gate_that_returns_a_column_is_refused():
    buffer = compose(NeighborPairSampler(), PairMixup(gates=[lambda batch, _: batch["x"] > 0]))
    buffer.extend(make_transitions(N).set("x", torch.randn(N, 1)))
    with pytest.raises(ValueError, match=r"shape \(\d+, 2, 1\) for \(\d+,\) anchors"):
        buffer.sample()


def test_a_pairing_serves_one_buffer_only():
    unit = NeighborPairs(k=2)
    first, second = (compose(RandomSampler(), PairMixup(), sample_unit=unit) for _ in range(2))
    for buffer in (first, second):
        buffer.extend(make_transitions(N))
    first.sample()
    with pytest.raises(RuntimeError, match="NeighborPairs follows the storage of another buffer"):
        second.sample()
    first.sample()


def test_a_pairing_serves_another_buffer_once_the_first_is_gone():
    unit = NeighborPairs(k=2)
    for clear in (False, True):
        buffer = compose(RandomSampler(), PairMixup(), sample_unit=unit)
        buffer.extend(make_transitions(N))
        buffer.sample()
        kept = buffer
        del buffer
        if clear:
            unit.clear()
        else:
            del kept
    compose(RandomSampler(), PairMixup(), sample_unit=unit).extend(make_transitions(N))


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        (["observation", "action"], r"hold \('next', 'observation'\), \('next', 'reward'\)"),
        (["observation", "action", ("next", "observation")], r"hold \('next', 'reward'\), which"),
        (["observation", ("next", "observation"), ("next", "reward")], "hold 'action', which"),
    ],
)
def test_parts_of_a_transition_that_stay_unmixed_are_named(keys, left):
    with pytest.warns(UserWarning, match=left):
        compose(NeighborPairSampler(), PairMixup(mix_keys=keys)).extend(make_transitions(N))


def test_in_an_ensemble_each_member_measures_by_its_own_sampler():
    samplers = NeighborhoodSampler(k=3), NeighborhoodSampler(k=3)
    members = [filled(lambda s=s: compose(s, GaussianProcessMixup())) for s in samplers]
    calls = [count_measures(sampler) for sampler in samplers]
    ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=16).sample()
    assert [len(some) for some in calls] == [2, 2]


def test_one_fold_over_several_samplers_has_no_metric_of_its_own():
    members = [filled(lambda: compose(NeighborhoodSampler(k=3))) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(
        *members, sample_from_all=True, batch_size=16, transform=GaussianProcessMixup()
    )
    with pytest.raises(
        TypeError, match="draws with NeighborhoodSampler and NeighborhoodSampler; use"
    ):
        ensemble.sample()


def test_an_ensemble_is_written_through_a_fold_of_its_own():
    members = [filled(lambda: compose(NeighborPairSampler(), *())) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(
        *members, sample_from_all=True, batch_size=16, routing_key="to", transform=PairMixup()
    )
    rows = make_transitions(4)
    rows["to"] = torch.tensor([0, 1, 0, 1])
    for member in members:
        member.empty()
    ensemble.extend(rows)
    assert [len(member) for member in members] == [2, 2]


def test_a_measure_of_the_users_own_is_taken():
    sampler = NeighborhoodSampler(k=3)

    class Scaled:
        def embed(self, batch):
            return sampler.embed(batch)

    buffer = compose(sampler, GaussianProcessMixup(geometry=Scaled()))
    buffer.extend(make_transitions(N))
    assert buffer.sample().shape == (8,)


def test_a_full_storage_is_overwritten_by_a_new_buffer():
    buffer = TensorDictReplayBuffer(
        storage=TensorStorage(make_transitions(N)),
        sampler=NeighborPairSampler(),
        transform=PairMixup(),
        batch_size=8,
    )
    buffer.extend(make_transitions(3, seed=1))
    assert len(buffer) == N


FOLDED = ["nmer", "1nn", "mixup", "ct", "per_nmer", "neighborhood", "gp", "mixreg"]


@pytest.mark.parametrize("kind", FOLDED)
def test_every_kind_that_folds_names_observations_or_leaves_them_on_purpose(kind):
    with pytest.warns(UserWarning, match="achieved_goal"):
        make_replay_buffer(kind, capacity=N, batch_size=8).extend(goals())
    make_replay_buffer(kind, capacity=N, batch_size=8, anchor_keys=LEFT).extend(goals())


@pytest.mark.parametrize(
    ("kind", "given"), [("nmer", {}), ("mixup", {}), ("neighborhood", {"k": 2})]
)
def test_rows_of_a_kind_are_mixed_where_they_agree(kind, given):
    rows = make_transitions(N)
    rows["action"] = torch.randint(2, (N, 1))
    buffer = make_replay_buffer(
        kind, capacity=N, batch_size=64, keys=["observation"], same_keys=["action"], **given
    )
    buffer.extend(rows)
    batch = torch.cat([buffer.sample() for _ in range(20)])
    actions = rows["action"][batch["index"]][..., 0]
    mixed = batch["mixup_weight"][:, 0] < 1
    assert mixed.any()
    assert (actions[mixed] == actions[mixed][:, :1]).all()
    assert torch.equal(batch["action"][:, 0], actions[:, 0])


@pytest.mark.parametrize("kind", ["uniform", "nmer"])
def test_a_second_fold_is_refused_when_the_buffer_is_made(kind):
    with pytest.raises(ValueError, match=r"PairMixup.*folds pairs.*leave it out"):
        make_replay_buffer(kind, capacity=N, batch_size=8, transform=PairMixup())


# -- rows on a storage that was filled before --------------------------------------------------


@pytest.mark.parametrize("kind", ["uniform", "nmer", "per", "s4rl"])
def test_rows_of_another_dtype_are_refused_by_what_is_stored_and_not_remembered(kind):
    storage = LazyTensorStorage(N)
    rows = make_transitions(20)
    TensorDictReplayBuffer(storage=storage, batch_size=8).extend(rows)
    buffer = make_replay_buffer(kind, capacity=N, batch_size=8, storage=storage)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"float64, but in the rows stored before.*float32"):
            buffer.extend(rows.double())
    more = make_transitions(10, seed=1)
    buffer.extend(more)
    assert len(buffer) == 30
    assert buffer.sample()["observation"].dtype == torch.float32
    stored = storage[:]["observation"]
    assert torch.equal(stored, torch.cat([rows["observation"], more["observation"]]))


def test_writes_that_would_count_rows_that_no_one_wrote_are_refused():
    """TorchRL's writer starts at position 0, but adds its rows to the length."""
    storage = LazyTensorStorage(N)
    TensorDictReplayBuffer(storage=storage, batch_size=8).extend(make_transitions(20))
    buffer = TensorDictReplayBuffer(
        storage=storage, sampler=NeighborPairSampler(), transform=PairMixup(), batch_size=8
    )
    with pytest.raises(ValueError, match=r"holds 20 rows.*make_replay_buffer"):
        buffer.extend(make_transitions(10))
    buffer[3:5] = make_transitions(2)
    assert len(buffer) == 20
    buffer.sample()


def test_rows_that_were_never_stored_are_not_remembered():
    buffer = compose(NeighborPairSampler(), PairMixup())
    with pytest.raises(RuntimeError, match="meta"):
        buffer.extend(make_transitions(5).double().to("meta"))
    buffer.extend(make_transitions(5))
    assert len(buffer) == 5
