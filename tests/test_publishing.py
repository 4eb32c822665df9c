"""What a release needs: one version, workflows with existing commands, a clean wheel."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name(path: Path) -> str:
    return path.stem


def read(path: str) -> dict:
    return yaml.safe_load((ROOT / path).read_text())


def steps(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_the_version_is_the_same_everywhere():
    newest = re.search(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert read("CITATION.cff")["version"] == newest[1] == PROJECT["version"]


def test_the_changelog_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= {
        "Added",
        "Changed",
        "Deprecated",
        "Removed",
        "Fixed",
        "Security",
    }
    for head in re.findall(r"^## (.*)$", text, re.MULTILINE):
        assert re.fullmatch(r"\[[\w.]+\]( - (\d{4}-\d\d-\d\d|Unreleased))?", head), head


@pytest.mark.parametrize("path", WORKFLOWS, ids=name)
def test_a_workflow_has_what_it_runs(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["name"] == path.stem
    assert workflow["permissions"] == {"contents": "read"}, "a job that writes says so itself"
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 360
    for step in steps(workflow):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", step["uses"]), "a major version"
        for target in re.findall(r"^make (\S+)", step.get("run", ""), re.MULTILINE):
            assert target in targets


def test_workflows_test_the_versions_of_python_that_are_promised():
    tested = read(".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    classifiers = "\n".join(PROJECT["classifiers"])
    assert tested == re.findall(r"Python :: (3\.\d+)", classifiers)
    assert PROJECT["requires-python"] == f">={tested[0]}"


def test_publishing_waits_for_the_checks_and_an_approval():
    workflow = read(".github/workflows/release.yml")
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    publish = workflow["jobs"]["publish"]
    assert publish["needs"] == "build"
    assert publish["environment"] == "release"
    assert publish["permissions"] == {"id-token": "write"}


def test_a_release_runs_the_first_example_of_the_readme():
    """The command that extracts it from the README gives the first block shown there."""
    (script,) = [
        step["run"] for step in steps(read(".github/workflows/release.yml")) if "awk" in str(step)
    ]
    (command,) = re.findall(r"^(awk .* README\.md) >", script, re.MULTILINE)
    taken = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    first = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.M)
    assert first
    assert taken.stdout == first[1]
    assert "NeighborPairSampler" in first[1]


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=name
)
def test_issue_forms_ask_for_scripts_that_exist(path):
    for script in re.findall(r"recipes/[\w/]+\.py", path.read_text()):
        assert (ROOT / script).exists()


def test_the_image_copies_what_it_is_given():
    """Docker sees only the files that `.dockerignore` does not exclude."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    seen = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = set()
    for line in re.findall(r"^COPY (?:--\S+ )?(.*)$", (ROOT / "Dockerfile").read_text(), re.M):
        copied |= set(line.split()[:-1])
    assert copied == seen
    assert all((ROOT / path).exists() for path in copied)


def test_the_wheel_holds_the_package_alone(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    subprocess.run([*build, ROOT], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"nmer_torchrl-{PROJECT['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        files = [path for path in archive.namelist() if ".dist-info/" not in path]
    tracked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "nmer_torchrl").rglob("*")
        if path.suffix in (".py", ".typed")
    }
    assert set(files) == tracked
