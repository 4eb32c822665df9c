"""The package as its users get it: imports and wheel."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

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
