"""Whether sharing would pay, from constants whose answers can be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_share_weights import written

from xsp import cli, terminal
from xsp.bench.shapes import LinePiece, Shape
from xsp.share import estimate, savings
from xsp.share.loadworker import ATTACH, MMAP, PICKLE
from xsp.share.measuring import COLD, WARM
from xsp.share.weights import StoredTensor
from xsp.stats import Interval

MB = 1_000_000


def line(start_s: float, per_byte_s: float) -> Shape:
    piece = LinePiece(1, 1e9, Interval(start_s, start_s, start_s), Interval(per_byte_s, per_byte_s, per_byte_s))
    return Shape((piece,), (), 10, 0.0, 0.0, 1.0, None, 1e9)


def known(**costs: tuple[float, float]) -> estimate.Constants:
    """Return constants of a machine that reads at 10 GB/s, gets fresh memory at 5, copies at 4, and digests at 1."""
    shapes = {"read-cached": line(0, 0.1e-9), "first-touch": line(0, 0.2e-9), "copy": line(0, 0.25e-9)}
    ways = {MMAP: (0.0, 10e3), PICKLE: (0.0, 50e3), ATTACH: (1e6, 5e3)}
    names = {"mmap": MMAP, "pickle": PICKLE, "attach": ATTACH}
    ways.update({names[name]: cost for name, cost in costs.items()})
    return estimate.Constants({way: estimate.WayCost(*cost) for way, cost in ways.items()}, shapes, 1.0)


def of(rows: list[estimate.SavingEstimate], way: str, state: str) -> estimate.SavingEstimate:
    return next(each for each in rows if (each.way, each.state) == (way, state))


def test_what_is_saved_is_counted_by_hand() -> None:
    rows = estimate.estimate_savings(100 * MB, 300, known())
    assert of(rows, MMAP, WARM).saved_ns == pytest.approx(300 * 5e3 - 1e6)
    assert of(rows, PICKLE, WARM).saved_ns == pytest.approx(30e6 + 300 * 45e3 - 1e6)
    assert of(rows, MMAP, COLD).saved_ns == pytest.approx(300 * 5e3 - 1e6 - 30e6 - 25e6 - 100e6)
    assert of(rows, PICKLE, COLD).saved_ns == pytest.approx(300 * 45e3 - 1e6 - 25e6 - 100e6)


@pytest.mark.parametrize(("tensors", "pays"), [(100, False), (199, False), (201, True), (1000, True)])
def test_it_pays_over_a_mapped_file_from_so_many_tensors_on(tensors: int, pays: bool) -> None:
    for nbytes in (MB, 500 * MB):
        assert of(estimate.estimate_savings(nbytes, tensors, known()), MMAP, WARM).is_saving == pays


def test_where_tensors_cost_more_in_the_store_it_pays_by_bytes_alone() -> None:
    dear = known(attach=(1e6, 90e3))
    assert not of(estimate.estimate_savings(500 * MB, 10, dear), MMAP, WARM).is_saving
    assert of(estimate.estimate_savings(500 * MB, 10, dear), PICKLE, WARM).is_saving
    assert not of(estimate.estimate_savings(MB, 1000, dear), PICKLE, WARM).is_saving
    tensors = [
        StoredTensor("big.w", "U8", (500 * MB,), 0, 500 * MB),
        *(StoredTensor(f"s.{n}", "U8", (1,), 0, 1) for n in range(99)),
    ]
    parts = {row["name"]: row["saved_ns"] for row in savings.estimate_json("f", tensors, dear)["groups"]}
    assert list(parts) == ["big", "s"]
    assert parts["big"][PICKLE] > 0 > parts["s"][PICKLE]
    text = terminal.page(savings.estimate_document("f", tensors, dear))
    assert "torch.load, warm" in text
    assert "90.0 µs per tensor" in text


def test_without_timings_it_says_what_to_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "m", {"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}, bytes(8))
    monkeypatch.setattr(estimate, "costs", lambda *_: pytest.fail("measured in vain"))
    assert cli.main(["share", "estimate", str(path), "--timings", str(tmp_path / "t"), "--quiet"]) == 2
    assert "xsp bench transfers --families copy,read-cached,first-touch" in capfd.readouterr().err
    assert cli.main(["share", "estimate", str(tmp_path / "none"), "--timings", str(tmp_path / "t")]) == 2
    assert "cannot be read" in capfd.readouterr().err


@pytest.mark.slow
def test_the_command_measures_what_tensors_take(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    shapes: dict[str, Any] = known().shapes  # type: ignore[assignment]
    monkeypatch.setattr(estimate, "curves", lambda timings: shapes)
    path = written(tmp_path / "m", {"a.w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}, bytes(8))
    words = ["share", "estimate", str(path), "--timings", str(tmp_path / "t"), "--quiet", "--format", "json"]
    assert cli.main(words) == 0
    found = json.loads(capfd.readouterr().out)
    assert set(found["costs"]) == {MMAP, PICKLE, ATTACH}
    assert all(cost["tensor_ns"] > 0 for cost in found["costs"].values())
    assert [row["tensors"] for row in found["groups"]] == [1]
