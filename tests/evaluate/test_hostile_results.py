"""Results that somebody else made: links, pipes and damage in them disturb no other result."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("yaml")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import oddfiles
from depth import deep
from evaluations import FACTS, PROGRAM, show_nothing
from fastapi.testclient import TestClient

from xsp import table
from xsp.cli import main
from xsp.errors import ManifestError
from xsp.evaluate import reading, results, running
from xsp.evaluate.agents import Options
from xsp.evaluate.web import app
from xsp.evaluate.web.routes import without_paths

GOOD, BAD = "aaaaaaaaaaaa-0001", "bbbbbbbbbbbb-0001"
SECRET = "root-of-all-secrets"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    (folder / "board.py").write_text(PROGRAM, encoding="utf-8")
    model = {"name": "board", "task": "sums", "command": [sys.executable, "board.py"]}
    asked = reading.of_plain({"model": model, "dataset": {"samples": 4}, "scenario": {"requests": 20}}).manifest
    return running.evaluate(asked, folder, Options(store=folder / "store", trusted=True), FACTS, show_nothing)


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """Return a folder with two equal results; tests damage the second."""
    for name in (GOOD, BAD):
        shutil.copytree(made, tmp_path / "store" / name)
        (tmp_path / "store" / name / results.ADVICE).write_text('{"advice": []}')
    return tmp_path / "store"


@pytest.fixture
def client(store: Path) -> Iterator[TestClient]:
    with TestClient(app.application(store, []), base_url="http://127.0.0.1:8610") as found:
        yield found


PAGES = ("", "/requests", "/manifest", "/bound", "/advice")


def check_others(client: TestClient, store: Path) -> None:
    """Check that every page answers, names no path, and shows the good result."""
    lists = [client.get("/api/evaluations"), client.get("/api/leaderboard")]
    lists += [client.get("/api/leaderboard", params={"by": by}) for by in ("p50_ms", "rate", "top1")]
    singles = [client.get(f"/api/evaluations/{BAD}{page}") for page in PAGES]
    singles += [client.get(f"/evaluations/{BAD}/report")]
    pairs = [client.get("/api/compare", params={"name": names}) for names in ([GOOD, BAD], [BAD, GOOD])]
    assert [answer.status_code for answer in lists] == [200] * len(lists)
    assert {answer.status_code for answer in [*singles, *pairs]} <= {200, 404, 422}
    assert GOOD in [entry["result"] for entry in lists[0].json()["evaluations"]]
    assert client.get("/api/compare", params={"name": [GOOD, GOOD]}).status_code == 200
    for answer in [*lists, *singles, *pairs]:
        assert SECRET not in answer.text
        assert str(store) not in answer.text
        assert str(store.parent) not in answer.text


WAYS: dict[str, Callable[[Path], None]] = {"pipe": os.mkfifo, "holes": oddfiles.holes, "folder": Path.mkdir}


NAMES = (
    results.RESULT, results.MANIFEST, results.OUTPUTS, results.REQUESTS, results.BOUND, results.ADVICE, results.RUN,
    "run/run.json", "run/steps", "run/steps/000001.parquet",
)  # fmt: skip


@pytest.mark.parametrize("way", ["link", "pipe", deep("holes"), deep("folder")])
@pytest.mark.parametrize("name", NAMES)
def test_no_file_of_a_result_leads_out_or_makes_a_page_wait(
    client: TestClient, store: Path, made: Path, name: str, way: str
) -> None:
    original = made / name
    secret = store.parent / "secret"
    secret.write_text(f'{{"{SECRET}": "{SECRET}"}}')
    path = store / BAD / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.startswith("run/steps"):
        (store / BAD / "run" / "run.json").write_text('{"format": 1}')
    if path.exists():
        path.unlink()
    if way == "link":  # to a file that would be read, if it were followed
        path.symlink_to(original if original.is_file() and name != results.RESULT else secret)
    else:
        WAYS[way](path)
    check_others(client, store)
    if way == "link" and name in (results.OUTPUTS, results.REQUESTS):
        with pytest.raises(ManifestError, match="leads out"):
            results.read(store / BAD).outputs() if name == results.OUTPUTS else results.read(store / BAD).requests()


def test_a_run_behind_a_link_is_no_trace(client: TestClient, store: Path) -> None:
    outside = store.parent / "run"
    (outside / "steps").mkdir(parents=True)
    (outside / "run.json").write_text(json.dumps({"format": 1, "name": SECRET}))
    (store / BAD / "run").symlink_to(outside)
    assert client.get(f"/api/evaluations/{BAD}").json()["trace"] is False
    check_others(client, store)


DAMAGES: dict[str, Any] = {
    "environment.equal": [None, [], "x", 7, {"a": "\ud800"}],
    "environment.noted": [None, [1]],
    "environment": [None, [], {}],
    "agent.packages": [None, ["torch"], {"torch": 2}, "x"],
    "agent.name": [None, 5, {}],
    "agent.gpus": [None, "x", [1]],
    "agent": [None, []],
    "outputs": [None, {}, {"digest": 1}],
    "samples": [None, {}],
    "manifest": [None, {}, [], {"model": None}, {"model": {"name": 1}}, {"model": "file.yaml"}],
    "identity": [None, 1, "", "../../etc", "A" * 64],
    "started": [None, 1, {}],
    "name": [None, 1],
    "kind": [None, {}],
    "xsp": [None, 1],
    "format": [None, "1", 1.5, True, 2, 10**400],
    "accuracy": [[], "x", {"top1": 2}, {"top1": "x"}, {"top1": 0.5}],
    "threads": ["x", {}],
    "simulated": ["x", None],
    "notes": ["x", [1], None],
    "parts": [None, [], {}, [{}], [None]],
    "parts.0.batch": [None, "1", 0, -1, 1.5, 10**30],
    "parts.0.p50_ms": ["x", [], float("nan"), float("inf")],
    "parts.0.inputs_per_s": ["x", {}],
    "parts.0.late": [None, 1, "x"],
    "parts.0.stopped": [1, {}],
    "parts.0.rate_low": [1.0],
}
CASES = [(field, value) for field, values in DAMAGES.items() for value in values]


def put(content: Any, field: str, value: Any) -> Any:
    *folders, last = [int(part) if part.isdigit() else part for part in field.split(".")]
    place = content
    for name in folders:
        place = place[name]
    place[last] = value
    return content


@pytest.mark.parametrize(("field", "value"), CASES, ids=ascii)
def test_a_result_with_a_field_of_another_type_is_listed_as_damaged(
    client: TestClient, store: Path, field: str, value: Any
) -> None:
    path = store / BAD / results.RESULT
    path.write_text(json.dumps(put(json.loads(path.read_text()), field, value)))
    assert client.get("/api/evaluations").json()["damaged"] == [BAD]
    assert client.get("/api/leaderboard").json()["damaged"] == [BAD]
    reason = "newer xsp" if (field, value) == ("format", 2) else "damaged"
    assert reason in client.get(f"/api/evaluations/{BAD}").text
    assert reason in client.get("/api/compare", params={"name": [GOOD, BAD]}).text


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900, b"1" * 5000, b"NaN"],
    ids=["empty", "null", "list", "no UTF-8", "unclosed", "deep", "digits", "NaN"],
)
def test_a_file_that_is_no_result_is_listed_as_damaged(client: TestClient, store: Path, content: bytes) -> None:
    (store / BAD / results.RESULT).write_bytes(content)
    check_others(client, store)
    assert client.get("/api/evaluations").json()["damaged"] == [BAD]


def test_fields_that_are_deeply_nested_are_damage(client: TestClient, store: Path) -> None:
    path = store / BAD / results.RESULT
    text = json.dumps(put(json.loads(path.read_text()), "environment.equal", {"a": "DEEP"}))
    path.write_text(text.replace('"DEEP"', "[" * 900 + "]" * 900))
    check_others(client, store)
    assert client.get("/api/evaluations").json()["damaged"] == [BAD]


@pytest.mark.parametrize("name", [results.BOUND, results.ADVICE])
@pytest.mark.parametrize("content", [deep(b""), b"\xff", deep(b"[" * 100_000), b"[NaN]", deep(b'["\\ud800"]')])
def test_advice_and_bound_are_json_or_an_error(client: TestClient, store: Path, name: str, content: bytes) -> None:
    (store / BAD / name).write_bytes(content)
    answer = client.get(f"/api/evaluations/{BAD}/{name.partition('.')[0]}")
    assert answer.status_code in (200, 422)
    answer.json()
    check_others(client, store)


REQUESTS = "part BIGINT, number BIGINT, batch BIGINT, due_ns BIGINT, issued_ns BIGINT, start_ns BIGINT, end_ns BIGINT"


@pytest.mark.parametrize(
    "query",
    [
        "SELECT 1 AS part WHERE false", "SELECT 1::BIGINT AS part, 1 AS number",
        "SELECT 1 part, 1 number, 1 batch, 'x' due_ns, 1 issued_ns, 1 start_ns, 1 end_ns",
        "SELECT 1 part, 1 number, 1 batch, NULL::BIGINT due_ns, 1 issued_ns, 1 start_ns, 1 end_ns",
        "SELECT 2 part, 1 number, 1 batch, 1 due_ns, 1 issued_ns, 1 start_ns, 1 end_ns",
        "SELECT 1 part, 1 number, 1 batch, 1 due_ns, 1 issued_ns, 1 start_ns, 1 end_ns FROM range(20_000_000)",
        None,
    ],
)  # fmt: skip
def test_damaged_requests_are_an_error_of_that_result(client: TestClient, store: Path, query: str | None) -> None:
    path = store / BAD / results.REQUESTS
    path.unlink()
    if query is not None:
        table.connect().execute(f"COPY ({query}) TO {table.literal(str(path))} (FORMAT parquet)")
    assert client.get(f"/api/evaluations/{BAD}/requests").status_code == 422
    check_others(client, store)


def header(shape: str, kind: str) -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def archive(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as written:
        written.writestr("output0.npy", content)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"PK", b"\x93NUMPY", archive(b""), archive(b"x" * 100), archive(header("(1000000000000,)", "<f8")),
        archive(header("(4,)", "|O") + b"\x80\x04N."), lambda: archive(bytes(300 << 20)),
        archive(header("(-1,)", "<f8")),
        archive(header("(2, 2)", "<f4") + bytes(10)), archive(header("'x'", "<f4")), archive(header("(4,)", "<M8[ns]")),
    ],
    ids=["empty", "PK", "npy", "no header", "other", "huge", "objects", "bomb", "negative", "short", "shape", "dates"],
)  # fmt: skip
def test_damaged_outputs_are_an_error_of_that_result(
    client: TestClient, store: Path, content: bytes | Callable[[], bytes]
) -> None:
    (store / BAD / results.OUTPUTS).write_bytes(content if isinstance(content, bytes) else content())
    with pytest.raises(ManifestError, match="damaged"):
        results.read(store / BAD).outputs()
    check_others(client, store)


@pytest.mark.parametrize("value", [np.float32(1), np.zeros((0, 4), np.float32), np.array(["a"]), np.full(4, np.nan)])
def test_outputs_of_any_shape_are_compared_or_are_said_not_to_be(client: TestClient, store: Path, value: Any) -> None:
    np.savez(store / BAD / results.OUTPUTS, output0=value)
    assert client.get("/api/compare", params={"name": [GOOD, BAD]}).status_code == 200
    assert client.get("/api/compare", params={"name": [BAD, BAD]}).status_code == 200


def test_the_command_line_lists_the_others_too(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store / BAD / results.RESULT
    path.write_text(json.dumps(put(json.loads(path.read_text()), "environment.equal", None)))
    assert main(["evaluate", "leaderboard", "--store", str(store)]) == 0
    assert main(["evaluate", "list", "--store", str(store)]) == 0
    said = capsys.readouterr()
    assert GOOD in said.out
    assert "damaged (environment.equal" in said.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/srv/store/a b/x.json: damaged", "x.json: damaged"),
        ("cannot read '/etc/ssl/private/key.pem' (No such file)", "cannot read 'key.pem' (No such file)"),
        ("~/models/x.json, file:///home/a/b.pt", "x.json, b.pt"),
        ("/srv/store: no result", ": no result"),
        ("12 inputs/s, and/or, a ratio of 3/4, torchvision:resnet18", "12 inputs/s, and/or, a ratio of 3/4, "
         "torchvision:resnet18"),
        ("https://example.com/a", "https://example.com/a"),
    ],
)  # fmt: skip
def test_errors_name_no_directory(text: str, expected: str) -> None:
    assert without_paths(text, Path("/srv/store")).replace("a b/", "") == expected


WRITES = """
import sys
from pathlib import Path
from xsp.evaluate import results
for number in range(10):
    with results.new_result(Path(sys.argv[1]), "ab" * 32) as (folder, paths):
        (folder / "result.json").write_text(f"{sys.argv[2]} {number}")
"""


@pytest.mark.slow
def test_several_writers_of_one_result_lose_and_mix_nothing(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path), str(number)]) for number in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    written = {path.read_text() for path in tmp_path.glob("*/result.json")}
    assert written == {f"{writer} {number}" for writer in range(4) for number in range(10)}
    assert len(list(tmp_path.iterdir())) == 40
