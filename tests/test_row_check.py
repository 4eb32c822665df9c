"""Rows that do not fit are refused before anything is stored."""

import pytest
import torch
from helpers import make_transitions

from nmer_torchrl import make_replay_buffer
from nmer_torchrl.methods import METHODS


def with_entry(key, change):
    rows = make_transitions(3, seed=5)
    rows[key] = change(rows[key])
    return rows


def without(key):
    rows = make_transitions(3, seed=5)
    del rows[key]
    return rows


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("restored", [False, True])
def test_rows_that_do_not_fit_leave_the_buffer_as_it_was(kind, restored):
    buffer = make_replay_buffer(kind, capacity=20, batch_size=8)
    buffer.extend(make_transitions(10))
    if restored:
        state = buffer.state_dict()
        buffer = make_replay_buffer(kind, capacity=20, batch_size=8)
        buffer.load_state_dict(state)
    before, cursor = buffer.storage[:].clone(), buffer.writer.state_dict()
    reward, ended = ("next", "reward"), ("next", "terminated")
    for rows, words in (
        (with_entry("observation", lambda x: x[:, :1]), r"'observation' has shape \(1,\)"),
        (with_entry("observation", lambda x: x.double()), "'observation' is torch.float64"),
        (with_entry(reward, lambda x: x.squeeze(1)), r"'reward'\) has shape \(\)"),
        (with_entry(ended, lambda x: x.expand(3, 2)), r"'terminated'\) has shape \(2,\)"),
        (with_entry(ended, lambda x: x.float()), r"'terminated'\) is torch.float32"),
        (with_entry("identity", lambda x: x.unsqueeze(1)), r"'identity' has shape \(1,\)"),
        (without("identity"), "no entry 'identity'"),
        (make_transitions(3).reshape(3, 1), r"batch of shape \(3, 1\)"),
    ):
        with pytest.raises((ValueError, KeyError), match=words):
            buffer.extend(rows)
        if rows.ndim == 1:
            with pytest.raises((ValueError, KeyError), match=words):
                buffer.add(rows[0])
            with pytest.raises((ValueError, KeyError), match=words):
                buffer[torch.arange(3)] = rows
        assert buffer.writer.state_dict() == cursor
        assert (buffer.storage[:] == before).all()
    rows = make_transitions(3, seed=6)
    rows["more"] = torch.ones(3)  # may come later, and is needed from then on
    buffer.extend(rows)
    with pytest.raises(KeyError, match="no entry 'more'"):
        buffer.extend(make_transitions(3, seed=7))
    buffer.extend(rows)
    assert len(buffer) == 16
    assert buffer.sample()["identity"].shape == (8,)
