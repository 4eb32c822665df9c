"""What a batch of each kind is by its definition, recomputed in float64 from what is stored."""

import torch
from helpers import MIX_KEYS, distances_to, oracle_distances, oracle_scale
from oracles import slow_prediction
from tensordict import TensorDictBase
from torch import Tensor

from nmer_torchrl.neighbors import NeighborGraph

TIE = 1e-6  # standard deviations that the default graph, in float32, may not tell apart
NEAR = ("1nn", "nmer", "per_nmer", "neighborhood", "gp", "interpolated_rewards")
PAIRS = ("mixup", "1nn", "nmer", "per_nmer", "ct", "tuned_ct")
REWARD, NEXT, ENDED = ("next", "reward"), ("next", "observation"), ("next", "terminated")
OTHERS = ("identity", ENDED, ("next", "done"))


class Stored:
    """The rows of a storage `[n]`, which of them are finite, and Z-scored points of those."""

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
        """Of the entry, float64; zero where all that is left is rounding."""
        entry = self.rows[key][self.usable].double()
        if not len(entry):
            return entry.sum(0)
        std = entry.std(0, correction=0)
        return torch.where(std > (1e-8 * entry.abs().amax(0)).clamp_min(1e-30), std, 0.0)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_near(actual: Tensor, expected: Tensor, size: Tensor, share: float = 1e-5) -> None:
    """Within a share of the size of what it was computed from."""
    bound = share * size + 1e-37  # denormal numbers have few digits
    assert ((actual.double() - expected).abs() <= bound).all(), (actual, expected)


def nearest_first(stored: Stored, index: Tensor, neighbors: Tensor) -> float:
    """The share of `[q, k]` neighbours that are as near as the definition's k-th."""
    k = neighbors.shape[1]
    limit = oracle_distances(stored.points, index, k, stored.scale)[:, -1:]
    found = distances_to(stored.points, index, neighbors, stored.scale) <= limit * (1 + 1e-6) + TIE
    return float((found | limit.isinf()).double().mean())


def successors(stored: Stored, newest: int) -> Tensor:
    """Positions `[n]` to those of the rows that followed them, -1 where none did.

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
    """Raises if a row is not what its definition says; returns the share of right partners."""
    index = batch["index"]
    assert ((index >= 0) & (index < len(stored.rows))).all()
    anchor = stored.rows[index.reshape(len(batch), -1)[:, 0]]
    if kind != "mixreg":
        for key in OTHERS:
            assert_equal(batch[key], anchor[key])
    if kind in ("uniform", "per", "ero"):
        for key in MIX_KEYS:
            assert_equal(batch[key], anchor[key])
        if kind == "ero" and (state := buffer.sampler.state_dict())["chosen"]:
            kept = state["_kept"][: len(stored.rows)]
            assert kept[index].all() or not kept.any()
        return 1.0
    if kind in ("s4rl", "ras", "noisy"):
        {"s4rl": _check_state, "ras": _check_amplitude, "noisy": _check_noise}[kind](
            batch, anchor, stored, buffer
        )
        return 1.0
    if kind in ("neighborhood", "gp"):
        _check_neighborhood(kind, batch, stored, buffer)
    else:
        _check_pairs(kind, batch, stored)
    return _right_partners(kind, index, stored, buffer, newest)


def _right_partners(kind: str, index: Tensor, stored: Stored, buffer, newest: int) -> float:
    anchor, partner = index[:, :1], index[:, 1:]
    none = partner == anchor
    others = stored.usable.sum() - stored.usable[anchor].long()
    assert (stored.usable[partner] | none).all()
    if kind in ("ct", "tuned_ct"):
        expected = successors(stored, newest)[anchor]
        assert_equal(partner, torch.where(expected < 0, anchor, expected))
        return 1.0
    if kind in ("mixup", "mixreg"):
        assert (none == ((others == 0) | ~stored.usable[anchor])).all()
        return 1.0
    # Of k places, those are empty for which there is no other row; a pair has none only then.
    k = buffer.sampler.k
    there = torch.where(stored.usable[anchor], others.clamp_max(k), 0)
    missing = none.sum(1, keepdim=True)
    assert (missing == (k - there if partner.shape[1] == k and k > 1 else there == 0)).all()
    limit = oracle_distances(stored.points, anchor[:, 0], k, stored.scale)
    limit = limit.masked_fill(limit.isinf(), -1.0).amax(1, keepdim=True)
    search = buffer.sampler.unit.neighborhood.search
    proven = not isinstance(search, NeighborGraph) or search.exact
    reach = limit * (1 + 1e-6) + (0.0 if proven else TIE)
    far = distances_to(stored.points, anchor[:, 0], partner, stored.scale) > reach
    return 1.0 - float((far & ~none).double().mean())


def _check_pairs(kind: str, batch: TensorDictBase, stored: Stored) -> None:
    index, weight = batch["index"], batch["mixup_weight"].double()
    pair, finite = stored.rows[index], stored.finite[index].all(1)
    assert ((weight >= 0) & (weight <= 1)).all()
    alone = weight.squeeze(1) == 1
    assert (alone | (index[:, 0] == index[:, 1]))[~finite].all()
    keys = {"mixreg": MIX_KEYS[:2], "interpolated_rewards": (REWARD,)}.get(kind, MIX_KEYS)
    if kind == "mixreg":
        member = batch["mixup_member"].squeeze(1)
        assert (member[alone] == 0).all()
        chosen = pair[torch.arange(len(batch)), member]
    else:
        chosen = pair[:, 0]
        assert alone[pair[ENDED].any(1).squeeze(1)].all()
    if kind == "interpolated_rewards":
        assert ((weight == 0.5) | (weight == 1)).all()
    for key in (*MIX_KEYS, *OTHERS):
        if key not in keys:
            assert_equal(batch[key], chosen[key])
            continue
        assert_equal(batch[key][alone], pair[key][alone, 0])
        first, second = pair[key][~alone].double().unbind(1)
        share = weight[~alone]
        expected = share * first + (1 - share) * second
        assert_near(batch[key][~alone], expected, torch.maximum(first.abs(), second.abs()))


def _check_neighborhood(kind: str, batch: TensorDictBase, stored: Stored, buffer) -> None:
    index, weight = batch["index"], batch["mixup_weight"].double()
    hood = stored.rows[index]
    assert (weight >= 0).all()
    torch.testing.assert_close(weight.sum(1), torch.ones(len(batch)).double(), rtol=0, atol=1e-5)
    alone = (weight[:, 0] == 1) & (weight[:, 1:] == 0).all(1)
    assert alone[hood[ENDED].any(1).squeeze(1) | ~stored.usable[index].all(1)].all()
    mixed = MIX_KEYS if kind == "neighborhood" else MIX_KEYS[:2]
    for key in MIX_KEYS:
        assert_equal(batch[key][alone], hood[key][alone, 0])
    for key in mixed:
        rows = hood[key][~alone].double()
        expected = (weight[~alone].unsqueeze(-1) * rows).sum(1)
        assert_near(batch[key][~alone], expected, 4 * rows.abs().amax(1))
    if kind == "gp":
        for row in (~alone).nonzero().squeeze(1)[:3].tolist():
            _check_prediction(batch[row], hood[row].double(), stored.scale, buffer)


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
    for key in MIX_KEYS[1:]:
        assert_equal(batch[key], anchor[key])
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
    for key in MIX_KEYS:
        if key in ("observation", NEXT):
            expected = anchor[key].double() * factor.double()
            assert_near(batch[key][finite], expected[finite], expected[finite].abs())
            assert_equal(batch[key][~finite], anchor[key][~finite])
        else:
            assert_equal(batch[key], anchor[key])


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
