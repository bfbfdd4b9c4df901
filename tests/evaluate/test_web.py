"""Evaluations over REST: what is answered, what is refused, and what never happens."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("yaml")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from evaluations import FACTS, PROGRAM, show_nothing
from fastapi.testclient import TestClient

from xsp import terminal
from xsp.cli import evaluate
from xsp.errors import ManifestError
from xsp.evaluate import agents, reading, results, running, standings, tables, transports
from xsp.evaluate.agents import Options
from xsp.evaluate.web import app, guard, policy
from xsp.evaluate.web.modelsize import ModelSizes
from xsp.evaluate.web.queue import Queue

HERE = "http://127.0.0.1:8610"
WAIT_S = 60.0
TINY = {"model": {"name": "tiny", "source": "micro:depth-1", "task": "nothing"}, "scenario": {"requests": 5}}


class Fabricated:
    """An agent that waits for a word, and then says what it is told to."""

    def __init__(self, store: Path, say: Callable[[], Path]) -> None:
        self.store, self.say = store, say
        self.go, self.began = threading.Event(), threading.Event()
        self.options: list[Options] = []

    def facts(self) -> agents.Facts:
        return FACTS

    def submit(self, manifest: Any, folder: Path, options: Options, progress: Any) -> Path:
        self.options.append(options)
        self.began.set()
        progress("halfway", 1, 2)
        while not self.go.wait(0.01):
            progress("halfway", 1, 2)
        return self.say()

    def check(self, manifest: Any, folder: Path, options: Options, progress: Any) -> list[str]:
        assert not options.trusted
        return running.check(manifest, folder, options, FACTS, progress)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with two results of one manifest, and one of two batch sizes."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "board.py").write_text(PROGRAM, encoding="utf-8")
    options = Options(store=folder / "store", trusted=True)
    model = {"name": "board", "task": "sums", "command": [sys.executable, "board.py"]}
    for scenario in ({"requests": 20}, {"requests": 20}, {"kind": "batched", "batches": [1, 2], "requests": 10}):
        asked = reading.of_plain({"model": model, "dataset": {"samples": 4}, "scenario": scenario}).manifest
        running.evaluate(asked, folder, options, FACTS, show_nothing)
    return folder / "store"


@pytest.fixture
def agent(made: Path) -> Fabricated:
    return Fabricated(made, lambda: next(made.glob("*-0001")))


@pytest.fixture
def client(made: Path, agent: Fabricated) -> Iterator[TestClient]:
    queue = Queue(most_waiting=2)
    with TestClient(guard.Guard(app.application(made, [agent], queue)), base_url=HERE) as found:
        yield found
        agent.go.set()


def ended(client: TestClient, job: str) -> dict[str, Any]:
    """Return the last word on a job; the stream ends with it."""
    with client.stream("GET", f"/api/jobs/{job}/events", timeout=WAIT_S) as stream:
        said = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    last: dict[str, Any] = said[-1]
    return last


# --- results ----------------------------------------------------------------------------------------------------------


def test_results_are_listed_newest_first_and_in_pages(client: TestClient) -> None:
    whole = client.get("/api/evaluations").json()
    assert whole["total"] == 3
    assert whole["tasks"] == ["sums"]
    one = client.get("/api/evaluations", params={"offset": 1, "limit": 1}).json()
    assert one["evaluations"] == whole["evaluations"][1:2]
    assert client.get("/api/evaluations", params={"text": "BATCHED"}).json()["total"] == 1
    assert client.get("/api/evaluations", params={"task": "other"}).json()["total"] == 0
    assert client.get("/api/evaluations", params={"limit": 10**9}).status_code == 422


def test_a_thousand_results_are_listed_and_each_is_read_once(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (next(made.glob("*-0001")) / results.RESULT).read_bytes()
    for number in range(1000):
        place = tmp_path / f"0123456789ab-{number:04d}"
        place.mkdir()
        (place / results.RESULT).write_bytes(text)
    read, opened = results.read, []
    monkeypatch.setattr(results, "read", lambda path, root: opened.append(path.name) or read(path, root))
    with TestClient(app.application(tmp_path, []), base_url=HERE) as client:
        for _ in range(2):
            found = client.get("/api/evaluations", params={"limit": 1000}).json()
            assert (found["total"], len(found["evaluations"])) == (1000, 1000)
    assert len(opened) == 1000


def test_a_damaged_result_is_named_and_hides_no_other(made: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(made, store)
    damaged = store / "aaaaaaaaaaaa-0001"
    damaged.mkdir()
    (damaged / results.RESULT).write_text("{", encoding="utf-8")
    with TestClient(app.application(store, []), base_url=HERE) as client:
        found = client.get("/api/evaluations").json()
        assert (found["total"], found["damaged"]) == (3, ["aaaaaaaaaaaa-0001"])
        assert client.get("/api/evaluations/aaaaaaaaaaaa-0001").status_code == 404


def test_one_result_has_its_figures_its_manifest_and_its_requests(client: TestClient) -> None:
    name = client.get("/api/evaluations", params={"text": "batched"}).json()["evaluations"][0]["result"]
    one = client.get(f"/api/evaluations/{name}").json()
    assert [part["batch"] for part in one["parts"]] == [1, 2]
    assert (one["trace"], one["bound"]) == (False, False)
    requests = client.get(f"/api/evaluations/{name}/requests", params={"batch": 2, "limit": 4}).json()
    assert (requests["total"], requests["latency_ms"]) == (10, [2.0] * 4)
    assert requests["percentiles"]["ms"] == [2.0] * len(requests["percentiles"]["at"])
    assert "command" in client.get(f"/api/evaluations/{name}/manifest").text
    assert client.get(f"/api/evaluations/{name}/requests", params={"batch": 3}).status_code == 404
    assert client.get(f"/api/evaluations/{name}/bound").status_code == 404
    assert client.get(f"/evaluations/{name}/report").status_code == 404


def test_any_few_are_compared_with_the_first(client: TestClient) -> None:
    names = [each["result"] for each in client.get("/api/evaluations").json()["evaluations"]]
    found = client.get("/api/compare", params={"name": names}).json()
    assert [(each["before"], each["after"]) for each in found] == [(names[0], each) for each in names[1:]]
    assert all(each["equal_outputs"] for each in found)
    assert client.get("/api/compare", params={"name": names[:1]}).status_code == 422
    assert client.get("/api/compare", params={"name": [names[0], "nothing"]}).status_code == 404


def test_the_leaderboard_has_a_row_for_each_batch_size(client: TestClient) -> None:
    found = client.get("/api/leaderboard", params={"task": "sums"}).json()
    assert sorted((row["batch"], row["results"]) for row in found["rows"]) == [(1, 1), (1, 2), (2, 1)]
    assert client.get("/api/leaderboard", params={"by": "started"}).status_code == 422


@pytest.mark.parametrize("by", tables.ORDER_HEADINGS)
def test_what_orders_the_leaderboard_is_in_it_with_its_unit(by: str, made: Path, tmp_path: Path) -> None:
    """A result that searched for a rate, and has an accuracy, has all figures."""
    kept = tmp_path / "store" / "0123456789ab-0001"
    shutil.copytree(next(made.glob("*-0001")), kept)
    content = json.loads((kept / results.RESULT).read_text(encoding="utf-8"))
    search = {"rate_low": 120.0, "rate_high": 140.0, "rate_estimate": None, "probes": []}
    content["parts"] = [{**content["parts"][0], **search, "p90_ms": 1.75}]
    content["accuracy"] = {"top1": 0.5, "top5": 0.75, "samples": 8, "classes": 9}
    content["accuracy"] |= {"top1_interval": [0.25, 0.75], "top5_interval": [0.5, 0.875]}
    (kept / results.RESULT).write_text(json.dumps(content), encoding="utf-8")
    with TestClient(app.application(tmp_path / "store", []), base_url=HERE) as client:
        found = client.get("/api/leaderboard", params={"by": by}).json()
    (row,) = found["rows"]
    expected = {"p90_ms": ("p90 ms", "1.75"), "rate": ("requests/s", "120 to 140"), "top1": ("top-1 %", "50.0")}
    assert (found["column"], row["ordered"]) == expected.get(
        by, (tables.ORDER_HEADINGS[by], tables.figure(row.get(by)))
    )
    rows = standings.leaderboard(results.read_all(tmp_path / "store")[0], by=by)
    head, line = tables.standing(rows, 10, by).splitlines()
    assert tables.ORDER_HEADINGS[by] in head
    assert row["ordered"] in line
    assert max(len(head), len(line)) <= terminal.WIDTH


def test_every_order_of_the_leaderboard_is_one_of_the_command_and_of_the_page() -> None:
    page = (Path(app.__file__).parent / "assets" / "results.js").read_text(encoding="utf-8")
    assert set(evaluate.ORDER_KEYS) == set(tables.ORDER_HEADINGS)
    assert all(f'["{by}", ' in page for by in tables.ORDER_HEADINGS)
    assert "leaderboard.column" in page
    assert "row.ordered" in page


def test_the_interface_describes_itself(client: TestClient) -> None:
    described = client.get("/api/openapi.json").json()["paths"]
    assert {"/api/evaluations", "/api/compare", "/api/leaderboard", "/api/jobs", "/api/jobs/{job}/events"} <= {
        *described
    }
    assert "scenario" in client.get("/api/schema").json()["properties"]
    assert client.get("/api/agents").json()[0]["name"] == FACTS.name


@pytest.mark.parametrize("path", ["/", "/new", "/jobs", "/jobs/1", "/evaluations/x", "/compare?name=a&name=b"])
def test_a_page_loads_nothing_from_elsewhere(path: str, client: TestClient) -> None:
    page = client.get(path)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http" not in page.text.replace("http-equiv", "")
    for part in page.text.split('src="')[1:]:
        assert client.get(part.partition('"')[0]).status_code == 200


# --- new ones ---------------------------------------------------------------------------------------------------------


def test_an_evaluation_is_carried_out_and_its_progress_is_told(client: TestClient, agent: Fabricated) -> None:
    job = client.post("/api/jobs", json={"manifest": TINY, "trace": "M/L", "bound": True})
    assert job.status_code == 202
    assert agent.began.wait(WAIT_S)
    assert client.get(job.headers["location"]).json()["state"] == "running"
    agent.go.set()
    last = ended(client, job.json()["id"])
    assert (last["state"], last["of"]) == ("done", 2)
    assert client.get(f"/api/evaluations/{last['result']}").status_code == 200
    asked = agent.options[0]
    assert (asked.levels, asked.needs_bound, asked.trusted) == ("M/L", True, False)


def test_an_agent_that_is_asked_for_is_named_where_it_cannot(client: TestClient) -> None:
    unknown = client.post("/api/jobs", json={"manifest": TINY, "agent": "nobody"})
    assert unknown.status_code == 422
    assert "there is no agent 'nobody'; there are" in unknown.json()["error"]
    [known] = [each["name"] for each in client.get("/api/agents").json()]
    elsewhere = {**TINY, "hardware": {"labels": {"rack": "b"}}}
    refused = client.post("/api/jobs", json={"manifest": elsewhere, "agent": known})
    assert refused.status_code == 422
    assert f"agent {known} does not satisfy the manifest ({known}: " in refused.json()["error"]


def test_one_runs_at_a_time_and_so_many_wait(client: TestClient, agent: Fabricated) -> None:
    jobs = [client.post("/api/jobs", json={"manifest": TINY}).json()["id"]]
    assert agent.began.wait(WAIT_S)
    jobs += [client.post("/api/jobs", json={"manifest": TINY}).json()["id"] for _ in range(2)]
    assert client.post("/api/jobs", json={"manifest": TINY}).status_code == 429
    assert [each["state"] for each in client.get("/api/jobs").json()] == ["waiting", "waiting", "running"]
    assert client.delete(f"/api/jobs/{jobs[1]}").json()["state"] == "cancelled"
    client.delete(f"/api/jobs/{jobs[0]}")
    assert ended(client, jobs[0])["state"] == "cancelled"
    agent.go.set()
    assert ended(client, jobs[2])["state"] == "done"


def test_an_agent_that_fails_says_why_and_the_next_one_runs(client: TestClient, agent: Fabricated) -> None:
    def fails() -> Path:
        raise ManifestError("no board")

    said, agent.say = agent.say, fails
    agent.go.set()
    last = ended(client, client.post("/api/jobs", json={"manifest": TINY}).json()["id"])
    assert (last["state"], last["error"], last["result"]) == ("failed", "no board", None)
    agent.say = said
    assert ended(client, client.post("/api/jobs", json={"manifest": TINY}).json()["id"])["state"] == "done"


def test_the_state_of_a_job_is_told_without_asking_its_agent(made: Path) -> None:
    asked: list[int] = []

    class Far(Fabricated):
        def facts(self) -> agents.Facts:
            asked.append(1)
            return FACTS

    agent = Far(made, lambda: next(made.glob("*-0001")))
    agent.go.set()
    job = Queue().add(reading.of_plain(TINY).manifest, agent, Options(store=made))
    times = len(asked)
    assert {job.plain()["agent"] for _ in range(3)} == {FACTS.name}
    assert len(asked) == times


def test_an_evaluation_that_takes_too_long_is_ended(made: Path) -> None:
    agent = Fabricated(made, lambda: made)
    with TestClient(app.application(made, [agent], Queue(seconds=0.0)), base_url=HERE) as client:
        last = ended(client, client.post("/api/jobs", json={"manifest": TINY}).json()["id"])
    assert last["state"] == "failed"
    assert "longer" in last["error"]


def test_a_manifest_is_checked_as_yaml_and_as_data(client: TestClient) -> None:
    text = "model: {name: tiny, source: micro:depth-1, task: nothing}\nscenario: {requests: 5}\n"
    one, other = (client.post("/api/check", json=each).json() for each in ({"yaml": text}, {"manifest": TINY}))
    assert one == other
    assert one["agents"] == [FACTS.name]
    missing = client.post("/api/check", json={"manifest": {**TINY, "hardware": {"gpu": "H9000"}}}).json()
    assert "H9000" in missing["reasons"][FACTS.name][0]
    assert "manifest:1: scenario.requests" in client.post(
        "/api/check", json={"yaml": "{model: {name: x}, scenario: {requests: none}}"}
    ).json()["error"]  # fmt: skip


def test_a_check_refuses_what_an_evaluation_would_refuse_unless_one_runs(client: TestClient, agent: Fabricated) -> None:
    steps = {**TINY, "model": {**TINY["model"], "inputs": [{"steps": ["decode"]}]}}

    def check(**asked: Any) -> dict[str, Any]:
        answer: dict[str, Any] = client.post("/api/check", json=asked).json()
        return answer

    found = check(manifest=TINY)
    assert (found["opened"], found["refused"], found["notes"]) == (True, [], [])
    (reason,) = check(manifest=steps)["refused"]
    assert "steps need samples from files" in reason
    assert (check(manifest=steps, opens=False)["refused"], check(manifest=steps, opens=False)["opened"]) == ([], False)
    job = client.post("/api/jobs", json={"manifest": TINY}).json()["id"]
    assert agent.began.wait(WAIT_S)
    busy = check(manifest=steps)
    assert (busy["opened"], busy["refused"]) == (False, [])
    assert "was not opened" in busy["notes"][0]
    agent.go.set()
    ended(client, job)


# --- what never happens -----------------------------------------------------------------------------------------------

HOSTILE = {
    "a program": {"model": {"name": "x", "command": ["touch", "/tmp/x"]}},
    "a file of Python": {"model": {"name": "x", "source": "evil.py:build"}},
    "an exported program": {"model": {"name": "x", "source": "model.pt2"}},
    "a file of ONNX": {"model": {"name": "x", "source": "/etc/model.onnx"}},
    "a configuration": {"model": {"name": "x", "source": "transformers:../../config.json"}},
    "a repository": {"model": {"name": "x", "source": "timm:hf_hub:someone/something"}},
    "no source": {"model": {"name": "x"}},
    "a configuration with an option": {"model": {"name": "x", "source": "transformers:broken.json?x=1"}},
    "a configuration beside others": {"model": {"name": "x", "source": "transformers:broken.json"}},
    "a configuration in capitals": {"model": {"name": "x", "source": "transformers:broken.JSON?x=1&y=2"}},
    "an encoded configuration": {"model": {"name": "x", "source": "transformers:broken%2ejson"}},
    "an encoded question mark": {"model": {"name": "x", "source": "transformers:broken.json%3Fx=1"}},
    "a folder of configurations": {"model": {"name": "x", "source": "transformers:./bert"}},
    "an absolute configuration": {"model": {"name": "x", "source": "transformers:/etc/config.json?x=1"}},
    "two question marks": {"model": {"name": "x", "source": "transformers:bert?x=1?y=../z"}},
    "a path as an option": {"model": {"name": "x", "source": "transformers:bert?name_or_path=x"}},
    "an option of its own": {"model": {"name": "x", "source": "transformers:bert?_attn_implementation=a"}},
    "weights as an option": {"model": {"name": "x", "source": "transformers:detr?use_pretrained_backbone=1"}},
    "a source in capitals": {"model": {"name": "x", "source": "Transformers:bert"}},
    "a name with a line break": {"model": {"name": "x", "source": "torchvision:resnet\n18"}},
    "a name of other letters": {"model": {"name": "x", "source": "torchvision:ｒesnet18"}},
    "a program of a library": {"model": {"name": "x", "source": "transformers:x.pt2"}},
    "files": {"model": {**TINY["model"], "files": [{"path": "result.json", "checksum": "sha256:00"}]}},
    "code": {"model": {**TINY["model"], "preprocess": {"function": "evil.py:f"}}},
    "a variable": {**TINY, "software": {"environment": {"LD_PRELOAD": "/tmp/evil.so"}}},
    "a folder": {**TINY, "dataset": {"source": "folder:/etc"}},
    "a folder above": {**TINY, "dataset": {"source": "folder:../.."}},
    "much data": {**TINY, "dataset": {"height": 1_000_000, "width": 1_000_000}},
    "many requests": {**TINY, "scenario": {"requests": 1_000_000}},
    "a large batch": {**TINY, "scenario": {"kind": "batched", "batches": [1, 1_000_000]}},
    "a large shape": {"model": {**TINY["model"], "inputs": [{"shape": [3, 100_000, 100_000]}]}},
    "large images at once": {
        "model": {**TINY["model"], "inputs": [{"steps": ["decode", {"resize": 4096}]}]},
        "scenario": {"kind": "batched", "batch": 1024},
    },
    "large images of many streams": {
        **TINY,
        "dataset": {"height": 4096, "width": 4096, "samples": 1},
        "scenario": {"kind": "multi-stream", "streams": 1024},
    },
    "a shape of many digits": {"model": {**TINY["model"], "inputs": [{"shape": [10**300] * 20}]}},
    "a side of many digits": {"model": {**TINY["model"], "inputs": [{"steps": [{"resize": [10**299, 10**299, 0]}]}]}},
    "a large image": {"model": {**TINY["model"], "inputs": [{"steps": [{"resize": {"size": [10**6, 10**6]}}]}]}},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_manifest_of_somebody_else_never_gets_to_an_agent_with(
    what: str, client: TestClient, agent: Fabricated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ModelSizes, "_ask")  # nothing is built, and no process started, to refuse it
    answer = client.post("/api/jobs", json={"manifest": HOSTILE[what]})
    assert answer.status_code == 422, answer.text
    assert agent.options == []
    assert client.get("/api/jobs").json() == []


def test_the_built_in_manifests_are_taken() -> None:
    from xsp.evaluate import builtin

    assert [each.title for each in builtin.manifests() if policy.objections(each)] == []


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"' + b"x" * 1000, b"[" * 100_000,
     b'{"manifest":' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
     b'{"yaml":"!!python/object/apply:os.system [true]"}', b'{"yaml":"model: models/x.yaml"}',
     b'{"yaml":"","manifest":{}}',
     b'{"yaml":"a: &a [*a]"}', b'{"manifest":{"model":{"name":1e999}}}', b"\xff\xfe{}", b'{"yaml":"\\ud800"}',
     b'{"manifest":{"model":{"name":"\\ud800"}}}'],
    ids=range(15),
)  # fmt: skip
def test_a_hostile_body_is_refused_and_the_next_one_is_answered(body: bytes, client: TestClient) -> None:
    for path in ("/api/check", "/api/jobs"):
        answer = client.post(path, content=body, headers={"content-type": "application/json"})
        assert 400 <= answer.status_code < 500, (path, answer.status_code)
    assert client.post("/api/check", json={"manifest": TINY}).status_code == 200


def test_a_body_is_bounded_whether_it_says_its_length_or_not(client: TestClient) -> None:
    many = (b"x" * 65536 for _ in range(100))
    kind = {"content-type": "application/json"}
    assert client.post("/api/check", content=b"x" * (guard.MOST_BODY + 1), headers=kind).status_code == 413
    assert client.post("/api/check", content=many, headers=kind).status_code == 413
    form = {"content-type": "text/plain"}
    assert client.post("/api/check", content=b'{"manifest":{}}', headers=form).status_code == 415


@pytest.mark.parametrize(
    "headers",
    [{"host": "evil.example"}, {"host": "127.0.0.1.evil.example:8610"},
     {"origin": "http://evil.example"}, {"origin": "null"},
     {"origin": "http://127.0.0.1:9999"}],
    ids=lambda each: "-".join(each.values()),
)  # fmt: skip
def test_another_host_and_another_origin_are_refused(headers: dict[str, str], client: TestClient) -> None:
    assert client.get("/api/evaluations", headers=headers).status_code == 403
    assert client.post("/api/jobs", json={"manifest": TINY}, headers=headers).status_code == 403
    assert client.get("/api/evaluations", headers={"origin": HERE}).status_code == 200
    assert client.delete("/api/jobs/1", headers={"sec-fetch-site": "cross-site"}).status_code == 403


@pytest.mark.parametrize(
    ("host", "address", "ours"),
    [("localhost:1", "127.0.0.1", True), ("[::1]:80", "::1", True), ("192.0.2.7", "127.0.0.1", False),
     (None, "::1", False),
     ("192.0.2.7:80", "0.0.0.0", True), ("evil.example", "0.0.0.0", False), ("[2001:db8::1]:80", "::", True)],
)  # fmt: skip
def test_a_server_is_asked_by_its_address(host: str | None, address: str, ours: bool) -> None:
    assert guard.is_this_server(host, address) is ours


@pytest.mark.parametrize(
    "name",
    [
        "%2e%2e",
        "..%2f..%2fetc%2fpasswd",
        "%2fetc",
        "0123456789ab-0001%00",
        "０123456789ab-0001",
        "x" * 5000,
        "link",
    ],
)
def test_no_name_leads_out_of_the_folder(name: str, made: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    outside = tmp_path / "0123456789ab-0001"
    shutil.copytree(next(made.glob("*-0001")), outside)
    (store / "0123456789ab-0002").symlink_to(outside)
    wanted = "0123456789ab-0002" if name == "link" else name
    with TestClient(app.application(store, []), base_url=HERE) as client:
        assert client.get("/api/evaluations").json()["total"] == 0
        for path in (
            f"/api/evaluations/{wanted}", f"/api/evaluations/{wanted}/manifest", f"/evaluations/{wanted}/report",
            f"/assets/{wanted}",
        ):  # fmt: skip
            assert client.get(path).status_code in (404, 422), path


@pytest.mark.slow
def test_over_rest_outputs_are_those_of_this_process_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    store = tmp_path / "store"
    here = running.evaluate(reading.of_plain(TINY).manifest, tmp_path, Options(store), FACTS, show_nothing)
    with TestClient(guard.Guard(app.application(store)), base_url=HERE) as client:
        last = ended(client, client.post("/api/jobs", json={"manifest": TINY}).json()["id"])
    assert last["state"] == "done", last["error"]
    both = [results.read(each) for each in (here, store / last["result"])]
    assert len({each.content["outputs"]["digest"] for each in both}) == 1
    assert [each.content["transport"] for each in both] == ["in-process", "own process"]


@pytest.mark.slow
def test_an_evaluation_that_is_ended_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch")

    def progress(what: str, done: int, of: int) -> None:
        if done:
            raise KeyboardInterrupt

    asked = reading.of_plain({**TINY, "scenario": {"requests": 99_000}}).manifest
    with pytest.raises(KeyboardInterrupt):
        transports.SubprocessAgent().submit(asked, tmp_path, Options(tmp_path / "store"), progress)
    assert list((tmp_path / "store").iterdir()) == []
