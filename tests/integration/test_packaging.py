"""Build the distributions, install each into an environment of its own, and use them there.

Nothing is downloaded: builds are not isolated, and the libraries are those of the running interpreter.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

TOP_LEVEL = ["collectors", "dashboards", "replay", "sample_traces"]
MADE_HERE = [".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "runs"]


def _run(command: list[str | Path], cwd: Path) -> str:
    """Output of a command that must succeed, started where and as if the checkout did not exist."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _checkout(repository: Path, to: Path, links: bool = True) -> Path:
    """A copy of what is versioned; without links it is what unpacking an archive on some systems gives."""
    shutil.copytree(repository, to, symlinks=True, ignore=shutil.ignore_patterns(*MADE_HERE))
    if not links:
        for link in [path for path in (to / "dpro").iterdir() if path.is_symlink()]:
            target = str(link.readlink())
            link.unlink()
            link.write_text(target, encoding="utf-8")
    return to


def _install(what: list[str | Path], where: Path) -> Path:
    """A new environment with this installed and the running interpreter's libraries beside it."""
    _run([sys.executable, "-m", "venv", "--without-pip", where], cwd=where.parent)
    python = where / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    # In sight before the installation, since a build that is not isolated needs setuptools. An editable dpro
    # among them does no harm: a path file does not make Python read the path files of the folder it names.
    libraries = next(where.glob("lib/python*/site-packages")) / "libraries.pth"
    libraries.write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    _run([*pip, "--no-build-isolation", "--ignore-installed", *what], cwd=where)
    return python


@pytest.fixture(scope="module")
def distributions(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist, and the wheel that was made from the sdist."""
    folder = tmp_path_factory.mktemp("distributions")
    checkout = _checkout(repository, folder / "checkout")
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, checkout], cwd=folder)
    return folder


def _one(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_the_wheel_made_from_the_sdist_holds_every_module_and_no_foreign_name(repository, distributions):
    with zipfile.ZipFile(_one(distributions, "*.whl")) as wheel:
        names = wheel.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"dpro"}
    modules = set()
    for folder in ("dpro", *(f"dpro/{name}" for name in TOP_LEVEL)):
        root = repository / folder
        modules |= {f"{folder}/{path.relative_to(root)}" for path in _modules(root)}
    assert {name for name in names if name.endswith(".py")} == modules
    assert "dpro/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def _modules(folder: Path) -> list[Path]:
    """Modules below a folder, not following links."""
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not Path(root, name).is_symlink()]
        found += [Path(root, name) for name in files if name.endswith(".py")]
    return found


def test_the_sdist_has_no_links(distributions):
    with tarfile.open(_one(distributions, "*.tar.gz")) as sdist:
        assert [member.name for member in sdist if member.issym() or member.islnk()] == []


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["wheel", "sdist", "editable", "editable without links"])
def test_dpro_installs_and_runs_from(form, repository, distributions, tmp_path):
    what: list[str | Path]
    if form in ("wheel", "sdist"):
        what = [_one(distributions, "*.whl" if form == "wheel" else "*.tar.gz")]
    else:
        what = ["-e", _checkout(repository, tmp_path / "checkout", links=form == "editable")]
    python = _install(what, tmp_path / "venv")
    assert "Usage: dpro" in _run([python.parent / "dpro", "--help"], cwd=tmp_path)
    assert "dpro, version" in _run([python, "-m", "dpro", "--version"], cwd=tmp_path)
    imports = "import dpro.collectors, dpro.dashboards, dpro.replay, dpro.replay.whatif, dpro.sample_traces"
    leaked = f"[name for name in {TOP_LEVEL} if importlib.util.find_spec(name)]"
    code = f"import importlib.util\n{imports}\nprint(dpro.__file__, {leaked})"
    where, leaks = _run([python, "-c", code], cwd=tmp_path).split(maxsplit=1)
    assert Path(where).is_relative_to(tmp_path)
    assert leaks.strip() == "[]"


def test_dpro_runs_from_the_checkout_uninstalled(repository, tmp_path):
    checkout = _checkout(repository, tmp_path / "checkout")
    code = "import dpro.collectors, dpro.dashboards, dpro.replay, dpro; print(dpro.__file__)"
    assert Path(_run([sys.executable, "-c", code], cwd=checkout).strip()).is_relative_to(checkout)
