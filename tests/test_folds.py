"""The contract of folds, for each fold in `FOLDS`, and tests of single folds.

A new fold is added to `FOLDS`.
"""

import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from helpers import MIX_KEYS, make_transitions
from tensordict import TensorDict, tensorclass
from torchrl.modules import MLP, ValueOperator

from nmer_torchrl import PairMixup, make_replay_buffer, transforms
from nmer_torchrl.transforms import (
    Fold,
    Fraction,
    GaussianProcessMixup,
    LinearFraction,
    MeanMixup,
    MixReg,
    NeighborhoodMixup,
    RewardMean,
    TunedMixup,
)

NEXT, REWARD, ENDED = ("next", "observation"), ("next", "reward"), ("next", "terminated")
OTHERS = ("identity", ENDED, ("next", "done"))
N = 64


class Plain:
    """Measures unscaled observations and actions."""

    def embed(self, batch):
        parts = [batch[key].flatten(batch.ndim) for key in ("observation", "action")]
        return torch.cat(parts, -1).double()


@dataclass(frozen=True)
class Case:
    """Holds a fold, and which parts of the contract it has."""

    make: Callable[..., Fold]
    combined: tuple = MIX_KEYS  # entries that are the weighted sum of those of the rows
    varies: bool = True  # whether its weights are random
    exact: bool = True  # whether equal rows give the same row to the bit
    beside: tuple = ()  # of `keys`, what it needs besides those of a test
    outcomes: tuple = ()  # what it needs as `value_keys`

    @property
    def pairs(self) -> bool:
        """Returns whether it folds pairs, rather than groups of any number."""
        return self.make().width == 2

    @property
    def width(self) -> int:
        """Returns how many rows become one."""
        return 2 if self.pairs else 5

    @property
    def mixes(self) -> str:
        """Returns the name of its argument for the entries that it mixes."""
        return "keys" if self.takes("keys") else self.make().argument

    def takes(self, argument: str) -> bool:
        return argument in inspect.signature(self.make).parameters

    def of(self, keys) -> Fold:
        """Builds the fold of these entries, which keeps all others on purpose."""
        given = {self.mixes: (*self.beside, *keys)}
        if self.outcomes:
            given["value_keys"] = self.outcomes
        if self.takes("anchor_keys"):
            mixed = {*self.beside, *keys, *self.outcomes}
            given["anchor_keys"] = [key for key in MIX_KEYS if key not in mixed]
        return self.make(**given)


FOLDS = {
    "PairMixup": Case(PairMixup),
    "MeanMixup": Case(MeanMixup, varies=False),
    "TunedMixup": Case(partial(TunedMixup, hidden=(8,)), outcomes=(REWARD,)),
    "MixReg": Case(MixReg, combined=("observation", "action")),
    "RewardMean": Case(RewardMean, combined=(REWARD,), varies=False),
    "NeighborhoodMixup": Case(NeighborhoodMixup),
    "GaussianProcessMixup": Case(
        partial(GaussianProcessMixup, geometry=Plain()),
        combined=("observation", "action"),
        exact=False,
        beside=("observation",),
        outcomes=(NEXT, REWARD),
    ),
}


@pytest.fixture(params=FOLDS)
def case(request) -> Case:
    return FOLDS[request.param]


def over(*arguments, exact=False):
    """Restricts a test to the folds that take these arguments."""
    held = {
        name: case
        for name, case in FOLDS.items()
        if all(map(case.takes, arguments)) and (case.exact or not exact)
    }
    return pytest.mark.parametrize("case", held.values(), ids=held)


def make_rows(n: int = N, width: int = 2, **options) -> TensorDict:
    """Builds anchors and their partners, `[n, width]`."""
    return torch.stack([make_transitions(n, seed=seed, **options) for seed in range(width)], 1)


def weights(batch, case: Case):
    """Returns the weight of each row, `[n, width]`, in float64."""
    weight = batch["mixup_weight"].double()
    return torch.cat([weight, 1 - weight], -1) if case.pairs else weight


def members(batch):
    """Returns whose unmixed entries a row has: the anchor's, unless the fold differs."""
    return batch.get("mixup_member", torch.zeros(len(batch), 1, dtype=torch.int64))[:, 0]


def assert_anchors(batch, rows, case: Case, which) -> None:
    """Checks that these rows are exactly the anchors, with weight 1."""
    for key in (*MIX_KEYS, *OTHERS):
        torch.testing.assert_close(
            batch[key][which], rows[key][which, 0], rtol=0, atol=0, equal_nan=True
        )
    alone = torch.eye(case.width, dtype=torch.float64)[0]
    assert (weights(batch, case)[which] == alone).all()


# -- the contract ----------------------------------------------------------------------------------


def test_every_fold_is_held_to_the_contract():
    for name, kind in inspect.getmembers(transforms, inspect.isclass):
        if issubclass(kind, Fold) and kind is not Fold:
            assert name in FOLDS, f"add {name} to FOLDS in tests/test_folds.py"
            assert type(FOLDS[name].make()) is kind


def test_mixed_entries_are_the_weighted_sum_within_the_bounds_of_their_rows(case):
    rows = make_rows(width=case.width)
    batch = case.make()(rows.clone())
    weight = weights(batch, case)
    assert batch.batch_size == (N,)
    assert ((weight >= 0) & (weight <= 1)).all()
    torch.testing.assert_close(weight.sum(-1), torch.ones(N, dtype=torch.float64))
    assert (weight[:, 0] < 1).sum() > N - 5  # a weight may round to 1
    for key in case.combined:
        expected = (weight.unsqueeze(-1) * rows[key].double()).sum(1)
        torch.testing.assert_close(batch[key].double(), expected, rtol=1e-5, atol=1e-5)
        assert (batch[key] >= rows[key].amin(1) - 1e-5).all()
        assert (batch[key] <= rows[key].amax(1) + 1e-5).all()


def test_all_else_is_one_members_and_what_was_read_is_left_alone(case):
    rows = make_rows(width=case.width, terminated=0.1)
    before = rows.clone()
    batch = case.make()(rows)
    for key in {*MIX_KEYS, *OTHERS} - {*case.make().mix_keys}:
        assert torch.equal(batch[key], before[key][torch.arange(N), members(batch)])
        assert batch[key].dtype == before[key].dtype
    assert (rows == before).all()


def test_a_row_beside_copies_of_itself_stays_itself(case):
    rows = torch.stack([make_transitions(N)] * case.width, 1)
    batch, slack = case.make()(rows), 0.0 if case.exact else 1e-5
    for key in (*MIX_KEYS, *OTHERS):
        torch.testing.assert_close(batch[key], rows[key][:, 0], rtol=slack, atol=slack)


@over("terminated_key")
@pytest.mark.parametrize("side", [0, -1])
def test_a_terminal_row_leaves_the_anchor_untouched(case, side):
    rows = make_rows(width=case.width)
    rows["next", "done"][:] = True  # a time limit is not a terminal state
    rows[ENDED][:20, side] = True
    batch = case.make()(rows.clone())
    ended = torch.arange(N) < 20
    assert_anchors(batch, rows, case, ended)
    assert (batch["mixup_weight"][~ended, 0] < 1).all()


@over("terminated_key")
def test_targets_of_different_lookahead_are_not_mixed(case):
    rows = make_rows(width=case.width)
    steps = torch.full((N, case.width, 1), 3)
    steps[:10, -1] = 2
    nonterminal = torch.ones(N, case.width, 1, dtype=torch.bool)
    nonterminal[10:20, 0] = False
    rows["steps_to_next_obs"], rows["nonterminal"] = steps, nonterminal
    batch = case.make()(rows.clone())
    assert_anchors(batch, rows, case, torch.arange(N) < 20)
    assert (batch["mixup_weight"][20:, 0] < 1).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", [0, -1])
def test_a_row_that_is_not_finite_is_never_mixed_and_never_spreads(case, bad, side):
    for key in case.make().mix_keys:
        rows, spoiled = make_rows(width=case.width), torch.arange(N) == 7
        rows[key][7, side, 0] = bad
        if case.takes("terminated_key") and side:  # weight 1 times NaN must not leak either
            rows[ENDED][7, 0] = True
        batch = case.make()(rows.clone())
        assert_anchors(batch, rows, case, spoiled)
        for other in MIX_KEYS:
            assert batch[other][~spoiled].isfinite().all()


@over(exact=True)
def test_a_mix_that_would_overflow_is_not_made(case):
    for key in case.make().mix_keys:
        rows = make_rows(width=case.width)
        rows[key][3, :2, 0] = torch.tensor([3e38, -3e38])
        assert_anchors(case.make()(rows.clone()), rows, case, torch.arange(N) == 3)


def test_batches_that_were_not_drawn_pass_as_they_are(case):
    fold, rows = case.make(), make_transitions(10)
    single = rows[0]
    assert fold(rows) is rows
    assert fold(single) is single
    if case.pairs:
        triples = torch.stack([rows, rows, rows], 1)
        assert fold(triples) is triples


def test_leading_dimensions_are_kept(case):
    rows = torch.stack([make_rows(8, case.width), make_rows(8, case.width)])
    batch = case.make()(rows)
    assert batch.batch_size == (2, 8)
    assert batch["mixup_weight"].shape == (2, 8, 1 if case.pairs else case.width)


def test_keys_may_be_nested_and_several_and_of_any_shape(case):
    rows = make_rows(16, case.width)
    camera, heat = torch.randn(16, case.width, 4, 3), torch.randn(16, case.width).double()
    rows["agent"] = TensorDict(camera=camera, batch_size=[16, case.width])
    rows["heat"] = heat
    batch = case.of([("agent", "camera"), "heat"])(rows.clone())
    weight = weights(batch, case)
    assert batch["heat"].dtype == torch.float64
    torch.testing.assert_close(batch["heat"], (weight * heat).sum(1), rtol=1e-6, atol=1e-6)
    expected = (weight[..., None, None] * camera).sum(1).float()
    torch.testing.assert_close(batch["agent", "camera"], expected, rtol=1e-5, atol=1e-5)


def test_entries_within_a_tensorclass_are_mixed(case):
    @tensorclass
    class Robot:
        joints: torch.Tensor
        serial: torch.Tensor

    rows = make_rows(16, case.width)
    joints = torch.randn(16, case.width, 4)
    serial = torch.arange(16 * case.width).reshape(16, case.width)
    rows["robot"] = Robot(joints=joints, serial=serial, batch_size=[16, case.width])
    batch = case.of([("robot", "joints")])(rows)
    assert isinstance(batch["robot"], Robot)
    expected = (weights(batch, case).unsqueeze(-1) * joints).sum(1).float()
    torch.testing.assert_close(batch["robot"].joints, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(batch["robot"].serial, serial[torch.arange(16), members(batch)])


@over("generator")
def test_all_randomness_is_that_of_the_generator_and_is_saved(case):
    def make(seed):
        gates = (
            {"gates": [Fraction(LinearFraction(1.0, 0.0, 10 * N))]} if case.takes("gates") else {}
        )
        return case.make(generator=torch.Generator().manual_seed(seed), **gates)

    rows = make_rows(width=case.width)
    state = torch.get_rng_state()
    fold, same, other = make(1), make(1), make(2)
    for _ in range(2):
        assert (fold(rows.clone()) == same(rows.clone())).all()
    other(rows.clone())
    other.load_state_dict(fold.state_dict())
    twin = pickle.loads(pickle.dumps(fold))
    batches = [fold(rows.clone()) for _ in range(2)]
    for one in (other, twin):
        for expected in batches:
            assert (one(rows.clone()) == expected).all()
    assert (batches[0]["mixup_weight"] != batches[1]["mixup_weight"]).any() or not case.varies
    assert torch.equal(torch.get_rng_state(), state)
    case.make().load_state_dict(fold.state_dict())  # no generator of its own: nothing to restore
    later, seeded = case.make(), case.make(generator=torch.Generator().manual_seed(1))
    later.generator = torch.Generator().manual_seed(1)
    assert (later(rows.clone()) == seeded(rows.clone())).all()


@over("gates")
def test_gates_hold_back_what_any_of_them_does_and_change_no_other_weight(case):
    def first(batch, generator):
        return torch.arange(len(batch)) < 40

    def second(batch, generator):
        assert batch.shape == (N, case.width)
        return torch.rand(len(batch), generator=generator) < 0.5

    rows = make_rows(width=case.width)
    plain, gated = (
        case.make(gates=gates, generator=torch.Generator().manual_seed(0))(rows.clone())
        for gates in ((), [first, second])
    )
    mixed = gated["mixup_weight"][:, 0] < 1
    assert 0 < mixed[:40].sum() < 40
    assert not mixed[40:].any()
    assert_anchors(gated, rows, case, ~mixed)
    for key in (*MIX_KEYS, "mixup_weight"):
        assert torch.equal(gated[key][mixed], plain[key][mixed])
    with pytest.raises(TypeError, match=r"`gates` holds 0\.5, which is not callable"):
        case.make(gates=[0.5])


@pytest.mark.parametrize("stored", [True, False])
def test_entries_that_are_not_continuous_or_not_there_are_named(case, stored):
    def use(fold):
        return (
            fold._inv_call(make_transitions(4)) if stored else fold.fold(make_rows(4, case.width))
        )

    with pytest.raises(ValueError, match=r"'identity' is torch.int64; leave it out"):
        use(case.of(["identity"]))
    with pytest.raises(KeyError, match=r"'obs'.*'action'.*'observation'"):
        use(case.of(["obs"]))
    with pytest.raises(
        ValueError, match=r"'next' is a TensorDict, not a tensor.*\[\('next', ...\)\]"
    ):
        use(case.of(("next", "action")))
    if case.takes("terminated_key"):
        with pytest.raises(KeyError, match=r"'ended'.*'terminated'"):
            use(case.make(terminated_key="ended"))


def test_rows_of_several_dimensions_are_refused(case):
    with pytest.raises(ValueError, match=r"shape \(2, 2\).*data.reshape\(-1\)"):
        case.make()._inv_call(make_transitions(4).reshape(2, 2))


def test_what_is_no_key_is_refused(case):
    with pytest.raises(ValueError, match=r"is empty|None of the keys \(\) is an observation"):
        case.make(**{case.mixes: []})
    for keys in ([3], [["next", 1]], [("a", 1)]):
        with pytest.raises(TypeError, match="not a key"):
            case.make(**{case.mixes: keys})


@over("alpha")
@pytest.mark.parametrize("alpha", [0, -1.0, float("nan"), float("inf")])
def test_bad_alpha_is_named(case, alpha):
    with pytest.raises(ValueError, match=rf"alpha={alpha}.*above 0"):
        case.make(alpha=alpha)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_discrete_actions_of_any_dtype_are_refused(dtype):
    rows = make_rows()
    rows["action"] = rows["action"].to(dtype)
    with pytest.raises(ValueError, match=rf"'action' is {dtype}, that is, a discrete action"):
        PairMixup()(rows)


# -- means -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fold", [MeanMixup, RewardMean])
def test_weights_of_a_mean_are_one_half(fold):
    assert (fold()(make_rows())["mixup_weight"] == 0.5).all()


def test_terminal_rows_are_mixed_where_no_flag_is_named():
    assert (MeanMixup(terminated_key=None)(make_rows(terminated=0.5))["mixup_weight"] == 0.5).all()


def test_interpolated_rewards_come_from_neighbors():
    buffer = make_replay_buffer("interpolated_rewards", capacity=100, batch_size=32, k=3)
    buffer.extend(make_transitions(80))
    batch = buffer.sample()
    anchor, partner = batch["index"].unbind(1)
    neighbors = buffer.sampler.neighbors(buffer.storage, anchor)
    assert neighbors.shape == (32, 3)
    assert (neighbors == partner.unsqueeze(1)).any(1).all()
    reward = buffer.storage[:][REWARD]
    torch.testing.assert_close(batch[REWARD], (reward[anchor] + reward[partner]) / 2)


# -- mixreg ----------------------------------------------------------------------------------------


def test_mixreg_takes_the_supervision_of_one_member_also_of_terminal_ones():
    rows = make_rows(terminated=0.3)
    batch = MixReg(0.75)(rows.clone())
    member = batch["mixup_member"].squeeze(1)
    assert set(member.tolist()) == {0, 1}
    assert (batch["mixup_weight"] < 1).all()
    for key in (NEXT, REWARD, *OTHERS):
        assert torch.equal(batch[key], rows[key][torch.arange(N), member])


def test_mixreg_takes_the_anchors_supervision_as_often_as_its_weight_says():
    batch = MixReg(1.0, generator=torch.Generator().manual_seed(0))(make_rows(20_000))
    weight, anchors = batch["mixup_weight"].squeeze(1), 1.0 - batch["mixup_member"].squeeze(1)
    for part in range(5):
        inside = (weight * 5).long() == part
        error = (weight[inside].var() + 0.25) ** 0.5 / inside.sum() ** 0.5
        assert (anchors[inside].mean() - weight[inside].mean()).abs() < 4 * error


def test_mixreg_has_on_average_the_gradient_of_the_mixed_target():
    """Compares the squared error of many folds of a pair with the loss of mixed targets."""
    torch.manual_seed(3)
    critic = ValueOperator(
        MLP(in_features=5, out_features=1, num_cells=[8]).double(),
        in_keys=["observation", "action"],
    )
    pair = make_rows(1).double()

    def q(rows):
        return critic(rows.clone())["state_action_value"]

    targets = pair[REWARD] + 0.9 * pair[NEXT].sum(-1, keepdim=True).tanh()
    batch = MixReg(1.0, generator=torch.Generator().manual_seed(0))(pair.expand(40_000, 2).clone())
    weight = batch["mixup_weight"].double()
    drawn = batch[REWARD] + 0.9 * batch[NEXT].sum(-1, keepdim=True).tanh()
    mixed = weight * targets[:, 0] + (1 - weight) * targets[:, 1]
    parameters = list(critic.parameters())
    slope = torch.autograd.grad(((q(batch) - drawn) ** 2).mean(), parameters)
    expected = torch.autograd.grad(((q(batch) - mixed) ** 2).mean(), parameters)
    for found, right in zip(slope, expected, strict=True):
        assert (found - right).norm() < 0.05 * right.norm() + 0.02
