"""The notebooks: those in the repository were executed, say nothing of where, and run again here."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra `notebooks`")

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TRACE = ROOT / "notebooks" / "gpt_forward.json.gz"


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_executed_from_top_to_bottom(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    assert [out for cell in code(notebook) for out in cell.outputs if out.output_type == "error"] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_a_picture_and_explains_it(path: Path) -> None:
    notebook = read(path)
    assert any("image/png" in out.get("data", {}) for cell in code(notebook) for out in cell.outputs)
    assert notebook.cells[0].source.startswith("# ")
    assert f"{path.name})" in (ROOT / "docs" / "use" / "python.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_name_no_place(path: Path) -> None:
    texts = [str(out.get("text", "")) + str(out.get("data", {}).get("text/plain", ""))
             for cell in code(read(path)) for out in cell.outputs]  # fmt: skip
    assert [text for text in texts if re.search(r"(?<![\w.<])/(tmp|home|root|usr|work)/", text)] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_reads_nothing_outside_the_repository(path: Path) -> None:
    assert [cell.source for cell in code(read(path)) if "../.." in cell.source] == []


def test_the_trace_that_is_read_is_what_its_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TRACE.parent)
    import make_trace

    assert json.loads(gzip.decompress(TRACE.read_bytes())) == make_trace.recorded()


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    client = pytest.importorskip("nbclient", reason="needs the extra `notebooks`")
    for package in ("ipykernel", "matplotlib", "pandas", "torch"):
        pytest.importorskip(package, reason="needs the extras `notebooks` and `torch`")
    client.NotebookClient(
        read(path), timeout=600, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()


def test_the_notebook_of_predictions_shows_transfers_by_size_with_their_curves() -> None:
    cells = code(read(ROOT / "notebooks" / "predict.ipynb"))
    (drawn,) = [cell for cell in cells if "shape.seconds(" in cell.source]
    for label in ('xlabel="bytes"', 'ylabel="ms"', 'ylabel="GB/s"', "curve.timings"):
        assert label in drawn.source
    assert any("image/png" in out.get("data", {}) for out in drawn.outputs), "execute it: see docs/use/python.md"
