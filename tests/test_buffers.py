import copy
import pickle
import threading
import warnings

import pytest
import torch
from helpers import MIX_KEYS, assert_neighbors, make_transitions, stored_points
from torch.multiprocessing import get_context
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
)
from torchrl.envs import DoubleToFloat

from nmer_torchrl import (
    Euclidean,
    GaussianNoise,
    Mahalanobis,
    PairMixup,
    RandomPairSampler,
    StateMixup,
    TemporalPairSampler,
    make_replay_buffer,
)
from nmer_torchrl.gaussian_process import GaussianProcess
from nmer_torchrl.methods import METHODS
from nmer_torchrl.methods.groups import Keyed, Near, Pairs
from nmer_torchrl.pairs import QuantileCap
from nmer_torchrl.samplers import SpreadSampler
from nmer_torchrl.transforms import (
    AmplitudeScaling,
    DensityFraction,
    LinearFraction,
    MeanMixup,
    MixReg,
    RewardMean,
)

DRAWS = {kind: getattr(each().make_sampler(9), "draws", "rows") for kind, each in METHODS.items()}
ROW_KINDS = [kind for kind, draws in DRAWS.items() if draws == "rows" and kind != "uniform"]
PAIR_KINDS = [kind for kind, draws in DRAWS.items() if draws != "rows"]
NEIGHBORHOOD_KINDS = [kind for kind in PAIR_KINDS if DRAWS[kind].startswith("neighborhoods")]
MIXED_KINDS = [kind for kind, method in METHODS.items() if issubclass(method, Pairs)]
KEYED_KINDS = [kind for kind, method in METHODS.items() if issubclass(method, Keyed)]
NEAR_KINDS = [kind for kind, method in METHODS.items() if issubclass(method, Near)]


def make(kind="nmer", *, capacity=100, batch_size=16, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return make_replay_buffer(
        kind, capacity=capacity, batch_size=batch_size, generator=generator, **options
    )


def index_shape(kind):
    """Returns the shape of `index` in a batch of 16."""
    if kind in NEIGHBORHOOD_KINDS:
        return (16, 11)  # of 10 neighbors unless told
    return (16, 2) if kind in PAIR_KINDS else (16,)


def assert_same_batch(first, second) -> None:
    assert (first == second).all(), (first["index"], second["index"])


def test_each_kind_is_its_sampler_and_transform():
    uniform = make("uniform")
    assert isinstance(uniform, TensorDictReplayBuffer)
    assert isinstance(uniform.sampler, RandomSampler)
    assert isinstance(make("mixup").sampler, RandomPairSampler)
    assert make("1nn").sampler.k == 1
    assert make("nmer").sampler.k == 10
    assert make("nmer", k=25).sampler.k == 25
    assert isinstance(make("ct").sampler, TemporalPairSampler)
    for kind in MIXED_KINDS:
        (fold,) = make(kind, alpha=0.3).transform
        assert isinstance(fold, PairMixup)
        assert fold.alpha == 0.3
        assert make(kind).transform[0].alpha == 0.75


def test_each_kind_beyond_is_its_sampler_and_transform():
    s4rl, mixreg = make("s4rl"), make("mixreg")
    assert isinstance(s4rl.sampler, RandomSampler)
    assert isinstance(s4rl.transform[0], StateMixup)
    assert isinstance(mixreg.sampler, RandomPairSampler)
    assert isinstance(mixreg.transform[0], MixReg)
    assert (s4rl.transform[0].alpha, mixreg.transform[0].alpha) == (0.75, 0.2)
    assert make("mixreg", alpha=0.3).transform[0].alpha == 0.3
    scaling = make("ras", min_factor=0.5).transform[0]
    assert isinstance(scaling, AmplitudeScaling)
    assert (scaling.min_factor, scaling.max_factor) == (0.5, 1.2)
    rewards = make("interpolated_rewards", k=3)
    assert rewards.sampler.k == 3
    assert isinstance(rewards.transform[0], RewardMean)
    noisy = make("noisy", sigma=0.2, action_bounds=(-2.0, 2.0))
    noise = noisy.transform[0]
    assert isinstance(noisy.sampler, SpreadSampler)
    assert isinstance(noise, GaussianNoise)
    assert noise.spread is noisy.sampler.spread
    assert (noise.sigma, noise.action_bounds) == (0.2, (-2.0, 2.0))
    assert make("noisy").transform[0].sigma == 0.1


@pytest.mark.parametrize("kind", ["uniform", *PAIR_KINDS, *ROW_KINDS])
def test_each_kind_samples_rows(kind):
    buffer = make(kind)
    buffer.extend(make_transitions(50))
    batch = buffer.sample()
    assert batch.batch_size == (16,)
    assert batch["observation"].shape == (16, 3)
    assert ("mixup_weight" in set(batch.keys())) == (kind in PAIR_KINDS)
    assert ("state_weight" in set(batch.keys())) == (kind == "s4rl")
    assert batch["index"].shape == index_shape(kind)


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("uniform", {"k": 10}),
        ("uniform", {"alpha": 0.75}),
        ("uniform", {"search": "torch"}),
        ("mixup", {"k": 10}),
        ("mixup", {"search": "auto"}),
        ("1nn", {"k": 1}),
        ("nmer", {"sigma": 0.1}),
        ("ct", {"k": 1}),
        ("s4rl", {"terminated_key": "end"}),
        ("noisy", {"alpha": 0.75}),
        ("ras", {"action_bounds": (-1, 1)}),
        ("mixreg", {"min_factor": 0.6}),
        ("interpolated_rewards", {"alpha": 0.75}),
        ("mixup", {"metric": "euclidean"}),
        ("mixup", {"max_distance": 1.0}),
        ("neighborhood", {"interpolation": "mean"}),
        ("nmer", {"noise_variance": 1e-3}),
        ("uniform", {"fraction": 0.5}),
    ],
)
def test_an_argument_without_use_is_refused(kind, option):
    (name,) = option
    with pytest.raises(ValueError, match=f"'{kind}' does not accept {name}="):
        make(kind, **option)


def test_metrics_by_word_mapping_and_object():
    assert isinstance(make("nmer").sampler.metric, Euclidean)
    for kind in NEAR_KINDS:
        assert isinstance(make(kind, metric="mahalanobis").sampler.metric, Mahalanobis)
    assert make(metric={"mahalanobis": {"shrinkage": 0.5}}).sampler.metric.shrinkage == 0.5
    weighted = make(metric={"euclidean": {"weights": {"action": 0.5}}}).sampler.metric
    assert weighted.weights == {"action": 0.5}
    assert make(metric=weighted).sampler.metric is weighted
    buffer = make(metric="product")
    buffer.extend(make_transitions(50))
    assert buffer.sample()["index"].shape == (16, 2)


@pytest.mark.parametrize("kind", ["nmer", "mixup", "ct", "1nn", "per_nmer"])
def test_interpolations_by_word(kind):
    assert type(make(kind).transform[0]) is PairMixup
    assert isinstance(make(kind, interpolation="mean").transform[0], MeanMixup)
    assert make(kind, interpolation="uniform").transform[0].alpha == 1


def test_fractions_and_caps_by_number_and_mapping():
    assert make("nmer", fraction=1.0).transform[0].gates == ()
    (gate,) = make("mixup", fraction=0.5).transform[0].gates
    assert gate.share == 0.5
    linear = {"linear": {"first": 1.0, "last": 0.0, "rows": 1e6}}
    (gate,) = make("gp", fraction=linear).transform[0].gates
    assert gate.share == LinearFraction(1.0, 0.0, 1e6)
    half = {"exponential": {"first": 1.0, "last": 0.0, "half_life": 100}}
    assert make(fraction=half).transform[0].gates[0].share(100) == 0.5
    dense = make(fraction={"density": {"first": 0.0, "last": 1.0, "rows": 100}}, max_distance=2.0)
    (gate,) = dense.transform[0].gates
    assert (dense.sampler.unit.cap.limit, gate.share) == (2.0, DensityFraction(0.0, 1.0, 100))
    for kind in NEAR_KINDS:
        for cap in ({"quantile": 0.9}, QuantileCap(0.9)):
            sampler = make(kind, max_distance=cap).sampler
            assert sampler.unit.cap.max_distance == QuantileCap(0.9)
        assert make(kind).sampler.unit.cap is None
    own = LinearFraction(0.5, 0.5, 1)
    assert make(fraction=own).transform[0].gates[0].share is own


def test_the_regression_by_its_numbers():
    process = make("gp", lengthscale=3.0, noise_variance=0.1, max_variance=0.5).transform[0].process
    assert (process.lengthscale, process.noise_variance, process.max_variance) == (3.0, 0.1, 0.5)
    assert make("gp").transform[0].process == GaussianProcess()


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("nmer", {"metric": "cosine"}, "metric 'cosine'; .* euclidean, mahalanobis, product"),
        ("nmer", {"metric": {"mahalanobis": {"alpha": 1}}}, "mahalanobis.*'alpha'"),
        ("nmer", {"metric": 3}, "metric=3 is not valid; give one of"),
        ("nmer", {"metric": "product", "search": "graph"}, "does not support ProductNorm"),
        ("gp", {"metric": "product"}, "use 'euclidean' or 'mahalanobis'"),
        ("nmer", {"interpolation": "cubic"}, "'cubic'; the known ones are beta, uniform, mean"),
        ("nmer", {"interpolation": "mean", "alpha": 0.5}, "'mean' ignores alpha=0.5; remove one"),
        (
            "nmer",
            {"fraction": 1.5},
            "fraction=1.5 is out of range; give a finite number at least 0 and at most 1",
        ),
        ("nmer", {"fraction": "cosine"}, "fraction 'cosine'; .* linear, exponential, density"),
        ("nmer", {"fraction": {"linear": {"first": 1}}}, "fraction='linear' with .*missing"),
        ("nmer", {"max_distance": -1.0}, "max_distance=-1.0 is out of range"),
        ("nmer", {"max_distance": "far"}, "max_distance='far'"),
        ("nmer", {"max_distance": {"share": 0.9}}, "max_distance={'share': 0.9}"),
        ("tuned_ct", {"fraction": 0.5}, "'tuned_ct' does not accept fraction=0.5"),
        ("tuned_ct", {"first_alpha": 1.5}, "first_alpha=1.5 .* above 0 and at most 1"),
    ],
)
def test_bad_parts_are_named(kind, options, words):
    with pytest.raises(ValueError, match=words):
        make(kind, **options)


def test_unknown_kinds_and_searches_list_the_known():
    with pytest.raises(ValueError, match=f"'nmr'; the known ones are {', '.join(METHODS)}"):
        make("nmr")
    with pytest.raises(ValueError, match=r"'kdtree'; the known ones are auto"):
        make("nmer", search="kdtree")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": 1e3}, "capacity=1000.0"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"storage": LazyTensorStorage(50)}, "capacity=100, but the storage has room for 50"),
        ({"storage": LazyTensorStorage(100), "device": "cpu"}, "device='cpu'"),
        ({"storage": LazyTensorStorage(100, ndim=2)}, "ndim=2"),
        ({"device": "gpu"}, "device='gpu' is not a valid device"),
        ({"prefetch": -1}, "prefetch=-1 is not a number of batches"),
        ({"k": 0}, "k=0"),
        ({"alpha": -1}, "alpha=-1"),
    ],
)
def test_bad_values_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        make("nmer", **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"storage": 100}, "storage=100 is not a storage"),
        ({"transform": 3}, "transform=3 is neither a Transform nor a function"),
        ({"pin_memory": 1}, "pin_memory=1 is neither True nor False"),
        ({"shared": "yes"}, "shared='yes' is neither True nor False"),
        ({"generator": 0}, "generator=0 is not a torch.Generator"),
        ({"alpha": "high"}, "alpha='high' is not a number; give a finite number above 0"),
        ({"k": True}, "k=True is not an integer; give an integer at least 1"),
    ],
)
def test_values_of_a_wrong_type_are_named(options, words):
    with pytest.raises(TypeError, match=words):
        make_replay_buffer("nmer", **{"capacity": 100, "batch_size": 16, **options})


@pytest.mark.parametrize("kind", ["uniform", "per", "nmer", "per_nmer"])
def test_the_storage_tells_the_capacity(kind):
    buffer = make_replay_buffer(kind, storage=LazyTensorStorage(30), batch_size=8)
    buffer.extend(make_transitions(50))
    assert len(buffer) == 30
    assert buffer.sample().batch_size == (8,)


def test_a_buffer_needs_a_capacity_or_a_storage():
    with pytest.raises(TypeError, match="Neither `capacity` nor `storage` was given"):
        make_replay_buffer("nmer", batch_size=8)


@pytest.mark.parametrize("kind", METHODS)
def test_a_transform_is_appended_after_the_methods_own(kind):
    own = [type(transform) for transform in make(kind).transform]
    given = DoubleToFloat(in_keys=["observation"], out_keys=["single"])
    buffer = make(kind, transform=given)
    assert [type(transform) for transform in buffer.transform] == [*own, DoubleToFloat]
    rows = make_transitions(50).apply(lambda t: t.double() if t.is_floating_point() else t)
    buffer.extend(rows)
    batch = buffer.sample()
    assert torch.equal(batch["single"], batch["observation"].float())  # of mixed rows


def test_a_function_serves_as_transform():
    def double_reward(batch):
        batch["next", "reward"] = 2 * batch["next", "reward"]
        return batch

    plain, doubled = make(seed=1), make(seed=1, transform=double_reward)
    for buffer in (plain, doubled):
        buffer.extend(make_transitions(50))
    reward = plain.sample()["next", "reward"]
    assert torch.equal(doubled.sample()["next", "reward"], 2 * reward)


def test_pinned_memory_is_asked_for():
    buffer = make(pin_memory=True)
    buffer.extend(make_transitions(50))
    if torch.cuda.is_available():  # pragma: no cover
        assert buffer.sample()["observation"].is_pinned()
    else:
        with pytest.raises(RuntimeError):  # torch pins memory for an accelerator only
            buffer.sample()


def test_list_storage_is_refused_when_the_buffer_is_made():
    with pytest.raises(TypeError, match="ListStorage"):
        make("nmer", storage=ListStorage(100))
    make("uniform", storage=ListStorage(100))


def test_keys_reach_sampler_and_fold():
    rows = make_transitions(40).rename_key_("observation", "state")
    rows.rename_key_(("next", "terminated"), ("next", "fell"))
    buffer = make(keys=["state"], value_keys=[("next", "reward")], terminated_key=("next", "fell"))
    buffer.extend(rows)
    batch = buffer.sample()
    anchor = rows[batch["index"][:, 0]]
    assert torch.equal(batch["action"], anchor["action"])
    assert not torch.equal(batch["state"], anchor["state"])
    points = stored_points(buffer.storage, ["state"])
    index = torch.arange(40)
    assert_neighbors(points, index, buffer.sampler.neighbors(buffer.storage, index))


def test_roles_of_keys_reach_the_kinds_that_need_them():
    rows = make_transitions(40).rename_key_("observation", "state")
    rows.rename_key_(("next", "observation"), ("next", "state"))
    names = {"keys": ["state", "action"], "value_keys": [("next", "state"), ("next", "reward")]}
    for kind in KEYED_KINDS:
        buffer = make(kind, **names)
        buffer.extend(rows)
        batch = buffer.sample()
        assert batch["state"].shape == (16, 3)
        anchor = batch["index"].reshape(16, -1)[:, 0]
        same = torch.equal(batch["state"], rows["state"][anchor])
        none_follows = kind in ("ct", "tuned_ct")
        assert same == (none_follows or kind in ("interpolated_rewards", "ero")), kind
    assert make("noisy", **names).transform[0].action_keys == ("action",)
    for kind in ("ct", "tuned_ct", "s4rl", "ras", "noisy"):
        with pytest.raises(ValueError, match=r"None of the keys \('state',\) is an observation"):
            make(kind, keys=["state"])


@pytest.mark.parametrize("kind", [*PAIR_KINDS, *ROW_KINDS])
def test_the_same_seed_gives_the_same_batches(kind):
    batches = []
    for _ in range(2):
        buffer = make(kind, seed=3)
        torch.manual_seed(len(batches))  # the global generator has no part in it
        buffer.extend(make_transitions(50))
        batches.append([buffer.sample() for _ in range(3)])
    for first, second in zip(*batches, strict=True):
        assert_same_batch(first, second)
    assert not torch.equal(batches[0][0]["index"], batches[0][1]["index"])


def test_without_a_generator_the_global_seed_decides():
    batches = []
    for _ in range(2):
        torch.manual_seed(1)
        buffer = make_replay_buffer("nmer", capacity=50, batch_size=8)
        buffer.extend(make_transitions(50))
        batches.append(buffer.sample())
    assert_same_batch(*batches)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_prefetch_serves_right_batches(prefetch):
    buffer = make(prefetch=prefetch)
    buffer.extend(make_transitions(100))
    stored = buffer.storage[:].clone()
    for _ in range(10):
        batch = buffer.sample()
        pair = stored[batch["index"]]["observation"]
        torch.testing.assert_close(
            batch["observation"], pair[:, 1].lerp(pair[:, 0], batch["mixup_weight"])
        )


@pytest.mark.parametrize("kind", ["nmer", "ct", "noisy", "s4rl"])
def test_prefetching_one_batch_changes_no_batch(kind):
    plain, ahead = make(kind, seed=5), make(kind, seed=5, prefetch=1)
    for buffer in (plain, ahead):
        buffer.extend(make_transitions(60))
    for _ in range(5):
        assert_same_batch(plain.sample(), ahead.sample())


def test_writing_and_emptying_while_a_thread_prefetches():
    buffer = make(prefetch=2, capacity=64)
    buffer.extend(make_transitions(64))
    stop = threading.Event()

    def write():
        seed = 0
        while not stop.is_set():
            seed += 1
            buffer.extend(make_transitions(7, seed=seed))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            assert buffer.sample()["observation"].isfinite().all()
    finally:
        stop.set()
        writer.join()
    index = torch.arange(64)
    neighbors = buffer.sampler.neighbors(buffer.storage, index)
    assert_neighbors(stored_points(buffer.storage), index, neighbors)


@pytest.mark.parametrize("kind", [*PAIR_KINDS, *ROW_KINDS])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_state_dict_goes_on_with_the_same_batches(kind, storage):
    def new(seed):
        return make(kind, seed=seed, storage=storage(40), capacity=40)

    buffer = new(1)
    buffer.extend(make_transitions(55))
    buffer.sample()
    state = copy.deepcopy(buffer.state_dict())
    other = new(2)
    other.extend(make_transitions(3, seed=9))
    other.sample()
    other.load_state_dict(state)
    for seed in range(3):
        assert_same_batch(buffer.sample(), other.sample())
        buffer.extend(make_transitions(4, seed=seed))
        other.extend(make_transitions(4, seed=seed))


@pytest.mark.parametrize("kind", [*PAIR_KINDS, *ROW_KINDS])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_dumps_and_loads_go_on_with_the_same_batches(kind, storage, tmp_path):
    buffer = make(kind, storage=storage(40), capacity=40)
    buffer.extend(make_transitions(55))
    buffer.sample()
    buffer.dumps(tmp_path / "buffer")
    other = make(kind, seed=2, storage=storage(40), capacity=40)
    other.loads(tmp_path / "buffer")
    for _ in range(3):
        assert_same_batch(buffer.sample(), other.sample())


def test_state_is_safe_to_load(tmp_path):
    buffer = make()
    buffer.extend(make_transitions(30))
    buffer.sample()
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    other = make(seed=4)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same_batch(buffer.sample(), other.sample())


@pytest.mark.parametrize("kind", PAIR_KINDS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_a_copy_works_by_itself(kind, duplicate):
    buffer = make(kind)
    buffer.extend(make_transitions(50))
    buffer.sample()
    twin = duplicate(buffer)
    twin.extend(make_transitions(20, seed=1))
    assert (len(buffer), len(twin)) == (50, 70)
    assert twin.sample()["index"].shape == index_shape(kind)
    assert buffer.sample()["index"].max() < 50


def test_pickling_leaves_out_what_the_storage_has():
    buffer = make(capacity=5_000)
    buffer.extend(make_transitions(5_000))
    buffer.sample()
    assert len(pickle.dumps(buffer.sampler)) < 2_000


def _extend_from_outside(buffer, pipe):
    torch.set_num_threads(1)
    for seed in iter(pipe.recv, None):
        buffer.extend(make_transitions(15, seed=seed))
        pipe.send(len(buffer))


def test_writes_of_another_process_are_seen():
    buffer = make_replay_buffer(
        "nmer", k=5, storage=LazyTensorStorage(40), batch_size=8, shared=True
    )
    buffer.extend(make_transitions(30))
    buffer.sample()
    pipe, end = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_extend_from_outside, args=(buffer, end))
    process.start()
    end.close()  # so that a process that fails ends the wait for its answer
    for seed in (1, 2):
        pipe.send(seed)
        assert pipe.recv() == 40
        index = torch.arange(len(buffer.storage))
        neighbors = buffer.sampler.neighbors(buffer.storage, index)
        assert_neighbors(stored_points(buffer.storage), index, neighbors)
    pipe.send(None)
    process.join()
    assert process.exitcode == 0
    assert len(buffer.storage) == 40


def test_reading_the_buffer_by_position_mixes_nothing():
    buffer = make()
    rows = make_transitions(20)
    buffer.extend(rows)
    assert torch.equal(buffer[:]["observation"], rows["observation"])
    assert torch.equal(buffer[3]["action"], rows["action"][3])


def test_two_rows_read_by_position_are_not_a_pair():
    buffer = make()
    rows = make_transitions(2)
    buffer.extend(rows)
    assert torch.equal(buffer[:]["observation"], rows["observation"])


@pytest.mark.parametrize("kind", sorted(METHODS))
def test_rows_that_are_not_finite_do_not_spread_in_half_precision(kind):
    """1e37, the limit for other dtypes, is infinite in float16."""
    rows = make_transitions(40)
    rows["next", "done"] = rows["next", "terminated"]  # one long episode, for successors
    rows["observation"][1:] = rows["next", "observation"][:-1]
    rows = rows.apply(lambda x: x.half() if x.is_floating_point() else x)
    rows["next", "reward"][4], rows["next", "observation"][9, 1] = torch.inf, torch.nan
    bad = [4, 9]
    buffer = make(kind, capacity=40, batch_size=400)
    with warnings.catch_warnings():  # some methods say once that such rows are not mixed
        warnings.simplefilter("ignore")
        buffer.extend(rows)
        batch = buffer.sample()
    index = batch["index"].reshape(400, -1)
    anchors = index[:, 0]
    good = ~torch.isin(anchors, torch.tensor(bad))
    for key in MIX_KEYS:
        assert batch[key][good].isfinite().all(), key
    if kind in PAIR_KINDS:
        assert not torch.isin(index[good], torch.tensor(bad)).any()


def test_rows_that_gain_an_entry_need_it_from_then_on():
    rows = make_transitions(2)
    buffer = make(capacity=4)
    buffer.extend(rows)
    buffer.extend(rows.clone().set("bonus", torch.full((2, 1), 7.0)))
    with pytest.raises(KeyError, match="no entry 'bonus'"):
        buffer.extend(rows)  # the old value of a row would stay
    assert buffer.storage[:]["bonus"].flatten().tolist() == [0.0, 0.0, 7.0, 7.0]


@pytest.mark.parametrize("room", [10, 40])
def test_a_state_of_another_size_is_refused(room):
    buffer = make(capacity=20)
    buffer.extend(make_transitions(15))
    other = make(capacity=room)
    with pytest.raises(ValueError, match=f"room for 20 rows, but this one for {room}"):
        other.load_state_dict(buffer.state_dict())


@pytest.mark.parametrize("written", [7, 10, 13, 20])
def test_a_new_buffer_writes_after_the_rows_of_its_storage(written):
    buffer = make(capacity=10)
    for seed in range(written):
        buffer.add(make_transitions(1, seed=seed)[0])
    again = make(storage=buffer.storage, capacity=None)
    again.extend(make_transitions(2, seed=written))
    seeds = again.storage[:]["identity"] // 1_000
    expected = [*range(max(written - 8, 0), written), written, written]
    assert sorted(seeds.tolist()) == sorted(expected[-10:])


@pytest.mark.parametrize("kind", NEAR_KINDS)
def test_a_state_that_was_loaded_is_saved_again_before_it_is_used(kind):
    """With lists that lag behind the scale, new ones would differ."""
    buffer = make(kind, capacity=900)
    buffer.extend(make_transitions(880))
    buffer.sampler.synchronize(buffer.storage)
    buffer.sampler.neighbors(buffer.storage, torch.arange(880))
    wide = make_transitions(12, seed=1)
    wide["observation"][:, 0] *= 2
    buffer.extend(wide)
    buffer.sample()
    middle, last = make(kind, capacity=900, seed=1), make(kind, capacity=900, seed=2)
    middle.load_state_dict(copy.deepcopy(buffer.state_dict()))
    saved = middle.state_dict()
    assert {*saved["_sampler"]} == {*buffer.state_dict()["_sampler"]}
    last.load_state_dict(copy.deepcopy(saved))
    for _ in range(5):
        assert_same_batch(last.sample(), buffer.sample())


def test_ensemble_of_buffers():
    members = [make(seed=seed) for seed in range(2)]
    for seed, member in enumerate(members):
        member.extend(make_transitions(30, seed=seed))
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=8)
    batch = ensemble.sample()
    assert batch["observation"].shape == (2, 4, 3)
    assert batch["mixup_weight"].shape == (2, 4, 1)


def test_float64_rows():
    rows = make_transitions(40)
    rows = rows.apply(lambda t: t.double() if t.is_floating_point() else t)
    rows["observation"] = rows["observation"] * 1e-7 + 1.0
    buffer = make()
    buffer.extend(rows)
    index = torch.arange(40)
    points = stored_points(buffer.storage)
    assert_neighbors(points, index, buffer.sampler.neighbors(buffer.storage, index))
    assert buffer.sample()["observation"].dtype == torch.float64


@pytest.mark.parametrize("kind", METHODS)
def test_an_empty_state_has_the_storage_read_anew_and_forgets_nothing_else(kind):
    buffer = make(kind, capacity=50)
    rows = make_transitions(80)
    rows["observation"][1:] = rows["next", "observation"][:-1]
    buffer.extend(rows[:50])
    buffer.extend(rows[50:])  # wraps
    buffer.sample()
    before, index = buffer.sampler.state_dict(), torch.arange(50)
    if kind == "ct":
        followed = buffer.sampler.successors(buffer.storage, index)
        assert followed[49] == 0  # around the end of the ring
    buffer.sampler.load_state_dict({})
    buffer.sample()
    assert buffer.sampler.state_dict().keys() == before.keys()
    if kind == "ct":
        assert torch.equal(buffer.sampler.successors(buffer.storage, index), followed)
    if kind == "per":
        assert torch.equal(buffer.sampler.state_dict()["powers"], before["powers"])
