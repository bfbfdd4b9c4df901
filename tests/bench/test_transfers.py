"""Transfers and collectives: their shapes from planted curves, their place in the table, and real ones, briefly."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import exit_code
from depth import deep

from xsp import sections, terminal
from xsp.bench import curvetext, links, numanodes, partner, transfers, turns
from xsp.bench.environment import Environment
from xsp.bench.shapes import fit
from xsp.bench.spec import TIMED, CacheState, Spec, Status, Timing, untimed
from xsp.bench.timings import Timings
from xsp.bench.transfers import COLLECTIVES, FAMILIES, MEMORY, MIB, OF_RANKS, TRANSFERS, TransferCurve
from xsp.cli import main
from xsp.errors import BenchError, UsageError

HERE = Environment({"cpu": "test", "devices": []})
ALPHA, NEAR, KNEE, FAR = 5e-6, 1e-10, 1 << 20, 4e-10


def planted(sizes: Sequence[float]) -> list[float]:
    """Latency, then one rate up to the knee and a lower one beyond it."""
    return [ALPHA + NEAR * each if each < KNEE else ALPHA + NEAR * KNEE + FAR * (each - KNEE) for each in sizes]


def recovered(seed: int, points: int) -> list[float]:
    """Return by how much latency, both rates and the knee are off under 5 % noise."""
    draw = np.random.default_rng(seed)
    sizes = np.unique(np.geomspace(1 << 10, 1 << 30, points).round())
    shape = fit(sizes.tolist(), (planted(sizes) * (1 + 0.05 * draw.standard_normal(len(sizes)))).tolist(), 0.05)
    assert len(shape.pieces) == 2, f"seed {seed}: {len(shape.pieces)} pieces"
    found = shape.alpha.value, shape.pieces[0].per_byte.value, shape.beta.value, shape.knees[0].value
    return [abs(got / planted - 1) for got, planted in zip(found, (ALPHA, NEAR, FAR, KNEE), strict=True)]


def test_planted_constants_come_back_without_noise() -> None:
    sizes = [1 << place for place in range(12, 27)]
    shape = fit(sizes, planted(sizes))
    assert [len(shape.pieces), len(shape.knees)] == [2, 1]
    assert shape.alpha.value == pytest.approx(ALPHA, rel=1e-3)
    assert shape.beta.value == pytest.approx(FAR, rel=1e-3)
    assert shape.knees[0].value == pytest.approx(KNEE, rel=1e-2)
    assert shape.held_out == pytest.approx(0, abs=0.05)
    assert not shape.has_outlier
    assert shape.seconds(3 << 20) == pytest.approx(planted([3 << 20])[0], rel=1e-2)


def test_planted_constants_come_back_under_noise() -> None:
    off = [recovered(seed, 21) for seed in range(5)]
    assert all(each < 0.06 for each in np.median(off, axis=0)), off


@pytest.mark.slow
def test_planted_constants_come_back_within_2_percent_under_5_percent_noise() -> None:
    off = np.median([recovered(seed, 81) for seed in range(15)], axis=0)
    assert all(each <= 0.02 for each in off), off


def test_one_line_is_one_piece_however_noisy() -> None:
    for seed in range(4):
        draw = np.random.default_rng(seed)
        sizes = np.array([4096.0 * 2**place for place in range(14)])
        times = (1e-5 + 1e-9 * sizes) * (1 + 0.1 * draw.standard_normal(14))
        assert len(fit(sizes.tolist(), times.tolist(), 0.1).pieces) == 1, f"seed {seed}"


def test_uncertain_timings_do_not_hide_that_memory_is_ten_times_slower_than_caches() -> None:
    sizes = [4096 << place for place in range(15)]
    for seed in range(4):
        noise = np.random.default_rng(seed).uniform(0.75, 1.25, len(sizes))
        times = [
            (6e-7 + 2e-11 * min(each, 1 << 20) + 3e-10 * max(0, each - (1 << 20))) * noise[place]
            for place, each in enumerate(sizes)
        ]
        shape = fit(sizes, times, 0.4)  # half intervals of a machine that others use
        assert len(shape.pieces) == 2, f"seed {seed}"
        assert 1 << 19 <= shape.knees[0].value <= 1 << 22, f"seed {seed}"
        assert shape.beta.value == pytest.approx(3e-10, rel=0.3), f"seed {seed}"


def test_a_jump_is_a_knee_between_two_sizes() -> None:
    sizes = [4096 << place for place in range(14)]
    shape = fit(sizes, [(1e-5 if each < 1 << 18 else 9e-4) + 1e-9 * each for each in sizes])
    assert len(shape.pieces) == 2
    (knee,) = shape.knees
    assert 1 << 17 <= knee.low <= knee.value <= knee.high <= 1 << 18


def test_a_disturbed_size_moves_nothing_and_is_named() -> None:
    sizes = [4096 << place for place in range(14)]
    times = [1e-5 + 1e-9 * each for each in sizes]
    times[3] *= 4
    shape = fit(sizes, times)
    assert shape.alpha.value == pytest.approx(1e-5, rel=0.01)
    assert shape.beta.value == pytest.approx(1e-9, rel=0.01)
    assert (shape.has_outlier, shape.worst_at) == (True, sizes[3])


def test_a_curve_that_bends_at_its_end_is_not_extrapolated() -> None:
    sizes = [4096 << place for place in range(12)]
    straight = [1e-5 + 1e-9 * each for each in sizes]
    assert fit(sizes, straight).reach == 4 * sizes[-1]
    assert fit(sizes, [*straight[:-1], 3 * straight[-1]]).reach == sizes[-1]


@pytest.mark.parametrize(
    ("sizes", "times"), [([1, 2], [1, 2]), ([1, 2, 2], [1, 1, 1]), ([1, 2, 3], [1, 0, 1]), ([0, 1, 2], [1, 1, 1])]
)
def test_what_is_no_curve_is_refused(sizes: list[float], times: list[float]) -> None:
    with pytest.raises(UsageError):
        fit(sizes, times)


# --- the table -------------------------------------------------------------------------------------------


def timing(of: Spec, ns: float, **others: object) -> Timing:
    figures = {"trimmed_ns": ns, "low_ns": 0.99 * ns, "high_ns": 1.01 * ns, "least_ns": ns, "samples": 9}
    whole = {**figures, "taken_ns": 1, "xsp": "0", "canary_ratio": 1.0, **others}
    return dataclasses.replace(untimed(of, Status.OK), **whole)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Timings, list[TransferCurve]]:
    """A table with transfers, collectives of two and three ranks, and holes; and its curves."""
    folder = tmp_path_factory.mktemp("timings")
    timings = Timings.open(folder, HERE)
    asked = transfers.of_transfers(["copy", "tcp-loopback", "tcp-loopback-duplex", "read-direct"], (1,), "ext4")
    asked += transfers.of_collectives(list(OF_RANKS), (2, 3))
    made = []
    for spec in asked:
        name, given = transfers.arguments(spec)
        ranks = given.get("ranks", 1)
        seconds = planted([given["bytes"]])[0] * ranks * (1.6 if name.endswith("duplex") else 1)
        if name == "read-direct":
            made.append(dataclasses.replace(untimed(spec, Status.FAILED, "not here"), taken_ns=1, xsp="0"))
        else:
            made.append(timing(spec, 1e9 * seconds))
    timings.add(made)
    there = Timings.open(folder, HERE)
    return there, transfers.curves(there)


def test_transfers_lie_in_the_table_of_timings_and_their_curves_are_fitted(
    filled: tuple[Timings, list[TransferCurve]],
) -> None:
    _, found = filled
    by_name = {each.name: each for each in found}
    copy, reduced = by_name["copy"], by_name["all_reduce 3 ranks"]
    assert copy.shape is not None
    assert reduced.shape is not None
    assert copy.shape.beta.value == pytest.approx(FAR, rel=0.01)
    assert reduced.shape.beta.value == pytest.approx(3 * FAR, rel=0.01)
    assert reduced.bus_factor == pytest.approx(4 / 3)
    assert transfers.crowding_factor(found, "together-copy", 3, 1) == pytest.approx(3)
    assert transfers.crowding_factor(found, "together-copy", 4, 1) is None
    assert by_name["read-direct ext4"].shape is None
    ratios = {each.name: each for each in transfers.ratios(found)}
    assert ratios["duplex tcp-loopback"].value == pytest.approx(2 / 1.6, rel=0.02)
    assert ratios["locality copy"].value == pytest.approx(FAR / NEAR, rel=0.05)


def test_conditions_make_other_specs_and_keys_need_neither_torch_nor_the_table_engine() -> None:
    one = transfers.spec("read-cold", TRANSFERS, 4096, cold=True, filesystem="ext4")
    assert one.state is CacheState.COLD
    assert Spec.from_plain(one.to_plain()) == one
    others = [
        transfers.spec("read-cold", TRANSFERS, 4096, cold=True, filesystem="xfs"),
        transfers.spec("all_reduce", COLLECTIVES, 4096, ranks=2),
        transfers.spec("all_reduce", COLLECTIVES, 4096, ranks=3),
        transfers.spec("all_reduce", COLLECTIVES, 8192, ranks=3),
    ]
    assert len({each.key for each in (one, *others)}) == 5
    code = "import sys, xsp.bench.transfers; print({'torch', 'duckdb'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_few_sizes_of_each_family_come_before_all_sizes_of_any() -> None:
    names = [name for name, family in FAMILIES.items() if family.group == MEMORY and family.least < MIB]
    order = [transfers.arguments(each)[0] for each in transfers.of_transfers(names, (1,))]
    coarse = order[: len(order) // 2]
    assert set(coarse) == set(names)
    assert len(order) == sum(len(transfers.sizes(FAMILIES[name])) for name in names)


def test_the_page_fits_80_columns_and_says_what_loopback_is(filled: tuple[Timings, list[TransferCurve]]) -> None:
    timings, found = filled
    text = terminal.page(curvetext.document(COLLECTIVES, timings, found, 1.0, 3, 5))
    assert max(map(len, text.splitlines())) < 80
    assert "loopback is not a network" in " ".join(text.split())
    assert "read-direct ext4: failed, not here" in text
    assert "3 ranks at once: copies take 3.00 times as long" in text
    content = json.loads(json.dumps(curvetext.as_json(COLLECTIVES, timings, found, 1.0, 3, 5), allow_nan=False))
    assert {each["family"] for each in content["curves"]} >= {"copy", "all_reduce", "beside"}
    assert sections.of({"xsp_section": 1, **sections.plain(curvetext.section(COLLECTIVES, timings, found))}).title


@pytest.mark.parametrize(("cores", "is_said"), [(2, True), (6, True), (64, False)])
def test_ranks_are_said_to_share_cores_only_where_they_do(
    filled: tuple[Timings, list[TransferCurve]], cores: int, is_said: bool
) -> None:
    timings, found = filled
    there = Timings(timings.folder, dataclasses.replace(HERE, properties={**HERE.properties, "cores": cores}))
    of_two_threads = [dataclasses.replace(each, threads=2) for each in found]
    notes = curvetext.as_json(COLLECTIVES, there, of_two_threads, None, 0, 0)["notes"]
    assert any("loopback is not a network" in each for each in notes)
    assert any(f"have {cores} cores" in each for each in notes) == is_said


def test_ranks_of_other_threads_are_other_curves(filled: tuple[Timings, list[TransferCurve]], tmp_path: Path) -> None:
    timings = Timings.open(tmp_path, HERE)
    made = []
    for threads in (1, 2):
        for spec in transfers.of_collectives(["all_reduce", "together-product"], (2,), threads):
            name, given = transfers.arguments(spec)
            ns = 1e6 * (3 if threads == 2 else 2) if given["ranks"] == 2 else 1e6 / threads
            made.append(timing(spec, ns if name != "all_reduce" else ns * (1 + given["bytes"] / MIB)))
    timings.add(made)
    found = transfers.curves(timings)
    assert {"all_reduce 2 ranks", "all_reduce 2 ranks × 2"} <= {each.name for each in found}
    assert [(each.threads, each.factor) for each in transfers.slowdowns(found)] == [
        (1, pytest.approx(2)), (2, pytest.approx(6)),
    ]  # fmt: skip
    text = terminal.page(curvetext.document(COLLECTIVES, timings, found, None, 0, 0))
    assert "2 ranks of 2 threads at once: products take 6.00 times" in text
    assert "ranks × N: N threads per rank" in text
    assert max(map(len, text.splitlines())) < 80


def test_a_section_of_no_run_is_refused_before_anything_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["transfers", "--section", str(tmp_path), "--timings", str(tmp_path / "none")]
    assert main(["bench", *words]) == 2
    assert "not a run directory" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_an_empty_table_is_shown_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "collectives", "--list", "--timings", str(tmp_path / "none")]) == 0
    assert "0 timings" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["transfers", "--families", "memroy"], "did you mean memory"),
        (["transfers", "--directory", "/nowhere"], "not a folder"),
        (["collectives", "--ranks", "1"], "2 to 16 ranks"),
        (["collectives", "--ranks", "99"], "2 to 16 ranks"),
        (["transfers", "--budget", "0s"], "--budget"),
        (["transfers", "--check"], "no timings of this machine to check"),
        (["transfers", "--compact"], "give one SOURCE"),
    ],
)
def test_what_cannot_be_timed_is_refused_in_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("bench", *words, "--timings", str(tmp_path / "none")) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_transfers_of_a_device_are_timed_by_its_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import standin

    from xsp.bench import devicemoves
    from xsp.bench.inputs import NotTimeable

    standin.install(tmp_path / "site", monkeypatch)
    size, calls = 1 << 16, 10
    moved = standin.LAUNCH_NS + size / standin.BYTES_PER_NS
    waited = standin.ISSUE_NS + moved
    expected = {
        "device-copy": moved, "device-strided": moved, "device-write": moved,
        "device-read": standin.LAUNCH_NS + 4 / standin.BYTES_PER_NS, "host-to-device-pinned": moved,
        "device-to-host-pinned": moved, "both-ways-pinned": moved,
        "host-to-device-pageable": waited - standin.LAUNCH_NS, "device-to-host-pageable": waited - standin.LAUNCH_NS,
        "kernel-launch": standin.ISSUE_NS, "graph-launch": standin.ISSUE_NS,
    }  # fmt: skip
    for name, ns in expected.items():
        prepared = devicemoves.prepare(name, size)
        assert prepared.timed is not None
        found = prepared.timed(calls) / calls
        if "pageable" in name:  # the host issues the next one while the device works, and waits once
            assert ns / 2 < found < waited, name
        else:
            assert found == pytest.approx(ns, rel=0.01), name
    for name, said in (
        ("zero-copy", "reads no memory of the host in place"), ("managed-demand", "has no managed memory"),
        ("peer-copy", "a peer copy needs two devices of one kind, and here is only standin:0"),
    ):  # fmt: skip
        with pytest.raises(NotTimeable, match=said):
            devicemoves.prepare(name, size)
    monkeypatch.setenv(standin.VARIABLE, '{"count": 2}')
    prepared = devicemoves.prepare("peer-copy", size)
    assert prepared.timed is not None
    assert prepared.timed(1) == pytest.approx(waited, rel=0.01)
    monkeypatch.setenv(standin.VARIABLE, '{"count": 0}')
    with pytest.raises(NotTimeable, match="there is no device here"):
        devicemoves.prepare("device-copy", size)


@pytest.fixture
def transfers_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Timings]]:
    """Time families of transfers on the stand-in with some settings, by the command, and return the table."""
    import standin

    from xsp.bench.environment import current_environment

    def timed(families: str, code: int = 0, **values: Any) -> Timings:
        standin.install(tmp_path / "site", monkeypatch, **values)
        current_environment.cache_clear()
        words = ["--families", families, "--budget", "60s", "--timings", str(tmp_path / "timings")]
        assert main(["bench", "transfers", *words]) == code
        return Timings.open(tmp_path / "timings")

    yield timed
    current_environment.cache_clear()


@pytest.mark.parametrize("timed", ["kernel-launch", deep("device-read,kernel-launch")])
def test_the_command_times_any_device_that_the_seam_has(
    transfers_there: Callable[..., Timings], timed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = transfers_there(f"{timed},zero-copy", count=2)
    assert [device["name"] for device in found.environment.properties["devices"]] == ["Stand-in 1", "Stand-in 1"]
    by_name: dict[str, set[Status]] = {}
    for each in found:
        by_name.setdefault(each.op.partition("::")[2], set()).add(each.status)
    assert all(by_name[name] <= TIMED for name in timed.split(","))
    assert by_name["zero-copy"] == {Status.FAILED}
    assert "2 × Stand-in 1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_device_that_is_busy_is_one_error_and_beside_other_transfers_a_hole(
    transfers_there: Callable[..., Timings], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    busy = "standin:0 is busy, 97 % by other processes: end them"
    transfers_there("kernel-launch", 2, obstacle=busy)
    assert capsys.readouterr().err.splitlines()[-1] == f"xsp: error: {busy}"
    found = transfers_there("kernel-launch,pipe", obstacle=busy)
    assert {each.op for each in found if each.op.startswith("transfer")} == {"transfer::pipe"}
    assert f"{busy}; what needs it was not timed: run it again" in " ".join(capsys.readouterr().out.split())
    assert "transfer::kernel-launch" in {each.op for each in transfers_there("kernel-launch")}


@pytest.mark.slow
def test_a_device_that_is_lost_or_full_marks_the_transfer_and_the_others_are_timed(
    transfers_there: Callable[..., Timings], tmp_path: Path
) -> None:
    found = transfers_there("device-write,kernel-launch", faults={"aten::fill_": "memory"})
    full = [each for each in found if each.op == "transfer::device-write"]
    assert {(each.status, each.reason) for each in full} == {
        (Status.TOO_LARGE, "stand-in out of memory: 3 GiB were asked for")
    }
    gone = {"faults": {"aten::fill_": "gone"}, "gone": str(tmp_path / "gone")}
    found = transfers_there("device-write,pipe", **gone)
    lost = [each for each in found if each.status is Status.FAILED]
    assert [each.reason for each in lost] == ["RuntimeError: stand-in error: an illegal address was used"]
    assert any(each.op == "transfer::pipe" and each.is_timed for each in found)


def test_without_a_device_its_transfers_are_refused_and_with_one_peers_are(tmp_path: Path) -> None:
    timings = Timings.open(tmp_path, HERE)
    found = links.plan_transfers(timings, TRANSFERS, None, (2,), (1,), tmp_path)
    assert not any(FAMILIES[transfers.arguments(each)[0]].device for each in found.specs)
    count = sum(family.device for family in FAMILIES.values())
    assert found.refusals[0] == f"no device here, so not timed: {count} families that need one"
    few = links.plan_transfers(timings, TRANSFERS, "copy,kernel-launch,zero-copy", (2,), (1,), tmp_path)
    assert few.refusals == ("no device here, so not timed: kernel-launch, zero-copy",)
    with pytest.raises(UsageError, match="no device here, which is needed for managed-demand, kernel-launch"):
        links.plan_transfers(timings, TRANSFERS, "managed-demand,kernel-launch", (2,))
    with pytest.raises(UsageError, match="there is no device here"):
        links.plan_transfers(timings, TRANSFERS, "device", (2,))
    one = Timings.open(tmp_path, Environment({"devices": [{"name": "X"}]}))
    assert links.plan_transfers(one, TRANSFERS, "copy,device", (2,), (1,), tmp_path).refusals == (
        "only one device here, so not timed: peer-copy",
    )
    with pytest.raises(UsageError, match="two are needed for peer-copy"):
        links.plan_transfers(one, TRANSFERS, "peer-copy", (2,))


def test_a_folder_without_room_or_in_memory_is_said_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = Timings.open(tmp_path / "timings", HERE)
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(links, "MOUNTS", mounts)
    mounts.write_text("tmpfs / tmpfs rw 0 0\n")
    found = links.plan_transfers(timings, TRANSFERS, "storage", (2,), (1,), tmp_path)
    assert {transfers.arguments(each)[0] for each in found.specs} == {"write-buffered", "read-cached", "read-mapped"}
    assert "(tmpfs) are in memory, so not timed: write-fsync, read-cold, read-direct, write-direct" in found.refusals[0]
    with pytest.raises(UsageError, match="a disk is needed for read-cold: name another one, --directory DIR"):
        links.plan_transfers(timings, TRANSFERS, "read-cold", (2,), (1,), tmp_path)
    mounts.write_text("disk / ext4 rw 0 0\n")
    monkeypatch.setattr(links, "ROOM", 1 << 40)
    found = links.plan_transfers(timings, TRANSFERS, "storage,pipe", (2,), (1,), tmp_path)
    assert {transfers.arguments(each)[0] for each in found.specs} == {"pipe"}
    assert "has too little room" in found.refusals[0]
    with pytest.raises(UsageError, match="so mapped-file cannot be timed: name another folder"):
        links.plan_transfers(timings, TRANSFERS, "mapped-file", (2,), (1,), tmp_path)
    assert links.plan_transfers(timings, TRANSFERS, "storage", (2,), (1,), tmp_path, for_timing=False).refusals == ()


def test_copies_between_numa_nodes_are_of_machines_with_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timings = Timings.open(tmp_path, HERE)
    machine(tmp_path / "one", {0: (0, 1)})
    monkeypatch.setattr(numanodes, "NODES", tmp_path / "one")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert numanodes.pair() is None
    with pytest.raises(UsageError, match="two are needed for copy-near-node, copy-far-node"):
        links.plan_transfers(timings, TRANSFERS, "copy-near-node,copy-far-node", (2,), (1,), tmp_path)
    said = links.plan_transfers(timings, TRANSFERS, "memory", (2,), (1,), tmp_path).refusals
    assert said == ("only one NUMA node here, so not timed: copy-near-node, copy-far-node",)
    machine(tmp_path / "four", {0: (), 1: (0, 1), 2: (2, 3), 3: (4, 5)}, "20 10 30 20")
    monkeypatch.setattr(numanodes, "NODES", tmp_path / "four")
    assert numanodes.pair() == (1, 2)  # a node without cores of this process is none to run on; 2 is furthest from 1
    assert numanodes.cores_of(1) == {0, 1}
    found = links.plan_transfers(timings, TRANSFERS, "copy-near-node,copy-far-node", (2,), (1,), tmp_path)
    assert (found.refusals, {each.op for each in found.specs}) == (
        (), {"transfer::copy-near-node", "transfer::copy-far-node"}
    )  # fmt: skip
    monkeypatch.setattr(numanodes, "NODES", tmp_path / "none")
    assert numanodes.pair() is None


def machine(place: Path, cores: dict[int, tuple[int, ...]], distances: str = "10") -> None:
    """Write what the system says of the NUMA nodes of a machine."""
    place.mkdir()
    for name in ("has_memory", "online"):
        (place / name).write_text(f"0-{len(cores) - 1}\n" if len(cores) > 1 else "0\n")
    for node, those in cores.items():
        (place / f"node{node}").mkdir()
        (place / f"node{node}" / "cpulist").write_text(",".join(map(str, those)) + "\n")
        (place / f"node{node}" / "distance").write_text(distances + "\n")


def test_memory_is_bound_to_a_node_and_a_node_that_is_not_there_is_said_in_words() -> None:
    if not numanodes.nodes():
        pytest.skip("the system tells no NUMA nodes")
    own = numanodes.nodes()[0]
    try:
        held = numanodes.memory(1 << 16, own)
    except OSError as error:
        pytest.skip(f"no memory is bound here: {error.strerror}")
    assert len(held) == 1 << 16
    with pytest.raises(OSError, match="memory cannot be bound to NUMA node 900"):
        numanodes.memory(1 << 16, 900)


def test_the_ratio_of_numa_nodes_is_that_of_their_last_pieces() -> None:
    def timed(name: str, per_byte: float) -> list[Timing]:
        found = []
        for each in transfers.of_transfers([name], (1,)):
            ns = 1e9 * (1e-7 + per_byte * transfers.arguments(each)[1]["bytes"])
            found.append(
                dataclasses.replace(
                    untimed(each, Status.OK), trimmed_ns=ns, low_ns=ns, high_ns=ns, least_ns=ns, taken_ns=1
                )
            )
        return found

    curves = transfers.curves([*timed("copy-near-node", 1e-10), *timed("copy-far-node", 1.7e-10)])
    (found,) = [each for each in transfers.ratios(curves) if each.name == "locality of NUMA nodes"]
    assert found.value == pytest.approx(1.7, rel=1e-3)


def test_the_file_system_of_a_folder_is_that_of_the_longest_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_bytes(
        b"/dev/a / ext4 rw 0 0\nnone %b/in tmpfs rw 0 0\nodd\nb\xfcro /b\xfcro nfs rw 0 0\n" % bytes(tmp_path)
    )
    (tmp_path / "inside").mkdir()
    (tmp_path / "in").mkdir()
    monkeypatch.setattr(links, "MOUNTS", mounts)
    assert [links.filesystem(tmp_path / each) for each in ("in", "inside")] == ["tmpfs", "ext4"]


def test_a_check_repeats_only_what_the_folder_that_is_given_can_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from xsp.bench import repeatability
    from xsp.bench.environment import current_environment

    mounts = tmp_path / "mounts"
    mounts.write_text("disk / ext4 rw 0 0\n")
    monkeypatch.setattr(links, "MOUNTS", mounts)
    timings = Timings.open(tmp_path / "timings", current_environment())
    asked = [each for kind in ("ext4", "nfs") for each in transfers.of_transfers(["copy", "read-cached"], (1,), kind)]
    timings.add(timing(each, 1e5) for each in {each.key: each for each in asked}.values())
    seen: list[tuple[set[str], str | None]] = []

    class Turns(repeatability.Turns):
        def start(self) -> float:
            return 0.0

        def sit(self, specs: Sequence[Spec], *others: object, **named: object) -> list[Timing]:
            kinds = {str(transfers.arguments(each)[1].get("filesystem", each.op)) for each in specs}
            seen.append((kinds, os.environ.get(transfers.DIRECTORY)))
            return []

    monkeypatch.setattr(repeatability, "Turns", Turns)
    monkeypatch.delenv(transfers.DIRECTORY, raising=False)
    typed = ["bench", "transfers", "--check", "--timings", str(tmp_path / "timings"), "--directory", str(tmp_path)]
    assert main(typed) == 0
    assert main([*typed, "--families", "copy"]) == 0
    assert seen == [({"ext4", "transfer::copy"}, str(tmp_path)), ({"transfer::copy"}, str(tmp_path))]
    assert transfers.DIRECTORY not in os.environ


def test_a_folder_whose_room_has_ended_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from xsp.bench import moves

    def full(*_: object, **__: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv(transfers.DIRECTORY, str(tmp_path))
    moves._file.cache_clear()
    monkeypatch.setattr(moves, "ROOM", 1 << 50)
    with pytest.raises(MemoryError, match="too little room"):
        moves.Transfers().prepare(transfers.spec("read-cached", TRANSFERS, 1 << 12, filesystem="ext4"), 0, 1 << 34)
    monkeypatch.setattr(moves, "ROOM", 0)
    monkeypatch.setattr(moves.tempfile, "TemporaryFile", full)
    with pytest.raises(MemoryError, match="no file can be created there"):
        moves.Transfers().prepare(transfers.spec("read-cached", TRANSFERS, 1 << 12, filesystem="ext4"), 0, 1 << 34)
    monkeypatch.setattr(moves, "Partner", full)
    with pytest.raises(MemoryError, match="No space left"):
        moves.Transfers().prepare(transfers.spec("mapped-file", TRANSFERS, 1 << 12, filesystem="ext4"), 0, 1 << 34)


def test_files_of_transfers_are_closed_when_nothing_times_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from xsp.bench import moves

    def count() -> int:
        links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
        return sum(os.readlink(each).startswith(str(tmp_path)) for each in links if os.path.islink(each))

    monkeypatch.setenv(transfers.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(moves.os, "O_DIRECT", 0, raising=False)  # some file systems lack it
    small = {name: dataclasses.replace(each, most=each.most >> 10) for name, each in FAMILIES.items()}
    monkeypatch.setattr(moves, "FAMILIES", small)
    moves._file.cache_clear()
    names = ("read-cached", "read-direct", "read-mapped", "write-buffered", "write-fsync", "write-direct")
    prepared = {name: moves._storage(name, 1 << 12) for name in names}
    assert count() == 5  # a file for reading, one of each size for writing, and two for direct I/O
    moves._file.cache_clear()
    for each in prepared.values():
        each.function(*each.sets[0])
    del prepared, each
    assert count() == 0


def test_where_no_folder_takes_temporary_files_it_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(links.tempfile, "gettempdir", none)
    timings = Timings.open(tmp_path / "timings", HERE)
    with pytest.raises(UsageError, match=r"No usable temporary directory .*: name one, --directory DIR"):
        links.plan_transfers(timings, TRANSFERS, "copy", (2,), (1,))
    assert links.plan_transfers(timings, TRANSFERS, "copy", (2,), (1,), tmp_path).specs
    monkeypatch.setattr(turns.tempfile, "TemporaryFile", none)
    with pytest.raises(BenchError, match="small temporary file"), turns.Turns(1):
        pass


# --- for real ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_each_family_of_a_device_is_timed_on_one() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    from xsp.bench import moves

    for name, family in FAMILIES.items():
        if family.device and name != "peer-copy":
            size = transfers.sizes(family)[-1]
            asked = transfers.of_transfers([name], (1,))[0]
            assert transfers.arguments(asked)[1]["bytes"] in (0, family.least), name
            made = moves.Transfers().prepare(transfers.spec(name, TRANSFERS, size), 0, 1 << 34)
            assert made.timed is not None, name
            assert made.timed(3) > 0, name


def test_what_moves_no_bytes_has_one_spec_and_no_shape() -> None:
    asked = transfers.of_transfers(["kernel-launch", "graph-launch", "synchronize"], (1, 2))
    assert [transfers.arguments(each)[1] for each in asked] == [{"bytes": 0}] * 3
    ns = {"trimmed_ns": 4e3, "low_ns": 4e3, "high_ns": 4e3, "least_ns": 4e3, "taken_ns": 1}
    curves = transfers.curves(dataclasses.replace(untimed(each, Status.OK), **ns) for each in asked)
    assert [each.shape for each in curves] == [None] * 3
    assert [len(each.timings) for each in curves] == [1] * 3


@pytest.mark.slow
def test_transfers_and_collectives_of_two_ranks_are_timed_and_leave_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    timings = Timings.open(tmp_path / "timings", HERE)
    (tmp_path / "storage").mkdir()
    own = [name for name, family in FAMILIES.items() if not (family.device or (family.nodes and not numanodes.pair()))]
    asked = transfers.of_transfers(own, (1,), "any") + transfers.of_collectives(list(OF_RANKS), (2,))
    first = {each.op: each for each in reversed(asked)}
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    made = links.fill(
        links.TransferPlan(tuple(first.values()), directory=tmp_path / "storage"), timings, 240.0, lambda *told: None
    )
    left = {each.op: (each.status, each.reason) for each in timings if not each.is_timed}
    # what a file system or a kernel may refuse
    assert set(left) <= {"transfer::read-direct", "transfer::write-direct", "transfer::first-touch-huge"}, left
    assert made == len(first) - len(left)
    assert list((tmp_path / "storage").iterdir()) == []
    if before:
        assert {each for each in set(os.listdir("/dev/shm")) - before if "xsp" in each} == set()


def test_a_partner_that_stalls_in_the_middle_of_an_exchange_is_given_up_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    from xsp.bench import moves

    ends = partner.Channels.__new__(partner.Channels)
    ends.buffer = memoryview(bytearray(64))
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(0.05)
        with pytest.raises(TimeoutError):
            ends._exchange(here, 64)
        assert here.gettimeout() == 0.05

    class Failing:
        def __init__(self, size: int, folder: object) -> None:
            self.has_failed = False

        def end(self) -> None:
            ended.append(self)

    ended: list[Failing] = []
    monkeypatch.setattr(moves, "Partner", Failing)
    monkeypatch.setattr(moves, "_partners", {})
    first = moves._partner(None)
    assert moves._partner(None) is first
    first.has_failed = True
    assert moves._partner(None) is not first
    assert ended == [first]
