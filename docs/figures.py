"""Draws the figures of the page on the method, with the package itself.

python docs/figures.py                 # writes docs/figures/*.svg
python docs/figures.py --out other     # elsewhere
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from tensordict import TensorDict
from torch import Tensor

from nmer_torchrl import make_replay_buffer
from nmer_torchrl.functional import sample_beta

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "white",  # legible on a dark page, too
    "font.size": 11,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.hashsalt": "nmer_torchrl",  # the same file for the same figure
}


def make_rows(observation: Tensor, action: Tensor, following: Tensor) -> TensorDict:
    """Builds transitions without rewards or terminations from states and actions, each `[n, d]`."""
    n = len(observation)
    return TensorDict(
        observation=observation,
        action=action,
        next=TensorDict(
            observation=following,
            reward=torch.zeros(n, 1),
            terminated=torch.zeros(n, 1, dtype=torch.bool),
            batch_size=[n],
        ),
        batch_size=[n],
    )


def make_buffer(kind: str, rows: TensorDict, *, batch_size: int, **options: int):
    """Builds a buffer of this method that holds the rows."""
    buffer = make_replay_buffer(
        kind,
        capacity=len(rows),
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(0),
        **options,
    )
    buffer.extend(rows)
    return buffer


def draw_pairing() -> Figure:
    """Draws an anchor among stored rows, its neighbors, and rows sampled from the buffer."""
    generator = torch.Generator().manual_seed(1)
    time = torch.rand(120, 1, generator=generator) * 2 * math.pi
    noise = 0.25 * torch.randn(2, 120, 1, generator=generator)
    rows = make_rows(3 * time.cos() + noise[0], (2 * time).sin() + noise[1], time)
    buffer = make_buffer("nmer", rows, batch_size=10_000, k=5)
    spread = torch.cat([rows["observation"], rows["action"]], -1).std(0)
    points = torch.cat([rows["observation"], rows["action"]], -1) / spread
    anchor = int((points - torch.tensor([0.9, 1.2])).norm(dim=-1).argmin())
    neighbors = buffer.sampler.neighbors(buffer.storage, torch.tensor([anchor]))[0]
    batch = buffer.sample()
    mixed = batch[batch["index"][:, 0] == anchor][:80]
    drawn = torch.cat([mixed["observation"], mixed["action"]], -1) / spread
    reach = float((points[neighbors] - points[anchor]).norm(dim=-1).max())

    figure = Figure(figsize=(7.6, 3.4), layout="constrained")
    whole, near = figure.subplots(1, 2)
    for axes, size in ((whole, 1), (near, 2.5)):
        axes.scatter(*points.T, s=16 * size, color=GREY, lw=0, label="stored")
        axes.scatter(*points[neighbors].T, s=24 * size, color=BLUE, lw=0, label="its 5 neighbors")
        axes.scatter(*drawn.T, s=8 * size, color=GREEN, lw=0, zorder=3, label="trained on")
        axes.scatter(
            *points[anchor], s=60 * size, color=RED, lw=0, marker="*", zorder=4, label="anchor"
        )
        axes.add_patch(Circle(points[anchor].tolist(), reach, fill=False, ls=":", ec=BLUE, lw=1.2))
        axes.set(xlabel="observation, Z-scored", aspect="equal")
    whole.set(ylabel="action, Z-scored")
    for axis, center in zip("xy", points[anchor].tolist(), strict=True):
        near.set(**{f"{axis}lim": (center - 1.3 * reach, center + 1.3 * reach)})
    handles, labels = near.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=4)
    return figure


ROWS = 100  # of the toy of the manifold's figure


def following(state: Tensor) -> Tensor:
    """Returns the next state of the toy problem."""
    return state + (2 * state).sin() / 2


def draw_manifold() -> Figure:
    """Draws mixes of arbitrary rows and of neighbors, with the curve of true transitions."""
    generator = torch.Generator().manual_seed(0)
    state = torch.rand(ROWS, 1, generator=generator) * 6 - 3
    rows = make_rows(state, torch.zeros_like(state), following(state))
    spread = float(rows["next", "observation"].std())
    line = torch.linspace(-3, 3, 300)
    figure = Figure(figsize=(7.6, 3.5), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    kinds = {"mixup": "any two rows", "nmer": "neighbors, K = 10"}
    for axes, (kind, title), color in zip(panels, kinds.items(), (ORANGE, GREEN), strict=True):
        batch = make_buffer(kind, rows, batch_size=2_000).sample()
        mixed, outcome = batch["observation"], batch["next", "observation"]
        error = float((outcome - following(mixed)).abs().mean()) / spread
        axes.plot(line, following(line), color="black", lw=1.2, label="what the environment does")
        axes.scatter(mixed[:400], outcome[:400], s=9, color=color, lw=0, label="mixed rows")
        axes.set(title=f"{title}: error {error:.2g}", xlabel="state")
        axes.legend(loc="upper left")
    panels[0].set(ylabel="next state")
    return figure


def draw_beta() -> Figure:
    """Draws the densities of the weights, with samples of the package below."""
    figure = Figure(figsize=(7.6, 2.6), layout="constrained")
    panels = figure.subplots(1, 4, sharex=True, sharey=True)
    w = torch.linspace(0.005, 0.995, 400)
    for axes, alpha in zip(panels, (0.2, 0.75, 1.0, 4.0), strict=True):
        _draw_density(axes, w, alpha)
    panels[0].set(ylabel="density")
    return figure


def _draw_density(axes: Axes, w: Tensor, alpha: float) -> None:
    drawn = sample_beta(alpha, (50_000,), generator=torch.Generator().manual_seed(0))
    axes.hist(drawn.numpy(), bins=40, density=True, color=BLUE, alpha=0.35, label="drawn")
    axes.plot(w, torch.distributions.Beta(alpha, alpha).log_prob(w).exp(), color=RED, lw=1.5)
    axes.set(title=f"alpha = {alpha:g}", xlabel="weight w", ylim=(0, 3.5), xticks=[0, 0.5, 1])


FIGURES = {"pairing": draw_pairing, "manifold": draw_manifold, "beta": draw_beta}


def main(arguments: list[str] | None = None) -> None:
    """Writes every figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "figures")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure = draw()
            figure.savefig(options.out / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
