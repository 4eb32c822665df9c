"""The package as users get it: imports and wheel."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote

import pytest
from torchrl.envs.transforms import Transform

import nmer_torchrl

ROOT = Path(__file__).parent.parent


def run(code: str, **options) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_is_light():
    code = """
import sys, torchrl.data, torchrl.envs
before = set(sys.modules)
import nmer_torchrl
heavy = {"pykeops", "keopscore", "faiss", "hydra", "wandb"}
print(sorted(heavy & (set(sys.modules) - before)), sorted(heavy & set(sys.modules)))
"""
    assert run(code).strip() == "[] []"


def test_version_is_that_of_the_installation():
    assert nmer_torchrl.__version__ == metadata.version("nmer-torchrl")


def test_badges_say_what_the_package_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [need for need in project["dependencies"] if need.startswith(("torch>", "torchrl>"))]
    declared = {"license-" + project["license"], "python-" + project["requires-python"]}
    declared |= {need.replace(">=", "->=", 1) for need in needs}
    badges = re.findall(r"img\.shields\.io/badge/(\S+)-blue", (ROOT / "README.md").read_text())
    assert {unquote(badge) for badge in badges} == declared


def test_configs_without_hydra_say_what_to_install():
    code = """
import sys
sys.modules["hydra"] = None  # `import hydra` fails
try:
    import nmer_torchrl.configs
except ImportError as error:
    print(error)
"""
    assert "pip install hydra-core" in run(code)


@pytest.mark.xdist_group("keops")
def test_keops_is_silent(tmp_path):
    code = """
import torch
from nmer_torchrl.neighbors import KeOpsSearch
search = KeOpsSearch()
search.write(torch.arange(50), torch.randn(50, 5))
search.query(torch.arange(3), 3, torch.ones(5))
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == ""
    assert result.stderr == ""


def test_wheel_installs_into_an_empty_environment(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    subprocess.run([*build, ROOT], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("nmer_torchrl-*.whl")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet"]
    subprocess.run([*install, wheel], check=True, capture_output=True)
    # The dependencies (gigabytes) are borrowed; a path in a .pth file does not run the .pth files
    # in it, so that the editable install stays out of sight.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    code = "import nmer_torchrl; print(nmer_torchrl.__file__)"
    result = subprocess.run(
        [python, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    assert result.stdout.startswith(str(site))
    assert (site / "nmer_torchrl" / "py.typed").exists()


# Which rooms each room may use; the modules at the root that hold no part are open to all.
USES = {
    "neighbors": set(),
    "tracking": {"neighbors"},
    "metrics": {"neighbors", "tracking"},
    "pairs": {"neighbors", "tracking", "metrics"},
    "samplers": {"neighbors", "tracking", "metrics", "pairs"},
    "transforms": {"tracking"},
    "methods": {"neighbors", "tracking", "metrics", "pairs", "samplers", "transforms"},
}


@pytest.mark.parametrize("room", USES)
def test_dependencies_point_one_way(room):
    used = set()
    for path in (Path(nmer_torchrl.__file__).parent / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nmer_torchrl."):
                used.add(node.module.split(".")[1])
    assert used & USES.keys() - {room} <= USES[room]


def test_transforms_are_abstract_or_final_and_at_most_two_levels_deep():
    for path in (Path(nmer_torchrl.__file__).parent / "transforms").glob("*.py"):
        module = importlib.import_module(f"nmer_torchrl.transforms.{path.stem}")
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, Transform) and kind.__module__ == module.__name__:
                assert kind.__mro__.index(Transform) <= 2, name
                assert inspect.isabstract(kind) != getattr(kind, "__final__", False), name


def test_what_recipes_share_uses_no_recipe_and_no_benchmark():
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    rooms = {path.name for path in (ROOT / "recipes").iterdir() if path.is_dir()}
    used = set()
    for path in (ROOT / "recipes" / "nmer_recipes").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                used.add(node.module.split(".")[0])
            elif isinstance(node, ast.Import):
                used |= {alias.name.split(".")[0] for alias in node.names}
    assert used & (recipes | rooms) == {"nmer_recipes"}


def imported(path: Path) -> set[str]:
    """Returns the modules that a file imports, by the last part of their names."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names += [node.module or "", *(alias.name for alias in node.names)]
    return {name.rpartition(".")[2] for name in names}


def test_no_test_module_imports_another():
    """Shared code is in plain modules, and fixtures are in `conftest.py`."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    modules = {path.stem for path in files if path.stem.startswith("test_")} | {"conftest"}
    assert len(modules) > 50
    found = {path.name: both for path in files if (both := imported(path) & modules)}
    assert not found, "move what they share to a module whose name does not begin with test_"
