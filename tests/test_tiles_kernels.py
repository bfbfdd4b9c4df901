"""The tiles' Triton kernels: in Triton's interpreter without a device, and on one where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra `torch`")
pytest.importorskip("triton", reason="needs Triton, which torch brings for Linux")

CHECK = Path(__file__)
SPECIAL = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan}


def interpreted(*arguments: str) -> str:
    """Run this file in Triton's interpreter, which is chosen when kernels are imported; return what it says."""
    ways = [str(Path(__file__).parents[1] / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, ways)),
                        "OMP_NUM_THREADS": "1"}  # fmt: skip
    done = subprocess.run([sys.executable, str(CHECK), *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_kernels_equal_the_reference_in_the_interpreter() -> None:
    assert "120 inputs, 3 special values: equal" in interpreted("cpu", "120", "1200")


def test_rates_are_shares_of_a_copy_by_the_bytes_that_are_moved() -> None:
    """Times are scripted: this says how the benchmark counts, and nothing of a device."""
    import gpu_tiles
    from gpu_tiles import Way

    seconds = {"copy": 2.0, "slow": 8.0, "fast": 1.0, "one": 4.0}
    result = {
        "copy": [Way("copy", lambda: "copy", 400)],
        "reduction": [Way("slow", lambda: "slow", 200), Way("fast", lambda: "fast", 180)],
        "torch.sum": [Way("one", lambda: "one", 200)],
        "scan": [],
    }
    shares = gpu_tiles.shares(result, lambda run: seconds[str(run())], 3)
    assert shares == {"reduction": ("fast", 0.9), "torch.sum": ("one", 0.25)}


def test_rates_are_taken_by_the_clock_of_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_tiles
    import standin
    import torch
    from gpu_tiles import Way
    from parts import turns

    from xsp.device import energy

    def ways(length: int, values: torch.Tensor) -> dict[str, list[Way]]:
        rows, target, size = values.view(-1, length), torch.empty_like(values), 2 * len(values)
        return {
            "copy": [Way("copy", lambda: target.copy_(values), 2 * size)],
            "reduction": [Way("sums", lambda: rows.sum(1, dtype=torch.float32), size)],
            "scan": [
                Way("reads", lambda: rows.cumsum(1, dtype=torch.float32).view(-1) + 0 * values.sum().item(), size)
            ],
            "torch.sum": [Way("torch.sum", lambda: rows.sum(1, dtype=torch.float32), size)],
            "torch.cumsum": [Way("torch.cumsum", lambda: rows.cumsum(1, dtype=torch.float32), size)],
        }

    standin.install(tmp_path, monkeypatch, watts=500)
    monkeypatch.setattr(energy, "LEAST_NS", 1_000_000)
    monkeypatch.setattr(energy, "LEAST_UPDATES", 200)
    monkeypatch.setattr(energy, "POLL_NS", 50_000)
    monkeypatch.setattr(gpu_tiles, "LENGTHS", (16, 256))
    columns = tuple("elements sums share torch scans share2 torch2 error peak".split())
    report = turns.Report("gpu_tiles", "Rates", columns)
    reached = gpu_tiles.measure(standin.StandIn(), 1 << 16, 3, report, ways)
    assert reached["reduction"] == 0
    copy_ns = standin.LAUNCH_NS + 2 * (1 << 16) / standin.BYTES_PER_NS
    assert report.data["256"]["copy_bytes_per_s"] == pytest.approx(4 * (1 << 16) / copy_ns * 1e9, rel=0.01)
    assert [row[1] for row in report.rows] == ["sums", "sums"]
    assert report.notes[0].startswith("Energy per call, at 256 elements: copy (copy) 2.6")
    assert "waited for the host" in report.notes[1]
    with pytest.raises(SystemExit):
        gpu_tiles.main(["--quick", "--device", "standin:7"])
    assert "there is no device standin:7 here" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_set_against_a_copy_is_right_in_the_interpreter() -> None:
    assert "6 ways, largest error" in interpreted("shares")


@pytest.mark.gpu
def test_kernels_equal_the_reference_on_a_device() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    compare("cuda", 600, 1 << 16)


def compare(device: str, count: int, most: int) -> None:
    """Compare the kernels with the reference: whole numbers whose sums are exact, and special values."""
    import torch
    from tiles import kernels, reference

    def of_kernel(name: str, values: np.ndarray, lengths: list[int], half: bool) -> np.ndarray:
        given = torch.tensor(values, dtype=torch.float16, device=device)
        entry = torch.tensor(lengths, dtype=torch.int64, device=device)
        return kernels.FUNCTIONS[name](name, given, entry, half).float().cpu().numpy()

    def of_tiles(name: str, values: np.ndarray, lengths: list[int], accumulate: str) -> np.ndarray:
        function = reference.reduce if name in reference.REDUCTIONS else reference.scan
        return function(name, values, lengths, reference.Unit(accumulate)).astype(np.float32)

    chance = np.random.default_rng(11)
    names = list(kernels.FUNCTIONS)
    for number in range(count):
        name, half = names[number % len(names)], bool(number // len(names) % 2)
        lengths = [int(2 ** chance.uniform(0, np.log2(most))) for _ in range(int(chance.integers(1, 5)))]
        lengths += [0] * int(chance.integers(0, 2))
        if number < len(names):
            lengths = [kernels.PART + 300, 16, 5]
        values = chance.integers(-1, 2, sum(lengths))
        result = of_kernel(name, values, lengths, half)
        expected = of_tiles(name, values, lengths, "half" if half else "single")
        assert np.array_equal(result, expected), f"seed 11, input {number}: {name}, {lengths}"
    for name in ("reduction_16n", "reduction_256n", "scan_16n", "scan_256n"):
        for special in SPECIAL.values():
            values = np.ones(600)
            values[293] = special
            result = of_kernel(name, values, [600], False)
            assert np.array_equal(result, of_tiles(name, values, [600], "single"), equal_nan=True), (name, special)
    print(f"{count} inputs, {len(SPECIAL)} special values: equal")


def count_shares() -> None:
    """Run what the benchmark of rates runs, on a processor: 32 segments of 40 elements."""
    import gpu_tiles
    import torch

    torch.manual_seed(0)
    values = torch.rand(32 * 40).half() / 16
    result = gpu_tiles.ways(40, values)
    errors = [gpu_tiles.error(kind, way, 40, values) for kind in ("reduction", "scan") for way in result[kind]]
    assert all(entry <= gpu_tiles.MOST_ERROR["scan"] for entry in errors), errors
    assert result["scan"][0].nbytes == 32 * 40 * 6
    assert result["reduction"][0].nbytes == 32 * 40 * 2 + 32 * 4
    print(f"{len(errors)} ways, largest error {max(errors):.1e}")


if __name__ == "__main__":
    if sys.argv[1] == "shares":
        count_shares()
    else:
        compare(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
