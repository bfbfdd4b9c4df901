"""The wheel and the sdist work by themselves: in an empty environment, from another folder, without the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from xsp import version
from xsp.cli import main

ROOT = Path(__file__).resolve().parents[1]
TRACE = ROOT / "notebooks" / "gpt_forward.json.gz"
PROGRAM = """
import torch, xsp_collectors, xsp
print("xsp of", xsp.__file__)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def run(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as somebody does who never saw the checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "XSP_"))}
    return subprocess.run(
        [*map(str, words)], cwd=cwd, env={**kept, "XSP_CACHE": ""}, capture_output=True, text=True, check=False
    )


def environment(folder: Path) -> Path:
    """Return the Python of a new environment."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def install(python: Path, *what: object, cwd: Path) -> None:
    """Install into an environment, or skip the test if there is no registry to install from."""
    installed = run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what, cwd=cwd)
    if "No matching distribution" in installed.stderr or "NewConnectionError" in installed.stderr:
        pytest.skip(f"no registry of packages answers: {installed.stderr.strip().splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr


def test_the_commit_is_of_the_build_of_the_checkout_or_unknown(tmp_path: Path) -> None:
    package = tmp_path / "site" / "xsp"
    package.mkdir(parents=True)
    assert version.commit_of_package(package) is None
    (package / version.COMMIT_FILE).write_bytes(b"\xff")
    assert version.commit_of_package(package) is None
    (package / version.COMMIT_FILE).write_text("7c088b6b\n")
    assert version.commit_of_package(package) == "7c088b6b"
    (tmp_path / "site" / ".git").mkdir()  # somebody else's repository
    assert version.commit_of_package(package) == "7c088b6b"
    (tmp_path / "site" / "pyproject.toml").touch()  # a checkout that git cannot read
    assert version.commit_of_package(package) is None


@pytest.mark.parametrize("path", ["", os.environ.get("PATH", "")])
def test_the_version_is_printed_with_and_without_git(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", path)
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert re.fullmatch(rf"xsp {re.escape(version.__version__)}( \([0-9a-f]{{8,40}}(-dirty)?\))?\n", shown)
    assert path or "(" not in shown


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return an sdist of the checkout, and a wheel that was built from the sdist alone."""
    folder = tmp_path_factory.mktemp("built")
    tools = environment(folder / "tools")
    install(tools, "build", cwd=folder)
    made = run(tools, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
    assert made.returncode == 0, made.stdout[-3000:] + made.stderr
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


def test_no_link_is_committed() -> None:
    """A link of one machine (to a built Jaeger, say) is in the way of what is built at its place on another."""
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert [line for line in listed.splitlines() if line.startswith("120000")] == []


@pytest.mark.slow
def test_sdist_and_wheel_hold_the_same_package_and_nothing_of_the_environment(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    with tarfile.open(sdist) as packed, zipfile.ZipFile(wheel) as unpacked:
        source = {name.partition("/")[2] for name in packed.getnames()}
        names = set(unpacked.namelist())
    tracked = subprocess.run(["git", "ls-files", "xsp", "collectors/xsp_collectors"], cwd=ROOT, capture_output=True,
                             text=True, check=False).stdout.split()  # fmt: skip
    installed = {name.removeprefix("collectors/") for name in tracked if (ROOT / name).is_file()}
    assert installed - names == set()
    assert {"README.md", "LICENSE", "CHANGELOG.md", "docs/index.md", *tracked} - source == set()
    unknown = {name for name in names if ".dist-info/" not in name} - installed - {f"xsp/{version.COMMIT_FILE}"}
    assert not tracked or not unknown, "modules that are in no commit, of an earlier build perhaps"


@pytest.mark.slow
def test_the_first_commands_work_where_only_the_wheel_is(built: tuple[Path, Path], tmp_path: Path) -> None:
    python = environment(tmp_path / "environment")
    install(python, built[1], cwd=tmp_path)
    command, elsewhere = python.with_name("xsp"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / TRACE.name).write_bytes(TRACE.read_bytes())

    def typed(*words: object) -> str:
        done = run(command, *words, cwd=elsewhere)
        assert done.returncode == 0, f"xsp {' '.join(map(str, words))}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    assert typed("--version").strip() == f"xsp {version.with_commit()}"
    for name in ("run", "analyze", "graph", "evaluate serve"):
        assert f"xsp {name}" in typed(*name.split(), "--help")
    typed("import", TRACE.name, "-o", "runs/gpt")
    assert "an iteration" in typed("analyze", "runs/gpt")
    assert "aten::" in typed("analyze", "runs/gpt", "ops")
    typed("report", "runs/gpt")
    (page,) = (elsewhere / "runs" / "gpt").glob("*.html")
    assert "<html" in page.read_text(encoding="utf-8")
    typed("advise", "runs/gpt")
    typed("export", "runs/gpt", "--format", "chrome", "-o", "gpt.json.gz")
    assert "cannot be used" not in typed("doctor") + typed("--help")
    if find_spec("torch") is None:
        return
    # PyTorch is gigabytes: that of the environment of this test comes behind the packages of the new one
    site = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=elsewhere).stdout.strip())
    (site / "borrowed.pth").write_text(str(Path(find_spec("torch").origin or "").parents[1]), encoding="utf-8")
    (elsewhere / "train.py").write_text(PROGRAM, encoding="utf-8")
    assert f"xsp of {site}" in typed("run", "train.py")
    assert "an iteration" in typed("analyze", "runs/train")
