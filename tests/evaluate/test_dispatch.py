"""Work of several agents, some of which die: no result is lost, and none is there twice."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("yaml")

from evaluations import FACTS, PROGRAM, silent

from xsp.cli import main
from xsp.evaluate import dispatch, reading, results
from xsp.evaluate.agents import Facts, Options
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
                raise dispatch.AgentLost(f"the agent {self._facts.name} died")
        self.handed.append(manifest.title)
        return Path(self._facts.name) / manifest.title


def asked(name: str, **of: Any) -> reading.Read:
    return reading.of_plain({"name": name, "model": {"name": "m", "source": "micro:path-3"}, **of})


@pytest.mark.parametrize("seed", range(20))
def test_of_agents_that_die_no_result_is_lost_and_none_is_there_twice(seed: int) -> None:
    draw = random.Random(seed)
    dying = draw.sample(range(4), draw.randint(1, 3))
    there = [Mortal(f"a{number}", draw.randint(0, 3) if number in dying else None) for number in range(4)]
    work, _ = dispatch.pieces([asked(f"m{number}") for number in range(12)], there, each=False)
    dispatch.carry_out(work, there, HERE, silent)
    handed = sorted(title for agent in there for title in agent.handed)
    twice = [piece.asked.manifest.title for piece in work if len(piece.lost) == 2]  # two died over it: that is enough
    assert handed == sorted({f"m{number}" for number in range(12)} - set(twice))
    assert sorted(piece.asked.manifest.title for piece in work if piece.result is not None) == handed
    assert all("died over it" in piece.why for piece in work if piece.result is None)


def test_each_agent_that_satisfies_a_manifest_carries_it_out_and_the_others_have_their_reasons() -> None:
    there = [Mortal("one", labels={"rack": "7"}), Mortal("two", dies_at=0, labels={"rack": "7"}), Mortal("three")]
    work, reasons = dispatch.pieces([asked("m", hardware={"labels": {"rack": "7"}})], there, each=True)
    assert reasons == {"m": {"three": ["label rack=7 is asked for, it has none"]}}
    dispatch.carry_out(work, there, HERE, silent)
    assert [piece.result for piece in work] == [Path("one/m")] * 2  # also in the place of the one that died
    assert [piece.lost for piece in work] == [[], ["two"]]


def test_work_that_nobody_can_do_ends_with_the_reason() -> None:
    there = [Mortal("one", dies_at=0), Mortal("two", dies_at=0)]
    found = [asked("m0"), asked("m1"), asked("m2"), asked("never", hardware={"cores": 999})]
    work, _ = dispatch.pieces(found, there, each=False)
    done: list[tuple[str, int, int]] = []
    dispatch.carry_out(work, there, HERE, lambda *said: done.append(said))
    assert [piece.result for piece in work] == [None] * 4
    assert all("died" in piece.why for piece in work[:3])
    assert work[3].why == "no agent satisfies it"
    work, _ = dispatch.pieces([asked("refused"), asked("m")], [Mortal("one")], each=False)
    dispatch.carry_out(work, [Mortal("one")], HERE, lambda *said: done.append(said))
    assert [piece.why for piece in work] == ["RuntimeError: no such model", ""]
    assert done[-1] == ("manifests", 2, 2)


# --- on Ray -----------------------------------------------------------------------------------------------------------


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
    from xsp.evaluate import onray

    slow = PROGRAM.replace('elif "predict"', 'elif not __import__("time").sleep(0.1) and "predict"')
    (tmp_path / "board.py").write_text(slow, encoding="utf-8")
    for number in range(3):
        model = {"name": "board", "command": [sys.executable, "board.py"]}
        plain = {"name": f"m{number}", "model": model, "dataset": {"samples": 4}, "scenario": {"requests": 10}}
        (tmp_path / f"{number}.yaml").write_text(json.dumps(plain), encoding="utf-8")
    for name in ("one", "two"):
        onray.start(name, {"rack": name}, tmp_path, trusted=True)
    assert main(["evaluate", "agents", "--ray", "auto"]) == 0
    assert "rack=two" in capsys.readouterr().out

    files = [str(tmp_path / f"{number}.yaml") for number in range(3)]
    where = ["--store", str(tmp_path / "local"), "-q"]
    assert main(["evaluate", "run", *files, *where]) == 0
    there, silent_ones = onray.found()
    assert silent_ones == {}
    work, _ = dispatch.pieces([reading.read(Path(each)) for each in files], there, each=False)
    handle = cluster.get_actor("two", namespace=onray.NAMESPACE)

    def kill() -> None:
        while not cluster.get(handle.progress.remote())[0]:
            time.sleep(0.02)
        onray.stop("two")  # in the middle of its work

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    dispatch.carry_out(work, there, Options(tmp_path / "ray", trusted=True), silent)
    killer.join(60)
    assert [piece.why for piece in work] == [""] * 3

    local, _ = results.every(tmp_path / "local")
    remote, _ = results.every(tmp_path / "ray")
    assert {each.content["transport"] for each in remote} == {"ray"}
    digests = [
        sorted((each.identity, each.content["outputs"]["digest"]) for each in those) for those in (local, remote)
    ]
    assert digests[0] == digests[1]  # so also: each once
    assert [each.facts().name for each in onray.found()[0]] == ["one"]
    with pytest.raises(onray.ManifestError, match="already"):
        onray.start("one", {}, tmp_path)
