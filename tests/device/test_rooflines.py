"""Ceilings: found by the names that drivers give, quoted with a source, or measured and kept in a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from xsp import doctor, rundir
from xsp.analyses.kernel import roofs
from xsp.device import ceilings
from xsp.device import machine as device
from xsp.device.ceilings import Ceiling, ceiling
from xsp.errors import AnalysisError, UsageError
from xsp.run import Run


@pytest.mark.parametrize(
    ("name", "tera_flop_per_s", "giga_bytes_per_s"),
    [
        ("Tesla V100-SXM2-32GB", 15.7, 900),
        ("Tesla V100-DGXS-32GB", 15.7, 900),
        ("Tesla V100-PCIE-16GB", 14.0, 900),
        ("Tesla P100-PCIE-16GB", 9.3, 732),
        ("Tesla P100-SXM2-16GB", 10.6, 732),
        ("NVIDIA A100-SXM4-40GB", 19.5, 1555),
        ("NVIDIA A100-SXM4-80GB", 19.5, 2039),
        ("NVIDIA A100 80GB PCIe", 19.5, 1935),
        ("NVIDIA H100 80GB HBM3", 67, 3350),
        ("NVIDIA H100 PCIe", 51, 2000),
        ("NVIDIA H100 NVL", 60, 3938),
        ("NVIDIA H200", 67, 4800),
        ("NVIDIA GeForce RTX 4090", 82.6, 1008),
        ("AMD Instinct MI300X", 163.4, 5300),
    ],
)
def test_a_device_is_found_by_the_name_that_its_driver_gives(name, tera_flop_per_s, giga_bytes_per_s):
    result = ceiling(name)
    assert result.peak() == pytest.approx(tera_flop_per_s * 1e12)
    assert result.bytes_per_s == pytest.approx(giga_bytes_per_s * 1e9)


@pytest.mark.parametrize(
    "name",
    ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA A100", "Tesla V100-FHHL-16GB", ""],
)
def test_a_part_a_variant_and_an_unknown_device_have_no_ceiling_and_it_is_said_how_to_add_one(name):
    with pytest.raises(AnalysisError, match=r"no ceiling of the device .*doctor --measure.*XSP_DEVICES"):
        ceiling(name)


def test_a_users_file_adds_devices_and_goes_first(tmp_path, monkeypatch):
    more = tmp_path / "more.toml"
    more.write_text('[[device]]\nnames = ["Tesla T4", "Q9"]\nvector = { fp32 = 1 }\nmemory = 2\nsource = "mine"\n')
    monkeypatch.setenv(ceilings.VARIABLE, str(more))
    assert ceiling("NVIDIA Q9").ideal_intensity() == 500
    assert ceiling("Tesla T4").source == "mine"
    monkeypatch.setenv(ceilings.VARIABLE, str(tmp_path / "absent.toml"))
    with pytest.raises(AnalysisError, match=r"absent\.toml: cannot be read"):
        ceiling("Tesla T4")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (("[[device]]", "[device]"), "in two brackets"),
        (('names = ["Q9"]', 'names = "Q9"'), "needs its names"),
        (('names = ["Q9"]', ""), "needs its names"),
        (("memory = 2", ""), "Q9: memory in GB/s"),
        (("memory = 2", "memory = 0"), "Q9: memory in GB/s"),
        (("fp32 = 1", 'fp32 = "1"'), "Q9: memory in GB/s and the peaks"),
        (("vector = { fp32 = 1 }", "vector = 1"), "Q9: vector and tensor are tables"),
        (('source = "mine"', ""), "source is a text"),
    ],
)
def test_a_users_file_of_another_form_is_refused_with_what_is_wrong(tmp_path, monkeypatch, wrong, reason):
    text = '[[device]]\nnames = ["Q9"]\nvector = { fp32 = 1 }\nmemory = 2\nsource = "mine"\n'
    more = tmp_path / f"{abs(hash(wrong))}.toml"
    more.write_text(text.replace(*wrong))
    monkeypatch.setenv(ceilings.VARIABLE, str(more))
    with pytest.raises(AnalysisError, match=re.escape(reason)):
        ceiling("Tesla T4")


def test_every_quote_has_a_source_and_figures_of_a_sensible_size():
    entries = ceilings._entries(None)
    names = [name for entry in entries for name in entry["names"]]
    assert len(names) == len(set(names))
    for entry in entries:
        assert re.match(r"https://\S+$", entry["source"])
        assert 100 <= entry["memory"] <= 20_000
        for units in (entry["vector"], entry.get("tensor", {})):
            assert set(units) <= {"fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8"}
            assert all(0.1 <= peak <= 20_000 for peak in units.values())


def test_what_was_measured_counts_before_what_is_quoted():
    measured = Ceiling("Tesla T4", {"fp32": 7e12}, {}, 250e9, "measured").content()
    run = Run.of({"machine": {"devices": ["Tesla T4"], "cpu": "a cpu", "ceilings": {"Tesla T4": measured}}})
    assert ceilings.of_run(run, on_device=True).ideal_intensity() == 28
    assert ceilings.of_run(Run.of({"machine": {"devices": ["Tesla T4"]}}), on_device=True).peak() == 8.1e12
    with pytest.raises(AnalysisError, match="was not measured"):
        ceilings.of_run(run, on_device=False)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({}, "does not say which device"),
        ({"devices": []}, "does not say which device"),
        ({"devices": "Tesla T4"}, "does not say which device"),
        ({"devices": ["x"]}, "no ceiling"),
        ({"devices": ["x"], "ceilings": {"x": 5}}, "damaged"),
        ({"devices": ["x"], "ceilings": {"x": Ceiling("x", {}, {}, 0, "").content()}}, "damaged"),
        ({"devices": ["x"], "ceilings": {"x": Ceiling("x", {"fp32": float("nan")}, {}, 1, "").content()}}, "damaged"),
        ({"devices": ["x"], "ceilings": [1]}, "no ceiling"),
        (None, "does not say which device"),
    ],
)
def test_a_run_that_says_anything_else_is_refused_with_a_reason(machine, reason):
    with pytest.raises(AnalysisError, match=reason):
        ceilings.of_run(Run.of({"machine": machine}), on_device=True)


def test_a_processor_is_measured_and_its_ceiling_kept_in_the_run(tmp_path: Path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ceilings, "ROUNDS_NS", 1_000_000)
    measured = ceilings._measure(torch, "cpu", device.cpu_model() or "cpu", 64, 1 << 16, lambda: None)
    assert set(measured.precisions()) == {"fp64", "fp32", "bf16"}
    monkeypatch.setattr(ceilings, "measure", lambda: [measured])
    for name, machine in (("mine", device.describe()), ("other", {"cpu": "another"})):
        (tmp_path / name).mkdir()
        rundir.write_run(tmp_path / name, {"machine": machine})
    assert len(list(doctor.measure([str(tmp_path / "mine")]))) == 2
    assert ceilings.of_run(rundir.read_run(tmp_path / "mine"), on_device=False) == measured
    with pytest.raises(UsageError, match="not of this machine"):
        list(doctor.measure([str(tmp_path / "other")]))


def test_a_working_set_has_the_rate_of_the_cache_that_it_fits() -> None:
    result = Ceiling("cpu", {"fp32": 1e11}, {}, 10e9, "measured", ((1 << 16, 90e9), (1 << 20, 50e9), (1 << 26, 11e9)))
    sizes = (1, 1 << 16, 1 << 18, 1 << 20, 1 << 25, 1 << 26, 1 << 40)
    assert [result.bandwidth(size) / 1e9 for size in sizes] == [90, 90, 90, 50, 50, 11, 10]
    assert ceilings._from_measurement(result.content()) == result
    bare = Ceiling("Tesla T4", {"fp32": 7e12}, {}, 250e9, "quoted")
    assert bare.bandwidth(1) == 250e9
    assert "levels" not in bare.content()


def test_caches_are_measured_not_slower_than_what_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(ceilings, "ROUNDS_NS", 1_000_000)
    result = ceilings._measure(torch, "cpu", "a cpu", 64, 1 << 16, lambda: None)
    rates = [rate for _, rate in result.levels]
    assert [size for size, _ in result.levels] == list(ceilings.WORKING_SETS)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] >= result.bytes_per_s


def test_a_name_without_its_form_means_the_fastest() -> None:
    assert ceilings.ceiling_by_user_name("H100").name == "H100 HBM3"
    assert ceilings.ceiling_by_user_name("Tesla V100-SXM2-16GB") == ceiling("Tesla V100-SXM2-16GB")
    assert ceilings.ceiling_by_user_name("mi300x").bytes_per_s == ceiling("AMD Instinct MI300X").bytes_per_s
    for unknown in ("", "no such device"):
        with pytest.raises(AnalysisError, match="no ceiling"):
            ceilings.ceiling_by_user_name(unknown)


def test_what_fewer_cores_reached_is_no_ceiling_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for cores, there in ((1, True), (2, True), (4, False)):
        ceilings.store({"a cpu": ceilings.Ceiling("a cpu", {"fp32": 1e9}, {}, 1e9, "measured", threads=2)})
        monkeypatch.setattr("xsp.processes.cores", lambda cores=cores: cores)
        assert (ceilings.of_machine("a cpu") is not None) == there


def test_a_processor_is_measured_with_all_cores_and_threads_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        plain = ceilings.Ceiling("a cpu", {}, {}, 1e9, "measured")
        monkeypatch.setattr(ceilings, "_measure", lambda torch, *_, **__: seen.append(torch.get_num_threads()) or plain)
        monkeypatch.setattr("xsp.processes.cores", lambda: 2)
        assert next(iter(ceilings.measure())).threads == 2
        assert (seen, torch.get_num_threads()) == ([2], 1)
    finally:
        torch.set_num_threads(before)


def test_a_measurement_waits_for_the_device_that_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)

    def measured(torch: object, where: str, name: str, *, finish: Callable[[], None], **_: object) -> Ceiling:
        finish()
        return Ceiling(name, {}, {}, 1e9, where)

    monkeypatch.setattr(ceilings, "_measure", measured)
    assert [entry.source for entry in ceilings.measure()] == ["cpu", "cuda:0", "cuda:1"]
    assert waited == [0, 1]


def test_the_name_of_a_measured_precision_is_no_sql() -> None:
    result = Ceiling("x", {"it's": 2e12}, {}, 1e9, "measured")
    with duckdb.connect() as connection:
        rows = connection.execute(
            f"WITH {roofs(result)} SELECT precision FROM roofs WHERE peak_gflop_per_s > 0"
        ).fetchall()
    assert rows == [("it's",)]


def test_what_was_measured_of_a_machine_is_kept_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = Ceiling("a cpu", {"fp32": 7e12}, {}, 250e9, "measured", ((1 << 16, 9e11),))
    assert ceilings.of_machine("a cpu") is None
    assert ceilings.store({"a cpu": measured}) == ceilings.cache_path()
    assert ceilings.of_machine("a cpu") == measured
    lower = replace(measured, bytes_per_s=1.0, vector={"fp32": 1.0}, levels=((64, 2.0),))
    ceilings.store({"a cpu": lower})
    kept = ceilings.of_machine("a cpu")
    assert kept is not None, "other work lowers what is measured: the highest rates are kept"
    assert (kept.vector, kept.bytes_per_s) == (measured.vector, measured.bytes_per_s)
    assert all(kept.bandwidth(size) >= rate for size, rate in measured.levels)
    ceilings.cache_path().write_text('{"a cpu": 3}')
    with pytest.raises(AnalysisError, match="measure again"):
        ceilings.of_machine("a cpu")
    ceilings.cache_path().write_text("half a fi")
    assert ceilings.of_machine("a cpu") is None


@pytest.mark.gpu
def test_a_device_is_measured_below_its_quote():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    for measured in list(ceilings.measure())[1:]:
        quoted = ceiling(measured.name)
        assert 0.3 * quoted.bytes_per_s < measured.bytes_per_s <= 1.05 * quoted.bytes_per_s
        assert (measured.peak("bf16") or 0) <= 1.05 * (quoted.peak("bf16") or 0)
