"""The wheel holds the whole package, also what stands at the top of the repository, and works without the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
AT_THE_TOP = ("workers", "workflows", "scheduler", "configs")
USE = """
import sys
sys.path.insert(0, sys.argv[1])
import rlinf
import rlinf.scheduler.shipped
from rlinf.train import load_graph
cfg = rlinf.load_config(["+workflow=ppo", "model=tiny", "data=digits"])
graph = load_graph(cfg)
print(rlinf.__file__, sys.modules["rlinf.workers.actor"].__file__, *sorted(graph.workers))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of a wheel, built from a copy, for a build leaves files beside the sources."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("rlinf", *AT_THE_TOP):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-w", folder, source], check=True, capture_output=True)
    (wheel,) = folder.glob("rlinf-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_every_module_and_config_and_nothing_else(site: Path) -> None:
    def content(base: Path) -> dict[str, bytes]:
        # rglob does not follow the links from rlinf/ to the folders at the top.
        folders = [base, *((base / name).resolve() for name in AT_THE_TOP)]
        files = {path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".yaml")}
        return {str(path.relative_to(base.parent)).removeprefix("rlinf/"): path.read_bytes() for path in files}

    found, expected = content(site / "rlinf"), content(ROOT / "rlinf")
    assert found.keys() == expected.keys()
    assert found == expected
    assert {"workers/actor.py", "workflows/ppo.py", "scheduler/shipped.py", "configs/data/sums.yaml"} <= found.keys()
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"rlinf"}


def test_a_workflow_is_built_from_the_wheel_in_an_empty_folder(site: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", USE, str(site)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    package, actor, *workers = done.stdout.split()
    assert Path(package) == site / "rlinf" / "__init__.py"
    assert Path(actor) == site / "rlinf" / "workers" / "actor.py"
    assert workers == ["actor", "critic", "reference", "reward", "rollout"]
