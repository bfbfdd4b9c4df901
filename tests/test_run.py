"""`run.json` is a typed `Run`: what fits is an attribute, what does not is named and costs nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import xsp
from xsp import rundir
from xsp.errors import TraceError
from xsp.run import Budget, Run, Steps

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def test_a_field_is_an_attribute_of_its_type_and_a_key_as_it_stands_in_the_file() -> None:
    run = Run.of({"name": "net", "kinds": [{"kind": 0, "name": "train", "steps": 3}], "rank": None})
    assert (run.name, run.rank, run.finished, run.parts) == ("net", None, None, ())
    assert [(kind.kind, kind.name, kind.steps, kind.batch_size) for kind in run.kinds] == [(0, "train", 3, None)]
    assert run["kinds"][0]["name"] == "train"
    assert ("rank" in run, "budget" in run) == (True, False)
    assert json.loads(json.dumps(dict(run))) == run


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("budget", -1),
        ("budget", {"asked_percent": "5"}),
        ("budget", {"wall_ns": float("nan")}),
        ("delivery", True),
        ("delivery", [{"messages": []}]),
        ("samples", {"readings": []}),
        ("steps", {"seen": -1}),
        ("rank", True),
        ("world_size", 1 << 63),
        ("otel", {"trace_id": "no id", "span_id": "ab"}),
        ("kinds", [{"kind": 0}]),
        ("notes", ["text"]),
        ("rungs", "M"),
    ],
)
def test_a_field_that_is_not_of_its_type_has_its_default_and_is_named(field: str, value: object) -> None:
    run = Run.of({"name": "net", field: value})
    assert run.misfits == (field,)
    assert getattr(run, field) == getattr(Run.of({}), field)
    assert (run.name, dict(run)) == ("net", {"name": "net"})
    assert run.content[field] == value or value != value, "what stood there is written again"


def test_one_bad_fact_on_the_machine_leaves_the_others() -> None:
    machine = Run.of({"machine": {"cpu": "a cpu", "cores": "many", "devices": ["H100"]}}).machine
    assert (machine.cpu, machine.cores, machine.devices, machine.misfits) == ("a cpu", None, ("H100",), ("cores",))


def test_fields_of_other_versions_are_kept_at_every_depth_and_named() -> None:
    run = Run.of({"name": "net", "colour": "red", "steps": {"seen": 3, "tired": 1}})
    assert run.unknown == ("colour",)
    changed = run | {"finished": True}
    assert (changed["colour"], changed["steps"], changed.finished) == ("red", {"seen": 3, "tired": 1}, True)
    assert isinstance(changed, Run)
    assert run.finished is None


def test_steps_that_say_little_are_read() -> None:
    assert Run.of({"steps": {"stored": 2}}).steps == Steps.of({"stored": 2})
    assert Steps.of({"stored": 2}).seen is None
    assert Budget.of({"asked_percent": 1}).left_out == {}


def test_no_text_of_a_run_is_a_command_to_a_terminal() -> None:
    run = Run.of({"name": "a\x1b[2J", "absent": {"\x9b1A": "\ud800"}, "x": ["\u202e"]})
    assert str(dict(run)).isprintable()
    assert run.name == "a␛[2J"


def test_a_note_is_there_once() -> None:
    run = Run.of({"notes": [{"source": "load", "text": "a"}]}).with_notes("load", ["a", "b", "b"])
    assert [(note.source, note.text) for note in run.notes] == [("load", "a"), ("load", "b")]


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from([*Run.__dataclass_fields__, "more"]), JSON))
def test_any_json_is_a_run(content: dict[str, object]) -> None:
    run = Run.of(content)
    assert set(run) | set(run.misfits) == set(run.content)
    assert Run.of(run.content).misfits == run.misfits


@pytest.mark.slow
def test_what_xsp_writes_holds_no_field_that_a_run_does_not_know(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with xsp.profile("small", out=tmp_path / "run") as prof:
        for _ in range(prof.schedule.steps_for(repeats=2)):
            with prof.step():
                torch.relu(torch.ones(4))
    run = rundir.read_run(tmp_path / "run")
    assert (run.unknown, run.misfits) == ((), ())
    parts = (run.steps, run.budget, run.otel, run.samples, run.machine, *run.kinds, *run.costs.values(), *run.notes)
    assert [
        (type(part).__name__, part.unknown, part.misfits) for part in parts if part and (part.unknown or part.misfits)
    ] == []


def test_a_field_that_tells_what_else_is_there_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "parts": 3}))
    with pytest.raises(TraceError, match=r"run\.json: damaged \(parts: not what xsp writes there\)"):
        xsp.load(tmp_path)


@pytest.mark.parametrize("text", ["[]", "3", "[" * 5000, '{"format": 1, "name": ' + "[" * 400 + "]" * 400 + "}"])
def test_a_file_that_is_no_run_is_an_error_of_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(TraceError) as raised:
        xsp.load(tmp_path)
    assert len(str(raised.value).splitlines()) == 1
