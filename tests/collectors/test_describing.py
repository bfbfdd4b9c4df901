"""What steps that describe say of operators and modules, and that the program does not notice."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import duckdb  # noqa: E402

import xsp  # noqa: E402
from xsp.schema import DESCRIPTION_KEYS, Level, Span  # noqa: E402
from xsp_collectors.modules import MOST_LETTERS, ModuleCalls  # noqa: E402
from xsp_collectors.tensors import Numbers  # noqa: E402
from xsp_collectors.torchops import TorchOps  # noqa: E402

nn = torch.nn
IMAGE = torch.randn(2, 3, 16, 16)


def seen(collector: Any, step: Callable[[], object], *, describe: bool = True) -> list[tuple[Span, dict[str, Any]]]:
    """Return the spans of a step with their attributes."""
    collector.open()
    try:
        collector.start(Level.OP, describe=describe)
        step()
        collector.stop()
        spans = list(collector.spans())
    finally:
        collector.close()
    return [(span, json.loads(span.attributes or "{}")) for span in spans]


def said(step: Callable[[], object], name: str) -> tuple[Any, dict[str, Any]]:
    """Return shapes and attributes of the first operator of a name in a step that describes."""
    with torch.inference_mode():
        found = seen(TorchOps(), step)
    span, attributes = next(each for each in found if each[0].name == name)
    return json.loads(span.input_shapes or "null"), attributes


def test_an_operator_has_its_overload_types_and_arguments():
    a = torch.zeros(2, 3)
    assert said(lambda: a.add(a.double(), alpha=2), "aten::add") == (
        [[2, 3], [2, 3], []],
        {"overload": "Tensor", "input_dtypes": ["float", "double", "Scalar"], "input_scalars": [None, None, 2]},
    )


def test_strides_are_there_where_a_tensor_is_not_contiguous():
    a, b = torch.zeros(4, 3), torch.zeros(2, 4)
    assert "input_strides" not in said(lambda: b @ a, "aten::matmul")[1]
    assert said(lambda: a.t() @ b.t(), "aten::matmul")[1]["input_strides"] == [[1, 3], [1, 4]]
    one = torch.zeros(2, 1).as_strided((2, 1), (1, 7))
    assert "input_strides" not in said(one.relu, "aten::relu")[1]


def test_lists_of_tensors_have_their_shapes_and_types():
    a, b = torch.zeros(2, 3), torch.zeros(2, 5, dtype=torch.float16).t().contiguous().t()
    shapes, attributes = said(lambda: torch.cat([a, b], 1), "aten::cat")
    assert shapes == [[[2, 3], [2, 5]], []]
    assert attributes["input_dtypes"] == [["float", "c10::Half"], "Scalar"]
    assert attributes["input_strides"] == [[None, [1, 2]], None]


def test_numbers_that_are_not_finite_are_text_so_that_the_attributes_stay_json():
    assert said(lambda: torch.full((2,), float("-inf")), "aten::full")[1]["input_scalars"][:2] == [[2], "-inf"]


def test_timed_steps_say_nothing_of_it():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    for collector in (TorchOps(), ModuleCalls()):
        found = seen(collector, lambda: net(IMAGE), describe=False)
        assert found
        assert all(not set(attributes) & set(DESCRIPTION_KEYS) for _, attributes in found)


def layer(module: Any, *args: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the attributes of a module's call in a step that describes, and the notes."""
    collector = ModuleCalls()
    found = seen(collector, lambda: module(*args))
    return next(attributes for span, attributes in found if span.kind == "module"), list(collector.notes())


def test_a_module_says_its_parameters_and_the_shapes_that_it_returned():
    attributes, notes = layer(nn.Conv2d(3, 8, 3), IMAGE)
    assert (attributes["extra_repr"], attributes["output_shapes"], notes) == (
        "3, 8, kernel_size=(3, 3), stride=(1, 1)", [[2, 8, 14, 14]], [],
    )  # fmt: skip


class Speaking(nn.Module):
    """Says of itself what it is given."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def extra_repr(self) -> str:
        if isinstance(self.what, Exception):
            raise self.what
        return self.what

    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("what", "stated"),
    [
        ("", None),
        (7, None),
        ("width=4,\n  api_key='S3CRET', num_tokens=197", "width=4, api_key=***, num_tokens=197"),
        ("path=/home/ada/set/x.bin, token: hf_abcdefghijkl", "path=x.bin, token: ***"),
        ("\ud800 x", "? x"),
    ],
)
def test_what_a_module_says_is_plain_text_without_secrets(what, stated):
    attributes, notes = layer(Speaking(what), IMAGE)
    assert (attributes.get("extra_repr"), notes) == (stated, [])


def test_a_module_that_says_very_much_is_cut():
    assert len(layer(Speaking("x" * 10_000_000), IMAGE)[0]["extra_repr"]) == MOST_LETTERS


def test_a_module_that_raises_when_asked_is_a_note():
    attributes, notes = layer(Speaking(ValueError("no")), IMAGE)
    assert attributes["output_shapes"] == [[2, 3, 16, 16]]
    assert notes == ["extra_repr of Speaking raised ValueError: its parameters are unknown"]


class Shy(torch.Tensor):
    """A tensor that tells neither its shape nor what it is."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__" and "shape" in repr(getattr(func, "__self__", "")):
            raise RuntimeError("no")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_that_does_not_tell_its_shape_passes_as_it_would_without_us():
    shy = torch.zeros(2, 3).as_subclass(Shy)
    returned = []
    found = seen(ModuleCalls(), lambda: returned.append(nn.Sequential(Speaking(""))(shy)))
    assert returned[0] is shy
    assert [span.status for span, _ in found] == ["ok"] * 3
    assert all("output_shapes" not in attributes for _, attributes in found)


class Branching(nn.Module):
    """Gives one tensor to two modules, and what it changes in place to a third call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first(x)
        self.second(x * 1)
        x.add_(1)
        return self.first(x)


def test_modules_say_which_of_them_were_given_the_same_tensor():
    found = seen(ModuleCalls(), lambda: Branching()(torch.zeros(2, 3)))
    modules = [attributes for span, attributes in found if span.kind == "module"]
    numbers = [(attributes.get("input_tensors"), attributes.get("output_tensors")) for attributes in modules]
    assert sorted(numbers, key=str) == sorted([([0], [0]), ([1], [1]), ([2], [2]), ([0], [2])], key=str)


class Scaling(nn.Module):
    def forward(self, x: torch.Tensor, factor: float | torch.Tensor | None = None) -> torch.Tensor:
        return x if factor is None else x * factor


@pytest.mark.parametrize(("factor", "numbers"), [(None, [0]), (2.0, None), (torch.ones(2), [0, 1])])
def test_an_outermost_call_has_numbers_if_tensors_alone_tell_what_it_returns(factor, numbers):
    ((_, found),) = [
        each for each in seen(ModuleCalls(), lambda: Scaling()(torch.zeros(2), factor)) if each[0].kind == "module"
    ]
    assert found.get("input_tensors") == numbers


def test_tensors_of_other_classes_have_no_numbers_and_none_is_kept_alive():
    numbers = Numbers()
    assert numbers.of(torch.zeros(2).as_subclass(Shy)) == ()
    tensor = torch.zeros(2)
    gone = weakref.ref(tensor)
    assert numbers.of((tensor, [tensor, torch.ones(1)])) == (0, 0, 1)
    del tensor
    assert gone() is None
    with torch.inference_mode():
        assert len(numbers.of(torch.zeros(2))) == 1
    assert torch.func.vmap(lambda x: x + len(numbers.of(x)))(torch.zeros(2)).shape == (2,)


def record(out: Path, steps: int) -> Path:
    """Record steps of a small model on all levels."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    with torch.inference_mode(), xsp.profile(out=str(out), levels="M/L/G", warmup=1, settle=0) as profile:
        for _ in range(steps):
            with profile.step():
                net(IMAGE)
    return out


@pytest.mark.slow
def test_the_merged_step_has_what_the_describing_step_knows_and_a_long_run_hardly_grows(tmp_path):
    run = record(tmp_path / "run", 14)
    trace = xsp.load(run)
    described = trace.con.execute(
        "SELECT level, count(*), count(*) FILTER (json_exists(attributes, '$.extra_repr')), "
        "count(*) FILTER (json_exists(attributes, '$.overload')) FROM merged WHERE level IN (30, 40) GROUP BY level "
        "ORDER BY level"
    ).fetchall()
    (_, layers, said, _), (_, operators, _, overloads) = described
    assert (layers, said) == (6, 4)  # ReLU and Sequential say nothing
    assert overloads == operators
    names = "SELECT json_extract_string(attributes, '$.\"code.function.name\"') FROM merged WHERE level = 30"
    assert all(name for (name,) in trace.con.execute(names).fetchall())

    steps = {True: [], False: []}
    for file in sorted((run / "steps").glob("*.parquet")):
        timed, rung = duckdb.execute(
            "SELECT any_value(timed), any_value(rung) FROM read_parquet(?)", [str(file)]
        ).fetchone()
        if not timed or rung == Level.KERNEL:
            steps[timed].append(file)
    (describing,), recorded = steps[False], steps[True]
    bare = tmp_path / "bare.parquet"
    duckdb.execute(
        f"COPY (SELECT * REPLACE (CASE WHEN level < 40 THEN attributes END AS attributes) FROM '{describing}') "
        f"TO '{bare}' (FORMAT parquet, COMPRESSION zstd)"
    )
    more = describing.stat().st_size - bare.stat().st_size
    whole = 1000 * sum(each.stat().st_size for each in recorded) / len(recorded)
    assert 0 < 2 * more < 0.01 * whole  # the merged step has them once more


class Takes(nn.Module):
    """A model that takes anything."""

    def forward(self, *args: Any, **kwargs: Any) -> None: ...


TOKENS = torch.tensor([[5, 6, 7, 0, 0, 0, 0, 0, 0, 0], [5, 6, 0, 7, 8, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (TOKENS, [2, 10, 5, 8]),
        (TOKENS.flip(1).int(), [2, 10, 5, 8]),
        (TOKENS[:1], [1, 10, 3, 3]),
        (torch.arange(40).view(4, 10), [4, 10, 10, 40]),
        (torch.full((4, 10), 3), [4, 10, 10, 40]),  # an example
        (torch.arange(40).view(4, 10).where(torch.arange(10) < 9, 2), [4, 10, 10, 40]),  # the end of a text
        (TOKENS[:, :4], None),
        (TOKENS.float(), None),
        (TOKENS.to("meta"), None),
        (TOKENS[None], None),
    ],
)
def test_a_forward_pass_has_the_padding_of_its_tokens(tokens: Any, expected: list[int] | None) -> None:
    net, others = Takes(), torch.ones(2, 10, dtype=torch.long)
    for step in (lambda: net(IMAGE, tokens), lambda: net({"input_ids": tokens}), lambda: net(input_ids=tokens)):
        (_, attributes), *_ = [each for each in seen(ModuleCalls(), step) if each[0].level == Level.MODEL]
        assert attributes.get("padding") == expected
    if expected is not None:
        assert seen(ModuleCalls(), lambda: net(tokens, attention_mask=others))[0][1]["padding"] == expected
    assert "padding" not in seen(ModuleCalls(), lambda: net(tokens), describe=False)[0][1]


def test_tokens_whose_memory_was_freed_are_not_looked_at() -> None:
    """Reading them would end the program."""
    freed, shorter = (torch.arange(1 << 20).view(4, -1) for _ in range(2))
    freed.untyped_storage().resize_(0)
    shorter.untyped_storage().resize_(64)
    for tokens in (freed, shorter):
        assert "padding" not in seen(ModuleCalls(), lambda tokens=tokens: Takes()(tokens))[0][1]
    functional = torch._to_functional_tensor(TOKENS)
    assert "padding" not in seen(ModuleCalls(), lambda: Takes()(functional))[0][1]


def test_looking_for_padding_runs_no_operator() -> None:
    net, both = Takes(), TorchOps()
    calls = ModuleCalls()
    calls.open()
    calls.start(Level.OP, describe=True)
    with torch.inference_mode():
        found = seen(both, lambda: net(TOKENS))
    calls.stop()
    padded = [json.loads(span.attributes or "{}").get("padding") for span in calls.spans()]
    calls.close()
    assert found == []
    assert [2, 10, 5, 8] in padded
