"""What pages say about cost: each number is read from a table of docs/benchmarks."""

from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]


def read(name: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / "docs" / "benchmarks" / f"{name}.csv")


def span(values: pd.Series, form: str = ".1f") -> str:
    low, high = format(values.min(), form), format(values.max(), form)
    return low if low == high else f"{low} to {high}"


def frame_ratios() -> dict[int, str]:
    """Returns how many times as long a frame takes with NMER, by replay ratio."""
    train = read("train")
    nmer = train[train.replay == "nmer"].set_index("replay ratio")
    assert set(train["rows before"]) == {100_000}
    return {ratio: f"{value:.2f}" for ratio, value in nmer.ratio.items()}


def on_frames() -> str:
    ratios = frame_ratios()
    words = f"takes {ratios[20]} times as long as with uniform replay at replay ratio 20"
    return f"{words}, {ratios[5]} at 5 and {ratios[1]} at 1"


def on_samples() -> str:
    table = read("sample")
    assert table.rows.min() == 10_000
    return (
        f"one sample takes {span(table.ratio)} times as long as TorchRL's uniform sample "
        f"({span(table['ratio, plain storage'])} times with a plain `LazyTensorStorage`)"
    )


def on_peers() -> str:
    table = read("loops")
    assert list(table.algorithm) == ["TD3", "TD3", "SAC", "SAC"]
    sbx, plain = (table[f"recipe, compiled / {other}"] for other in ("SBX", "plain"))
    assert sbx.max() <= 1.0
    assert plain.max() <= 1.0
    return f"{span(sbx, '.2f')} times as long as SBX"


def on_amd() -> str:
    bare, again = (read(name)["recipe, compiled / SBX"] for name in AMD)
    return f"{span(bare, '.2f')} times as long as SBX, and {span(again, '.2f')} times after"


AMD = ("loops_amd", "loops_amd_preload")


def on_lists() -> str:
    (row,) = read("build").query("stream == 'HalfCheetah-v5' and rows == 200_000").iloc
    assert row.threads == 1
    return f"200,000 rows that are loaded at once takes {row['lists s']:.0f} s"


@pytest.mark.parametrize("page", ["README.md", "docs/method.md", "docs/benchmarks.md"])
def test_costs_are_those_of_the_tables(page):
    text = " ".join((ROOT / page).read_text().split())
    for sentence in (on_frames(), on_samples()):
        assert sentence in text, sentence
    if page != "docs/method.md":
        assert on_peers() in text, on_peers()
        assert on_lists() in text, on_lists()
        assert on_amd() in text, on_amd()


def test_the_page_names_what_preloading_changes_on_amd():
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    bare, again = (read(name) for name in AMD)
    gains = bare["recipe, compiled, updates/s"] / again["recipe, compiled, updates/s"]
    assert f"takes {span(gains, '.2f')} times as long with the library as without it" in text
    both = [span(table["recipe, compiled / SBX"], ".2f") for table in (bare, again)]
    assert f"{both[0]} times as long without the library, and {both[1]} times as long with it" in (
        text
    )


def test_the_page_names_what_other_loops_take():
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    table = read("loops")
    for other, name in (("plain", "as the plain loop"), ("SB3", "as Stable-Baselines3")):
        words = f"{span(table[f'recipe, compiled / {other}'], '.2f')} times as long {name}"
        assert words in text, words


def test_building_lists_is_compared_with_faiss():
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    table = read("build")
    narrow, wide = table[table.d == 23], table[table.d > 100]
    assert f"{span(narrow['lists / faiss'], '.2f')} times as long as FAISS's" in text
    assert f"{span(wide['lists / product'], '.1f')} times as long as the product" in text


def test_the_page_on_offline_data_has_the_same_time():
    text = " ".join((ROOT / "docs" / "howto" / "offline.md").read_text().split())
    assert on_lists() in text, on_lists()


def test_the_cost_of_denormal_numbers_is_that_of_the_table():
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    assert f"takes {read('denormals').ratio.iloc[-1]:.1f} times as long with them" in text


def test_the_rest_of_a_frame_is_that_of_the_table():
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    (row,) = read("train").query("replay == 'uniform' and `replay ratio` == 1").iloc
    rest = row["ms per frame"] - row["update ms"]
    assert f"a frame with uniform replay takes {rest:.1f} ms at ratio 1" in text
