"""Definitions of each method's batch, recomputed in float64 from the stored rows.

A new method is added to `DEFINITIONS`, at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from helpers import MIX_KEYS, distances_to, oracle_distances, oracle_scale
from oracles import slow_prediction
from tensordict import TensorDictBase
from torch import Tensor

from nmer_torchrl.neighbors import NeighborGraph

TIE = 1e-6  # standard deviations that the default graph, in float32, may not tell apart
REWARD, NEXT, ENDED = ("next", "reward"), ("next", "observation"), ("next", "terminated")
OTHERS = ("identity", ENDED, ("next", "done"))


class Stored:
    """Holds the rows of a storage `[n]`, flags of the finite ones, and their Z-scored points."""

    def __init__(self, rows: TensorDictBase) -> None:
        self.rows = rows
        wide = torch.cat([rows[key].flatten(1) for key in MIX_KEYS], 1)
        self.usable = (wide.abs() <= 1e37).all(1)
        self.finite = wide.isfinite().all(1)
        points = torch.cat([rows[key].flatten(1) for key in ("observation", "action")], 1).double()
        self.points = points.masked_fill(~self.usable.unsqueeze(1), torch.nan)
        finite = self.points[self.usable]
        self.scale = oracle_scale(finite) if len(finite) else torch.ones_like(points[0])

    def spread(self, key) -> Tensor:
        """Returns the spread of the entry in float64; zero if only rounding is left."""
        entry = self.rows[key][self.usable].double()
        if not len(entry):
            return entry.sum(0)
        std = entry.std(0, correction=0)
        return torch.where(std > (1e-8 * entry.abs().amax(0)).clamp_min(1e-30), std, 0.0)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_near(actual: Tensor, expected: Tensor, size: Tensor, share: float = 1e-5) -> None:
    """Checks that the difference is small relative to the numbers it was computed from."""
    bound = share * size + 1e-37  # denormal numbers have few digits
    assert ((actual.double() - expected).abs() <= bound).all(), (actual, expected)


def nearest_first(stored: Stored, index: Tensor, neighbors: Tensor) -> float:
    """Returns the share of `[q, k]` neighbors that are as near as the definition's k-th."""
    k = neighbors.shape[1]
    limit = oracle_distances(stored.points, index, k, stored.scale)[:, -1:]
    found = distances_to(stored.points, index, neighbors, stored.scale) <= limit * (1 + 1e-6) + TIE
    return float((found | limit.isinf()).double().mean())


def successors(stored: Stored, newest: int) -> Tensor:
    """Maps positions `[n]` to those of the rows that followed them; -1 if there is none.

    Of rows in order of writing: the first later one that starts from the very state in which a row
    ends, unless one between the two ends in that state as well.
    """
    rows, n = stored.rows, len(stored.rows)
    ended = (rows[ENDED] | rows["next", "done"]).squeeze(1)
    goes_on = stored.usable & ~ended
    rank = (torch.arange(n) - newest - 1) % n
    start, end = rows["observation"], rows[NEXT]
    later = rank.unsqueeze(0) > rank.unsqueeze(1)
    joins = (end.unsqueeze(1) == start.unsqueeze(0)).all(-1) & later & goes_on.unsqueeze(1)
    joins &= stored.usable
    again = (end.unsqueeze(1) == end.unsqueeze(0)).all(-1) & later & goes_on
    first = torch.where(joins, rank, n).min(1)
    closed = torch.where(again, rank, n).amin(1) < first.values
    return torch.where((first.values < n) & ~closed, first.indices, -1)


def check_batch(kind: str, batch: TensorDictBase, stored: Stored, buffer, newest: int) -> float:
    """Raises if a row does not follow its definition; returns the share of correct partners."""
    assert kind in DEFINITIONS, f"say in tests/reliability/definitions.py what a batch of {kind} is"
    definition, index = DEFINITIONS[kind], batch["index"]
    assert ((index >= 0) & (index < len(stored.rows))).all()
    anchor = stored.rows[index.reshape(len(batch), -1)[:, 0]]
    for key in definition.keeps:
        assert_equal(batch[key], anchor[key])
    if definition.rows is not None:
        definition.rows(batch, anchor, stored, buffer)
    if definition.partners is None:
        return 1.0
    anchor, partner = index[:, :1], index[:, 1:]
    assert (stored.usable[partner] | (partner == anchor)).all()
    return definition.partners(anchor, partner, stored, buffer, newest)


# -- partners `[B, m]` of anchors `[B, 1]`; each returns the share of right ones -------------------


def _others(anchor: Tensor, stored: Stored) -> Tensor:
    """Returns how many rows could be partners of each anchor."""
    return stored.usable.sum() - stored.usable[anchor].long()


def _successor(anchor: Tensor, partner: Tensor, stored: Stored, buffer, newest: int) -> float:
    expected = successors(stored, newest)[anchor]
    assert_equal(partner, torch.where(expected < 0, anchor, expected))
    return 1.0


def _any_row(anchor: Tensor, partner: Tensor, stored: Stored, buffer, newest: int) -> float:
    alone = (_others(anchor, stored) == 0) | ~stored.usable[anchor]
    assert ((partner == anchor) == alone).all()
    return 1.0


def _neighbor(anchor: Tensor, partner: Tensor, stored: Stored, buffer, newest: int) -> float:
    # Of k places, those are empty for which there is no other row; a pair has none only then.
    k, none = buffer.sampler.k, partner == anchor
    there = torch.where(stored.usable[anchor], _others(anchor, stored).clamp_max(k), 0)
    missing = none.sum(1, keepdim=True)
    assert (missing == (k - there if partner.shape[1] == k and k > 1 else there == 0)).all()
    limit = oracle_distances(stored.points, anchor[:, 0], k, stored.scale)
    limit = limit.masked_fill(limit.isinf(), -1.0).amax(1, keepdim=True)
    search = buffer.sampler.unit.search
    proven = not isinstance(search, NeighborGraph) or search.exact
    reach = limit * (1 + 1e-6) + (0.0 if proven else TIE)
    far = distances_to(stored.points, anchor[:, 0], partner, stored.scale) > reach
    return 1.0 - float((far & ~none).double().mean())


# -- rows ------------------------------------------------------------------------------------------


def _check_choice(batch, anchor, stored, buffer) -> None:
    if (state := buffer.sampler.state_dict())["chosen"]:
        kept = state["_kept"][: len(stored.rows)]
        assert kept[batch["index"]].all() or not kept.any()


def _check_pairs(batch, anchor, stored, buffer, *, keys=MIX_KEYS, member=False, mean=False) -> None:
    index, weight = batch["index"], batch["mixup_weight"].double()
    pair, finite = stored.rows[index], stored.finite[index].all(1)
    assert ((weight >= 0) & (weight <= 1)).all()
    assert not mean or ((weight == 0.5) | (weight == 1)).all()
    alone = weight.squeeze(1) == 1
    assert (alone | (index[:, 0] == index[:, 1]))[~finite].all()
    if member:  # of which all that is not mixed is taken
        member = batch["mixup_member"].squeeze(1)
        assert (member[alone] == 0).all()
        anchor = pair[torch.arange(len(batch)), member]
    else:
        assert alone[pair[ENDED].any(1).squeeze(1)].all()
    for key in (*MIX_KEYS, *OTHERS):
        if key not in keys:
            assert_equal(batch[key], anchor[key])
            continue
        assert_equal(batch[key][alone], pair[key][alone, 0])
        first, second = pair[key][~alone].double().unbind(1)
        share = weight[~alone]
        expected = share * first + (1 - share) * second
        assert_near(batch[key][~alone], expected, torch.maximum(first.abs(), second.abs()))


def _check_neighborhood(batch, anchor, stored, buffer, *, mixed=MIX_KEYS) -> Tensor:
    """Checks a batch of neighborhoods; returns where the anchor was kept."""
    index, weight = batch["index"], batch["mixup_weight"].double()
    hood = stored.rows[index]
    assert (weight >= 0).all()
    torch.testing.assert_close(weight.sum(1), torch.ones(len(batch)).double(), rtol=0, atol=1e-5)
    alone = (weight[:, 0] == 1) & (weight[:, 1:] == 0).all(1)
    assert alone[hood[ENDED].any(1).squeeze(1) | ~stored.usable[index].all(1)].all()
    for key in MIX_KEYS:
        assert_equal(batch[key][alone], hood[key][alone, 0])
    for key in mixed:
        rows = hood[key][~alone].double()
        expected = (weight[~alone].unsqueeze(-1) * rows).sum(1)
        assert_near(batch[key][~alone], expected, 4 * rows.abs().amax(1))
    return alone


def _check_process(batch, anchor, stored, buffer) -> None:
    alone = _check_neighborhood(batch, anchor, stored, buffer, mixed=MIX_KEYS[:2])
    for row in (~alone).nonzero().squeeze(1)[:3].tolist():
        hood = stored.rows[batch["index"][row]].double()
        _check_prediction(batch[row], hood, stored.scale, buffer)


def _check_prediction(row, hood, scale, buffer) -> None:
    points = torch.cat([hood["observation"], hood["action"]], -1) * scale
    query = torch.cat([row["observation"], row["action"]], -1).double() * scale
    outputs = torch.cat([hood[REWARD], hood[NEXT] - hood["observation"]], -1)
    mean, _ = slow_prediction(buffer.transform[0].process, points, outputs, query)
    size = outputs.abs().amax(0)
    assert_near(row[REWARD], mean[:1], size[:1], 1e-3)
    following = row["observation"].double() + mean[1:]
    assert_near(row[NEXT], following, size[1:] + following.abs(), 1e-3)


def _check_state(batch, anchor, stored, buffer) -> None:
    weight, usable = batch["state_weight"].double(), stored.usable[batch["index"]]
    alone = weight.squeeze(1) == 1
    assert_equal(batch["observation"][alone], anchor["observation"][alone])
    first, second = anchor["observation"].double(), anchor[NEXT].double()
    expected = weight * first + (1 - weight) * second
    size = torch.maximum(first.abs(), second.abs())
    assert_near(batch["observation"][usable], expected[usable], size[usable])
    bad = ~torch.cat([first, second], 1).isfinite().all(1)
    assert alone[bad].all()


def _check_amplitude(batch, anchor, stored, buffer) -> None:
    factor, fold = batch["amplitude"], buffer.transform[0]
    one = factor == 1
    assert (one | ((factor >= fold.min_factor) & (factor <= fold.max_factor))).all()
    finite = (torch.cat([anchor["observation"], anchor[NEXT]], 1).abs() <= 1e37).all(1)
    assert one[~finite].all()
    for key in ("observation", NEXT):
        expected = anchor[key].double() * factor.double()
        assert_near(batch[key][finite], expected[finite], expected[finite].abs())
        assert_equal(batch[key][~finite], anchor[key][~finite])


def _check_noise(batch, anchor, stored, buffer) -> None:
    still = anchor[ENDED].squeeze(1) | ~stored.usable[batch["index"]]
    for key in MIX_KEYS:
        spread = stored.spread(key)
        torch.testing.assert_close(
            buffer.sampler.spread.std[key].double(), spread, rtol=1e-5, atol=1e-37
        )
        assert_equal(batch[key][still], anchor[key][still])
        noise = (batch[key] - anchor[key])[~still].double().abs()
        assert (noise <= 0.1 * 7 * spread + 1e-6 * anchor[key][~still].abs()).all()
    low, high = buffer.transform[0].action_bounds
    action = batch["action"][~still]
    assert ((action >= low) & (action <= high)).all()


# -- the definitions -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """Defines the rows of a batch, and their partners if they have any."""

    rows: Callable[..., object] | None = None
    partners: Callable[..., float] | None = None
    keeps: tuple = OTHERS  # entries that are the anchor's


STORED = Definition(keeps=(*MIX_KEYS, *OTHERS))
NEAREST = Definition(_check_pairs, _neighbor)
DEFINITIONS = {
    "uniform": STORED,
    "per": STORED,
    "mixup": Definition(_check_pairs, _any_row),
    "1nn": NEAREST,
    "nmer": NEAREST,
    "per_nmer": NEAREST,
    "neighborhood": Definition(_check_neighborhood, _neighbor),
    "gp": Definition(_check_process, _neighbor),
    "ct": Definition(_check_pairs, _successor),
    "tuned_ct": Definition(_check_pairs, _successor),
    "s4rl": Definition(_check_state, keeps=(*MIX_KEYS[1:], *OTHERS)),
    "noisy": Definition(_check_noise),
    "ras": Definition(_check_amplitude, keeps=("action", REWARD, *OTHERS)),
    "mixreg": Definition(partial(_check_pairs, keys=MIX_KEYS[:2], member=True), _any_row, ()),
    "interpolated_rewards": Definition(partial(_check_pairs, keys=(REWARD,), mean=True), _neighbor),
    "ero": Definition(_check_choice, keeps=STORED.keeps),
}
NEAR = [kind for kind, each in DEFINITIONS.items() if each.partners is _neighbor]
