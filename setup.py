"""What pyproject.toml cannot state: a wheel and an sdist hold the commit that they were built from."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
VERSION: dict = {"__name__": "version", "__file__": str(HERE / "xsp" / "version.py")}
exec((HERE / "xsp" / "version.py").read_text(encoding="utf-8"), VERSION)  # xsp itself needs what is not there yet


def write_commit(package: Path) -> None:
    """Write the commit into a copy of the package; from an sdist, which has it already, the file is copied."""
    commit = VERSION["commit_of_package"](HERE / "xsp")
    if commit:
        (package / VERSION["COMMIT_FILE"]).write_text(commit + "\n", encoding="ascii")


class BuildWithCommit(build_py):
    """The build of a wheel."""

    def run(self) -> None:
        """Copy the package, and write its commit."""
        super().run()
        if not self.editable_mode:  # an editable install is the checkout, which asks git
            write_commit(Path(self.build_lib) / "xsp")


class SdistWithCommit(sdist):
    """The build of an sdist."""

    def make_release_tree(self, base_dir: str, files: list) -> None:
        """Copy the files, and write the commit beside them."""
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir) / "xsp")


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit})
