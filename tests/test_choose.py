"""The page on which method to use: every number on it comes from a committed file."""

import re

import pandas as pd
from result_helpers import RESULTS, ROOT, by_seed, range_of, spread, table

from nmer_torchrl import NMER

NUMBERS = {4: "four", 5: "five", 6: "six"}
TASKS = ("HalfCheetah", "Hopper", "Walker2d")
# What has digits but is no number: code, addresses and names.
NO_NUMBER = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|TD3|Walker2d", re.DOTALL)


def paired(part: str, env: str, form: str = "+.0f", against: str = "uniform") -> str:
    """Returns NMER's score minus that of another method, with its interval."""
    rows = pd.read_csv(RESULTS / part / "paired.csv")
    (row,) = rows[(rows.env == env) & (rows.method == "nmer") & (rows.against == against)].iloc
    ahead = env == "HalfCheetah" and against == "uniform"
    assert row.verdict == ("ahead" if ahead else "not shown")
    value, low, high = (format(row[name], form) for name in ("score", "score_low", "score_high"))
    return f"{value} [{low}, {high}]"


def errors(env: str, size: int, *methods: str) -> list[float]:
    """Returns on-manifold errors of the next state."""
    rows = pd.read_csv(ROOT / "docs" / "manifold" / f"{env}.csv").set_index(["method", "size"])
    return [rows["state"][method, size] for method in methods]


def benchmark(name: str, key: str, column: str, rows: int | None = None) -> pd.Series:
    table = pd.read_csv(ROOT / "docs" / "benchmarks" / f"{name}.csv")
    return table[(table.rows == rows) if rows else slice(None)].set_index(key)[column]


def ablation(env: str, replay: str, ratio: int) -> str:
    """Returns TD3's result in the paper at a replay ratio."""
    rows = pd.read_csv(ROOT / "recipes" / "nmer_recipes" / "paper.csv")
    rows = rows[(rows.algorithm == "TD3") & (rows.env == env) & (rows.replay == replay)]
    (row,) = rows[rows.replay_ratio == ratio].iloc
    return spread(row)


def on_learning():
    """Yields sentences with numbers of our runs."""
    runs = pd.concat(
        pd.read_csv(RESULTS / part / "table.csv")
        for part in ("main", "pendulum", "pairings", "rivals", "ratio20")
    )
    nmer = runs[runs.method == "nmer"]
    assert set(nmer.replay_ratio) == {5, 20}
    most = f"{nmer.frames.max():,}"
    yield f"use TD3 at replay ratios 5 and 20, with up to {most} frames"
    rows = table("ratio20", "HalfCheetah")
    ends = [spread(rows.loc[method]) for method in ("nmer", "uniform", "ct")]
    words = "NMER scores {}, uniform replay {} and `ct` {}, in four seeds.".format(*ends)
    yield f"**20**: After {most} frames of HalfCheetah, {words}"
    gaps = [paired("ratio20", "HalfCheetah", against=other) for other in ("uniform", "ct")]
    yield "is {}, and minus the score of `ct` {}.".format(*gaps)
    least = f"{nmer.frames.min():,}"
    yield f"| up to {least} frames | `nmer` | {NMER().k} | 5 | the same |"
    yield f"After {least} frames of InvertedDoublePendulum, ten seeds"
    yield f"{paired('pendulum', 'InvertedDoublePendulum', '+.1f')} in the score"
    gaps = by_seed("pairings", "HalfCheetah", "score", "ct")
    gaps += by_seed("rivals", "HalfCheetah", "score", "ct")
    *first, last = (f"{gap:+.0f}" for gap in gaps)
    yield f"is {', '.join(first)} and {last} in {NUMBERS[len(gaps)]} pairs of runs"
    behind = [*by_seed("pairings", "HalfCheetah", "score", "1nn")]
    behind += by_seed("rivals", "HalfCheetah", "score", "1nn")
    *first, last = (f"{-gap:+.0f}" for gap in behind)
    lower = sum(gap > 0 for gap in behind)
    yield f"scored lower in {NUMBERS[lower]} of {NUMBERS[len(behind)]} longer runs of HalfCheetah"
    yield (
        f"In the same {NUMBERS[len(behind)]} pairs of runs on HalfCheetah, the score of `1nn` "
        f"(k = 1) minus the score of k = {NMER().k} is {', '.join(first)} and {last}."
    )
    rows = table("rivals", "HalfCheetah")
    ends = f"{spread(rows.loc['nmer'])} and uniform replay {spread(rows.loc['uniform'])}"
    yield f"**5**: After {most} frames of HalfCheetah, NMER scores {ends}, in five seeds."
    yield f"The difference is {paired('rivals', 'HalfCheetah')}."
    other = f"{paired('main', 'Hopper')} on Hopper and {paired('main', 'Walker2d')} on Walker2d"
    yield f"After {most} frames, NMER's score minus the score of uniform replay is {other}"
    minutes = [table("main", env).seconds_per_run["nmer"] / 60 for env in TASKS]
    yield f"runs of {most} frames with NMER at ratio 5 took {range_of(minutes)} minutes"
    times = [table("main", env).seconds_per_run for env in TASKS]
    longer = range_of([100 * (each["nmer"] / each["uniform"] - 1) for each in times])
    yield f"| {NMER().k} | 5 | runs take {longer} % longer |"


def on_rows():
    """Yields sentences with numbers of mixed rows and of costs."""
    few, many = (
        [f"{e:.3f}" for e in errors("HalfCheetah", n, "nmer_1", "nmer_10", "nmer_100")]
        for n in (1_000, 100_000)
    )
    yield (
        "With 1,000 rows of HalfCheetah, the error of a mixed row's next state is "
        f"{few[0]} for k = 1, {few[1]} for k = 10 and {few[2]} for k = 100."
    )
    yield f"With 100,000 rows, it is {many[0]}, {many[1]} and {many[2]}"
    still = {}
    for env in TASKS:
        rows = pd.read_csv(ROOT / "docs" / "manifold" / f"{env}.csv")
        still[env] = 1 - rows[(rows.method == "nmer_10") & (rows["size"] == 100_000)].changed.item()
    assert still["HalfCheetah"] == 0
    yield (
        f"With 100,000 rows and k = 10, this leaves {still['Hopper']:.1%} of the rows of Hopper "
        f"unmixed, {still['Walker2d']:.1%} of Walker2d, and none"
    ).replace("%", " %")
    hopper, walker, cheetah = (
        errors(env, 10_000, "ct", "nmer_10") for env in ("Hopper", "Walker2d", "HalfCheetah")
    )
    yield "With 10,000 rows, the error is {:.4f} with `ct` and {:.4f} with NMER on Hopper".format(
        *hopper
    )
    yield "{:.3f} and {:.3f} on Walker2d.".format(*walker)
    yield "On HalfCheetah, it is {:.3f} and {:.3f}.".format(*cheetah)
    upkeep = benchmark("upkeep", "task", "upkeep ms per row", 200_000)
    ratios = benchmark("sample", "task", "ratio", 200_000)
    widths = benchmark("upkeep", "task", "d", 200_000)
    yield "Once 200,000 rows are stored"
    for task in upkeep.index:
        yield f"| {task} | {widths[task]} | {upkeep[task]:.1f} ms | {ratios[task]:.1f} |"
    wide = range_of([upkeep["Ant"], upkeep["Humanoid"]], ".1f")
    assert widths["Ant"] > 100 > widths["HalfCheetah"]
    yield f"| more than 100 dimensions | `nmer` | 10 or 25 | 20 | {wide} ms per stored row |"
    train = pd.read_csv(ROOT / "docs" / "benchmarks" / "train.csv")
    (ratio,) = train[(train.replay == "nmer") & (train["replay ratio"] == 20)].ratio
    frame = f"{ratio:.2f}"
    yield f"A TD3 frame of HalfCheetah at replay ratio 20 takes {frame} times as long"
    yield f"| 100,000 frames or more | `nmer` | 10 | 20 | a frame takes {frame} times as long |"
    cost = benchmark("methods", "method", "beside uniform").map("{:.1f}".format)
    yield (
        f"Sampling from `per_nmer` takes {cost['per_nmer']} times as long as from `uniform`, "
        f"from `nmer` {cost['nmer']}, from `ct` {cost['ct']} and from `gp` {cost['gp']} times"
    )


def on_the_paper():
    """Yields sentences with the paper's numbers and defaults."""
    folder = ROOT / "recipes" / "nmer_recipes"
    rows = pd.read_csv(folder / "paper.csv")
    nmer = rows[rows.replay == "NMER"]
    yield "The paper's comparisons have 200,000 frames"
    yield f"Alpha is {NMER().alpha} in every row"
    best = nmer[nmer.best == 1].set_index(["algorithm", "env"]).k
    assert set(best) == {10, 25}
    wide = {place for place, k in best.items() if k == 25}
    assert wide == {("TD3", "Ant"), ("SAC", "Ant"), ("SAC", "Swimmer"), ("SAC", "Walker2d")}
    words = "The paper's best rows have k = 10, or 25 for Ant and for SAC on Swimmer and Walker2d"
    yield f"{words} (Appendix H)."
    assert sorted(set(nmer.replay_ratio)) == [5, 20]
    assert (nmer.replay_ratio == 5).sum() == 1
    yield "The paper lists it at 20, and once at 5."
    yield "- **1**: There is no evidence for NMER with TD3 and SAC."
    yield "| you can afford only one update per frame | `uniform` | – | 1 | none |"
    added = pd.read_csv(RESULTS / "crossq" / "paired.csv").set_index("env")
    assert set(added.verdict) == {"not shown"}
    assert set(added.seeds) == {4}
    assert (added.score < 0).all()
    gaps = [
        "{:+.0f} [{:+.0f}, {:+.0f}]".format(*added.loc[env, ["score", "score_low", "score_high"]])
        for env in ("HalfCheetah", "Walker2d")
    ]
    words = "With CrossQ, four seeds show no difference: NMER's score minus the score of uniform"
    yield f"{words} replay"
    yield "is {} on HalfCheetah and {} on Walker2d. The means are lower with NMER.".format(*gaps)
    nmer, ct, uniform = (ablation("HalfCheetah", replay, 20) for replay in ("NMER", "CT", "U"))
    yield (
        "In the paper's ablations, TD3 on HalfCheetah scores "
        f"{nmer} with NMER, {ct} with `ct` and {uniform} with uniform replay."
    )
    best = rows[(rows.replay == "U") & (rows.algorithm == "TD3") & (rows.best == 1)]
    best = best.set_index("env").replay_ratio
    assert best["HalfCheetah"] == 1
    yield f"Uniform replay is best at ratio 1 there, with {ablation('HalfCheetah', 'U', 1)}."
    ours, theirs = (
        [ablation(env, replay, ratio or best[env]) for env in ("Ant", "Humanoid")]
        for replay, ratio in (("NMER", 20), ("U", None))
    )
    yield f"TD3 with NMER scores {ours[0]} on Ant and {ours[1]} on Humanoid, both at ratio 20."
    yield f"Uniform replay at its best ratio scores {theirs[0]} and {theirs[1]}."
    main = pd.read_csv(folder / "results.csv").query("table == 'main'")
    first = {}
    for algorithm, group in main.groupby("algorithm"):
        means = group.pivot(index="env", columns="replay", values="mean")
        first[algorithm] = f"{(means.idxmax(axis=1) == 'NMER').sum()} of {len(means)}"
    words = f"on {first['SAC']} tasks with SAC, and on {first['TD3']} with TD3."
    yield f"In the paper's Table 1, NMER has the highest mean {words}"


def test_every_number_comes_from_a_file():
    page = " ".join((ROOT / "docs" / "howto" / "choose.md").read_text().split())
    left = page
    for sentence in (*on_learning(), *on_rows(), *on_the_paper()):
        assert sentence in page, sentence
        left = left.replace(sentence, "")
    left = NO_NUMBER.sub("", left)
    assert not re.search(r".{0,60}\d.{0,40}", left), re.findall(r".{0,60}\d.{0,40}", left)
