"""README and pages: code runs, commands are real, and every public name is documented."""

import argparse
import importlib
import inspect
import io
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import types
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from helpers import make_transitions
from omegaconf import OmegaConf
from page_helpers import ROOT, blocks, first_column, name, pages
from recipe_helpers import ALGORITHMS, OFFLINE, RECIPES, expand, make_config, train

import nmer_torchrl

from nmer_recipes import settings  # isort: skip
from nmer_recipes.runs import COLUMNS  # isort: skip

pytestmark = pytest.mark.usefixtures("only_recipe_configs")


@pytest.mark.parametrize("page", [p for p in pages() if blocks(p, "python")], ids=name)
def test_code_runs_as_printed(page, tmp_path, monkeypatch):
    code = "\n".join(blocks(page, "python"))
    if "import minari" in code:
        pytest.importorskip("minari")
        pytest.importorskip("h5py")
    if "load_policy" in code:
        train("td3", tmp_path / "runs" / "walker")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    module = types.ModuleType("page")  # functions of a page are looked up there when pickled
    monkeypatch.setitem(sys.modules, "page", module)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("ignore")
        exec(compile(code, str(page), "exec"), vars(module))
    shapes = re.findall(r"^print\(.*\)  # (\[.*\])$", code, re.MULTILINE)
    lines = re.sub(r"torch\.Size\((.*?)\)( ?)", r"\1,\2", printed.getvalue()).splitlines()
    assert [shape for shape in shapes if f"{shape}," not in lines] == []


ON_CUDA = {
    "README.md": {
        "LazyTensorStorage(1_000_000)": 'LazyTensorStorage(1_000, device="cuda:0")',
        "capacity=1_000_000,": 'capacity=1_000, device="cuda:0",',
    },
    "docs/tutorial.md": {
        "LazyTensorStorage(FRAMES)": 'LazyTensorStorage(FRAMES, device="cuda:0")',
        'GymEnv("Pendulum-v1")': 'GymEnv("Pendulum-v1", device="cuda:0")',
        '"activation_class": nn.ReLU': '"activation_class": nn.ReLU, "device": "cuda:0"',
        "num_qvalue_nets=2)": 'num_qvalue_nets=2).to("cuda:0")',
        "= 500, 300, 100, 10, 64": "= 300, 200, 100, 2, 64",
        "NeighborPairSampler(k=10)": 'NeighborPairSampler(k=10, search="torch")',
        "prefetch=3": "prefetch=None",  # a pretended device knows nothing of threads
    },
}


@pytest.mark.parametrize("page", ON_CUDA)
def test_code_runs_on_cuda(page, cuda, monkeypatch):
    code = "\n".join(blocks(ROOT / page, "python"))
    for text, replaced in ON_CUDA[page].items():
        assert text in code
        code = code.replace(text, replaced)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(code, page, "exec"), vars(module))
    if page == "README.md":
        module.buffer.extend(make_transitions(20).to("cuda:0"))
    assert module.buffer.sample()["observation"].device.type == "cuda"


# ---------------------------------------------------------------------------------------- commands
# In `sh` blocks every command is one of ours; `bash` blocks are for a system and are parsed only.

# One write for each line: the two sides of a pipe write at the same time.
ECHO = '{0}() {{ local words; printf -v words \' %q\' "$@"; echo "{0}$words" >&3; }}'
STUBS = "\n".join(ECHO.format(word) for word in ("python", "make", "pip", "wandb", "bash", "sh"))


def commands(page: Path) -> list[list[str]]:
    """Returns the commands of a page as a shell would run them, word by word."""
    script = "\n".join(["exec 3>&1 1>/dev/null", STUBS, "PATH=", *blocks(page, "sh")])
    shell = ["bash", "-e", "-u", "-o", "pipefail", "-c", script]
    result = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return [shlex.split(line) for line in result.stdout.splitlines()]


class Parsed(Exception):  # noqa: N818
    """Raised once the script has accepted its arguments."""


def check_script(path: Path, arguments: list[str], monkeypatch) -> None:
    """Lets a script read its arguments, and stops it there."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, given=None, namespace=None):
        parse(self, given, namespace)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.syspath_prepend(str(path.parent))
        patch.syspath_prepend(str(RECIPES))
        with pytest.raises(Parsed):
            runpy.run_path(str(path), run_name="__main__")


def check_recipe(recipe: str, arguments: list[str]) -> None:
    """Composes runs of a recipe's command until each of its values was in one."""
    overrides = [word for word in arguments if word not in ("-m", "--cfg", "job")]
    overrides = [re.sub("^data=", "data.source=", word) for word in overrides]
    seen: set[str] = set()
    for _, run in expand([shlex.join(["python", f"recipes/{recipe}.py", "-m", *overrides])]):
        values = {word for word in run if not word.startswith("seed=")}  # one serves for all
        if not (seen and seen >= values):
            OmegaConf.resolve(make_config(recipe, *run))
            seen |= values


def check_python(words: list[str], monkeypatch) -> None:
    if words[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[2:] if "/" in word or word == "tests")
        return
    path = ROOT / words[0]
    assert path.exists(), f"there is no {words[0]}"
    if path.parent.name == "trainers":
        return  # tests/test_trainers.py runs these
    if path.stem in (*ALGORITHMS, *OFFLINE, "on_manifold", "baseline"):
        check_recipe("td3" if path.stem == "baseline" else path.stem, words[1:])
    else:
        check_script(path, words[1:], monkeypatch)


def check_bash(words: list[str], folder: Path, monkeypatch) -> None:
    """Runs one of our scripts, printing its Python commands instead of running them."""
    script = folder / words[0]
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text((ROOT / words[0]).read_text())
    told = subprocess.run(
        ["bash", str(script), *words[1:]],
        env={"PYTHON": "echo", "PATH": os.defpath},
        capture_output=True,
        text=True,
        check=True,
    )
    for line in told.stdout.splitlines():
        check_python(shlex.split(line), monkeypatch)


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert words[0] in targets
    for word in words[1:]:
        variable, _, arguments = word.partition("=")
        assert (words[0], variable) == ("train", "ARGS")
        check_recipe("sac", ["env=Walker2d", *shlex.split(arguments)])


def check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert words[0] == "install"
    for extra in re.findall(r"^\.\[(.*)\]$", words[-1]):
        assert set(extra.split(",")) <= extras["optional-dependencies"].keys()


def check_wandb(words: list[str]) -> None:
    assert words[0] in ("login", "sweep", "agent")
    for word in words:
        assert not word.endswith(".yaml") or (ROOT / word).exists()


@pytest.mark.parametrize("page", [p for p in pages() if blocks(p, "sh")], ids=name)
def test_commands_are_real(page, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    found = commands(page)
    assert found
    for program, *words in found:
        if program == "python":
            check_python(words, monkeypatch)
        elif program == "bash":
            check_bash(words, tmp_path, monkeypatch)
        elif program != "sh":  # what it is given is checked elsewhere
            {"make": check_make, "pip": check_pip, "wandb": check_wandb}[program](words)


def test_a_command_that_is_not_real_is_found(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    for wrong in ("recipes/sac.py env=Hoper", "recipes/td3.py replay.kk=3", "recipes/missing.py"):
        with pytest.raises(Exception, match=r"Hoper|kk|missing"):
            check_python(shlex.split(wrong), monkeypatch)
    with pytest.raises(SystemExit):
        check_python(["recipes/report.py", "runs", "--att", "3"], monkeypatch)
    with pytest.raises(subprocess.CalledProcessError):
        check_bash(["docs/results/study.sh", "mian"], tmp_path, monkeypatch)


@pytest.mark.parametrize("page", [p for p in pages() if blocks(p, "bash")], ids=name)
def test_blocks_for_a_system_parse(page):
    for block in blocks(page, "bash"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True, capture_output=True)


def test_every_block_is_of_a_known_kind():
    known = {"python", "sh", "bash", "diff", "text", "bibtex"}
    for page in pages():
        fences = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)
        assert set(fences[::2]) <= known, name(page)
        assert set(fences[1::2]) <= {""}, name(page)


# ------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_lead_somewhere(page):
    """Checks links between pages as files; mkdocs checks the rest on the site."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"(?:\]\(|src(?:set)?=\")([^)\s\"]+)", text):
        if not re.match(r"[a-z]+:|#", link):
            target = (page.parent / link.partition("#")[0]).resolve()
            assert target.exists(), link


def choices(group: str) -> set[str]:
    return settings._choices(group)


def test_the_recipes_page_has_every_setting():
    groups = ("env", "replay", "logger", "collector")
    real = {key for recipe in (*ALGORITHMS, *OFFLINE) for key in make_config(recipe)} - set(groups)
    for group in groups:
        for choice in choices(group):
            real |= {f"{group}.{key}" for key in settings._settings(group, choice)}
        real |= {f"{group}.{key}" for key in settings._read("td3")[0][group]}
    real |= {f"data.{key}" for key in make_config("td3").data}
    real -= {"data"}
    listed = first_column(ROOT / "docs" / "recipes.md", "key")
    assert sorted(listed) == sorted(real), "docs/recipes.md has a row for each setting"


def test_the_manifold_page_has_every_setting():
    keys = first_column(ROOT / "docs" / "manifold.md", "key")
    assert sorted(keys) == sorted(make_config("on_manifold"))


def test_the_recipes_page_has_every_choice_of_a_group():
    page = ROOT / "docs" / "recipes.md"
    groups = re.findall(
        r"^\| `(env|replay|logger|collector)` \|[^|]*\|(.*)\|$", page.read_text(), re.M
    )
    assert len(groups) == 4
    for group, text in groups:
        listed = set(re.findall(r"`([^`]+)`", text))
        assert listed == choices(group), f"mend the row `{group}` of docs/recipes.md"


def test_the_recipes_page_has_every_metric():
    assert first_column(ROOT / "docs" / "recipes.md", "logged") == list(COLUMNS)


PARTS = ("buffers", "configs", "diagnostics", "functional", "methods", "metrics", "neighbors")
PARTS += ("offline", "samplers", "transforms")


def public_names() -> list[tuple[str, object]]:
    """Returns the dotted names of everything public, and their objects."""
    found = [(f"nmer_torchrl.{n}", getattr(nmer_torchrl, n)) for n in nmer_torchrl.__all__]
    for part in PARTS:
        module = importlib.import_module(f"nmer_torchrl.{part}")
        own = [
            n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__
        ]
        names = getattr(module, "__all__", [n for n in own if not n.startswith("_")])
        found += [(f"{module.__name__}.{n}", getattr(module, n)) for n in names]
    return found


def test_every_public_name_has_an_example():
    objects = [(n, v) for n, v in public_names() if inspect.isclass(v) or inspect.isfunction(v)]
    assert len(objects) > 80
    assert not [n for n, v in objects if ">>> " not in (v.__doc__ or "")]


def test_every_public_name_is_in_the_reference():
    text = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    named = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    objects = {
        id(v): n
        for n, v in public_names()
        if n.split(".")[1] not in ("configs", "functional") and not inspect.ismodule(v)
    }
    shown = {id(pkgutil.resolve_name(n)) for n in named}
    assert not [n for key, n in objects.items() if key not in shown]


# -------------------------------------------------------------------------------------------- site


def labels(folder: Path) -> dict[str, list[str]]:
    """Returns the text in each figure, including measured numbers."""
    paths = folder.glob("*.svg")
    return {path.name: re.findall("<!-- (.*) -->", path.read_text()) for path in paths}


def test_figures_say_what_the_script_draws(tmp_path):
    runpy.run_path(str(ROOT / "docs" / "figures.py"))["main"](["--out", str(tmp_path)])
    drawn = labels(tmp_path)
    committed = labels(ROOT / "docs" / "figures")
    assert drawn == {name: committed[name] for name in drawn}
    # The others are of docs/agents.py and docs/why.py.
    assert committed.keys() - drawn.keys() == {"agents.svg", "why.svg"}
    assert "any two rows: error 0.12" in drawn["manifold.svg"]


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    # Not --quiet, by which warnings are neither shown nor counted.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path / "site"]
    environment = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not re.search("WARNING|ERROR", result.stderr)
    assert (tmp_path / "site" / "index.html").exists()
