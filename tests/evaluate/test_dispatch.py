"""Work of several agents, some of which die: no result is lost, and none is there twice."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from depth import deep

pytest.importorskip("pydantic")
pytest.importorskip("yaml")

from evaluations import FACTS, PROGRAM, show_nothing

from xsp import processes
from xsp.cli import main
from xsp.evaluate import dispatch, reading, results, transports
from xsp.evaluate.agents import AgentLost, Facts, Options, ProcessLost
from xsp.evaluate.manifest import Manifest

HERE = Options(trusted=True)


class Mortal:
    """An agent that dies as it carries out its n-th manifest, before or after its work, and hands over nothing then."""

    def __init__(self, name: str, dies_at: int | None = None, labels: dict[str, str] | None = None) -> None:
        self._facts = replace(FACTS, name=name, labels=labels or {})
        self._left = dies_at
        self.handed: list[str] = []

    def facts(self) -> Facts:
        return self._facts

    def submit(self, manifest: Manifest, folder: Path, options: Options, progress: Any) -> Path:
        del folder, options, progress
        if manifest.title == "refused":
            raise RuntimeError("no such model")
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise AgentLost(f"the agent {self._facts.name} died")
        self.handed.append(manifest.title)
        return Path(self._facts.name) / manifest.title


def asked(name: str, **of: Any) -> reading.LoadedManifest:
    return reading.of_plain({"name": name, "model": {"name": "m", "source": "micro:path-3"}, **of})


@pytest.mark.parametrize("seed", range(20))
def test_of_agents_that_die_no_result_is_lost_and_none_is_there_twice(seed: int) -> None:
    draw = random.Random(seed)
    dying = draw.sample(range(4), draw.randint(1, 3))
    there = [Mortal(f"a{number}", draw.randint(0, 3) if number in dying else None) for number in range(4)]
    work, _ = dispatch.pieces([asked(f"m{number}") for number in range(12)], there, on_each_agent=False)
    dispatch.run_pieces(work, there, HERE, show_nothing)
    handed = sorted(title for agent in there for title in agent.handed)
    # two died over it: that is enough
    twice = [piece.request.manifest.title for piece in work if len(piece.lost_agents) == 2]
    assert handed == sorted({f"m{number}" for number in range(12)} - set(twice))
    assert sorted(piece.request.manifest.title for piece in work if piece.result is not None) == handed
    assert all("died while running it" in piece.failure for piece in work if piece.result is None)


def test_each_agent_that_satisfies_a_manifest_carries_it_out_and_the_others_have_their_reasons() -> None:
    there = [Mortal("one", labels={"rack": "7"}), Mortal("two", dies_at=0, labels={"rack": "7"}), Mortal("three")]
    work, reasons = dispatch.pieces([asked("m", hardware={"labels": {"rack": "7"}})], there, on_each_agent=True)
    assert reasons == {"m": {"three": ["label rack=7 is required, it has none"]}}
    dispatch.run_pieces(work, there, HERE, show_nothing)
    assert [piece.result for piece in work] == [Path("one/m")] * 2  # also in the place of the one that died
    assert [piece.lost_agents for piece in work] == [[], ["two"]]


def test_work_that_nobody_can_do_ends_with_the_reason() -> None:
    there = [Mortal("one", dies_at=0), Mortal("two", dies_at=0)]
    found = [asked("m0"), asked("m1"), asked("m2"), asked("never", hardware={"cores": 999})]
    work, _ = dispatch.pieces(found, there, on_each_agent=False)
    done: list[tuple[str, int, int]] = []
    dispatch.run_pieces(work, there, HERE, lambda *said: done.append(said))
    assert [piece.result for piece in work] == [None] * 4
    assert all("died" in piece.failure for piece in work[:3])
    assert work[3].failure == "no agent satisfies the manifest"
    work, _ = dispatch.pieces([asked("refused"), asked("m")], [Mortal("one")], on_each_agent=False)
    dispatch.run_pieces(work, [Mortal("one")], HERE, lambda *said: done.append(said))
    assert [piece.failure for piece in work] == ["RuntimeError: no such model", ""]
    assert done[-1] == ("manifests", 2, 2)


class Fragile(Mortal):
    """An agent whose process is killed over the manifests that it is told, each time or the first time."""

    def __init__(self, name: str, fatal: set[str], each_time: bool = False) -> None:
        super().__init__(name)
        self._fatal, self._each_time = fatal, each_time

    def submit(self, manifest: Manifest, folder: Path, options: Options, progress: Any) -> Path:
        if manifest.title in self._fatal:
            self._fatal -= set() if self._each_time else {manifest.title}
            raise ProcessLost(f"the process that evaluated {manifest.title} was killed (SIGKILL)")
        return super().submit(manifest, folder, options, progress)


def test_an_agent_goes_on_after_its_process_was_killed() -> None:
    one = Fragile("one", {"m1"})
    work, _ = dispatch.pieces([asked("m0"), asked("m1"), asked("m2")], [one], on_each_agent=False)
    dispatch.run_pieces(work, [one], HERE, show_nothing)
    assert one.handed == ["m0", "m1", "m2"]
    assert [piece.lost_agents for piece in work] == [[], ["one"], []]


def test_a_manifest_that_kills_every_process_is_given_up_and_costs_no_agent() -> None:
    there = [Fragile("one", {"bad"}, each_time=True), Fragile("two", {"bad"}, each_time=True)]
    work, _ = dispatch.pieces([asked("bad"), *(asked(f"m{number}") for number in range(4))], there, on_each_agent=False)
    ended: list[dispatch.Piece] = []
    dispatch.run_pieces(work, there, HERE, show_nothing, ended.append)
    assert "killed (SIGKILL); tried twice" in work[0].failure
    assert all(piece.result is not None for piece in work[1:])
    assert sorted(map(id, ended)) == sorted(map(id, work))  # those without a result are reported too


def test_work_in_hand_does_not_go_back_to_an_agent_that_died_meanwhile() -> None:
    gone = threading.Event()

    class Last(Mortal):
        def submit(self, manifest: Manifest, folder: Path, options: Options, progress: Any) -> Path:
            assert gone.wait(10)
            return super().submit(manifest, folder, options, progress)

    def progress(what: str, done: int, of: int) -> None:
        del what, of
        if done:
            gone.set()

    there = [Mortal("first", dies_at=0), Last("last", dies_at=0)]
    work, _ = dispatch.pieces([asked("m0"), asked("m1")], there, on_each_agent=False)
    # ends when that one dies, while the other has m1 in hand
    work[0].candidates, work[0].assigned_agent = ["first"], "first"
    dispatch.run_pieces(work, there, HERE, progress)
    assert [piece.result for piece in work] == [None, None]
    assert all("no remaining agent" in piece.failure for piece in work)


class Killed(processes.WorkerProcess):
    """A process that is killed: after a while, or when its result is complete and nobody has heard of it yet."""

    started: list[Killed]
    after_s: float | None

    def __init__(self, code: str, *arguments: str, **options: Any) -> None:
        super().__init__(code, *arguments, **options)
        self.started.append(self)
        if len(self.started) == 1 and self.after_s is not None:
            threading.Timer(self.after_s, self._process.kill).start()

    def answer(self, until: float) -> bytes:
        line = super().answer(until)
        if self is self.started[0] and self.after_s is None and b'"result"' in line:
            self._process.kill()
            return b""
        return line


@pytest.mark.parametrize("seed", [deep(None, id="at its end"), *map(deep, range(20))])
def test_a_manifest_whose_process_is_killed_at_any_moment_has_one_result(
    seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "board.py").write_text(PROGRAM, encoding="utf-8")
    wanted = reading.of_plain({
        "name": "m", "model": {"name": "board", "command": [sys.executable, "board.py"]},
        "dataset": {"samples": 2}, "scenario": {"requests": 3},
    })  # fmt: skip
    monkeypatch.setattr(Killed, "started", [], raising=False)
    monkeypatch.setattr(Killed, "after_s", None if seed is None else random.Random(seed).random() * 3, raising=False)
    monkeypatch.setattr(processes, "WorkerProcess", Killed)
    agent, store = transports.SubprocessAgent(), tmp_path / "store"
    work = [dispatch.Piece(replace(wanted, folder=tmp_path), [agent.facts().name])]
    dispatch.run_pieces(work, [agent], Options(store, trusted=True), show_nothing)
    found, damaged = results.read_all(store)
    assert [each.path for each in found] == [work[0].result], work[0].failure
    assert len(Killed.started) == 1 + len(work[0].lost_agents)
    assert seed is not None or work[0].lost_agents
    assert damaged == []
    assert list(store.glob(".*.part")) == []


# --- on Ray -----------------------------------------------------------------------------------------------------------


class Held(Mortal):
    """An agent that goes on with its work when it is let go."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begun, self.go = threading.Event(), threading.Event()
        self.course: list[str] = []

    def submit(self, manifest: Manifest, folder: Path, options: Options, progress: Any) -> Path:
        self.course.append(f"{manifest.title} begins")
        progress(manifest.title, 1, 2)
        self.begun.set()
        assert self.go.wait(30)
        self.course.append(f"{manifest.title} ends")
        return options.store


def test_an_actor_carries_out_one_evaluation_at_a_time_and_tells_each_its_own_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xsp.evaluate import rayagents

    agent = Held("one")
    monkeypatch.setattr(transports, "SubprocessAgent", lambda *_: agent)
    actor = rayagents.Actor("one", {}, str(tmp_path), True)
    with ThreadPoolExecutor(3) as pool:

        def evaluate(name: str) -> Future[dict[str, Any]]:
            return pool.submit(actor.evaluate, asked(name).manifest.plain(), "", False, name)

        first = evaluate("m0")
        assert agent.begun.wait(30)
        others = [evaluate("m1"), evaluate("m2")]
        time.sleep(0.2)  # in which they would begin
        assert [actor.progress(name) for name in ("m0", "m1", "m2")] == [("m0", 1, 2), None, None]
        assert actor.running_names() == ["m0"]
        actor.cancel("m2")
        agent.go.set()
        assert first.result(30) == {"files": {}}
        assert [each.result(30) for each in others] == [{"files": {}}, {"error": "it was cancelled"}]
    assert agent.course == ["m0 begins", "m0 ends", "m1 begins", "m1 ends"]
    assert actor.running_names() == []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'xsp[ray]'")
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False, logging_level="ERROR",
        namespace="xsp-evaluate",
    )  # fmt: skip
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_agents_of_a_cluster_give_the_same_bits_and_one_that_is_killed_loses_nothing(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from xsp.evaluate import rayagents

    slow = PROGRAM.replace('elif "predict"', 'elif not __import__("time").sleep(0.1) and "predict"')
    (tmp_path / "board.py").write_text(slow, encoding="utf-8")
    for number in range(3):
        model = {"name": "board", "command": [sys.executable, "board.py"]}
        plain = {"name": f"m{number}", "model": model, "dataset": {"samples": 4}, "scenario": {"requests": 10}}
        (tmp_path / f"{number}.yaml").write_text(json.dumps(plain), encoding="utf-8")
    plain = {"model": {"name": "tiny", "source": "micro:depth-1"}, "scenario": {"requests": 10}}
    (tmp_path / "3.yaml").write_text(json.dumps(plain), encoding="utf-8")
    for name in ("one", "two"):
        rayagents.start(name, {"rack": name}, tmp_path, trusted=True)
    assert main(["evaluate", "agents", "--ray", "auto"]) == 0
    assert "rack=two" in capsys.readouterr().out

    files = [str(tmp_path / f"{number}.yaml") for number in range(4)]
    where = ["--store", str(tmp_path / "local"), "-q"]
    assert main(["evaluate", "run", *files, *where]) == 0
    there, silent_ones = rayagents.connected_agents()
    assert silent_ones == {}
    work, _ = dispatch.pieces([reading.read(Path(each)) for each in files], there, on_each_agent=False)
    handle = cluster.get_actor("two", namespace=rayagents.NAMESPACE)

    def kill() -> None:
        while not cluster.get(handle.running_names.remote()):
            time.sleep(0.02)
        rayagents.stop("two")  # in the middle of its work

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    dispatch.run_pieces(work, there, Options(tmp_path / "ray", trusted=True), show_nothing)
    killer.join(60)
    assert [piece.failure for piece in work] == [""] * 4

    local, _ = results.read_all(tmp_path / "local")
    remote, _ = results.read_all(tmp_path / "ray")
    assert {each.content["transport"] for each in remote} == {"ray"}
    digests = [
        sorted((each.identity, each.content["outputs"]["digest"]) for each in those) for those in (local, remote)
    ]
    assert digests[0] == digests[1]  # so also: each once
    assert [each.facts().name for each in rayagents.connected_agents()[0]] == ["one"]
    with pytest.raises(rayagents.ManifestError, match="already"):
        rayagents.start("one", {}, tmp_path)

    (board, *_) = (each for each in local if each.content["name"] == "m0")
    again = ["evaluate", "reproduce", board.name, "--store", str(tmp_path / "local"), "-q", "--ray", "auto"]
    assert main(again) == 0  # its times are a simulator's, the same each time
    assert "by one: same" in capsys.readouterr().out
    assert main([*again, "--agents", "two"]) == 2
    assert "there is no agent 'two'; there are one" in capsys.readouterr().err

    agent = rayagents.connected_agents()[0][0]
    asked = reading.read(Path(files[0]))

    def cancel(what: str, done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        agent.submit(asked.manifest, tmp_path, Options(tmp_path / "cancelled", trusted=True), cancel)
    assert not (tmp_path / "cancelled").exists()
    begin = time.monotonic()  # the agent is free again at once, and carries the next one out
    agent.submit(asked.manifest, tmp_path, Options(tmp_path / "after", trusted=True), show_nothing)
    assert len(results.read_all(tmp_path / "after")[0]) == 1
    assert time.monotonic() - begin < 120


@pytest.mark.slow
def test_clients_that_submit_to_one_agent_at_once_wait_for_each_other(cluster: Any, tmp_path: Path) -> None:
    from xsp.evaluate import rayagents

    slow = PROGRAM.replace('elif "predict"', 'elif not __import__("time").sleep(0.1) and "predict"')
    (tmp_path / "board.py").write_text(slow, encoding="utf-8")
    rayagents.start("shared", {}, tmp_path, trusted=True)
    try:
        stages: dict[str, list[str]] = {f"m{number}": [] for number in range(6)}  # more than an actor's other threads

        def submit(name: str) -> Path:
            model = {"name": "board", "command": [sys.executable, "board.py"]}
            plain = {"name": name, "model": model, "dataset": {"samples": 2}, "scenario": {"requests": 5}}
            (agent,) = rayagents.connected_agents(["shared"])[0]
            options = Options(tmp_path / "store", trusted=True)
            return agent.submit(
                reading.of_plain(plain).manifest, tmp_path, options, lambda stage, *_: stages[name].append(stage)
            )

        with ThreadPoolExecutor(len(stages)) as pool:
            list(pool.map(submit, stages))
        assert sum(rayagents.WAITING[0] in told for told in stages.values()) >= 5
        assert len(results.read_all(tmp_path / "store")[0]) == 6
    finally:
        rayagents.stop("shared")
