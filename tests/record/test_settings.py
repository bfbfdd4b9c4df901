"""The settings of a recording: one definition for the block, the commands, and the processes that they start."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import MISSING, FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import xsp
from xsp.cli import options
from xsp.cli import run as command
from xsp.errors import UsageError
from xsp.record.settings import Settings
from xsp.schema import Level

OF_COMMANDS = {"next_free", "needs_run", "typed"}
OF_THE_BLOCK = {"listener", "hosts", "enabled"}


def test_the_arguments_of_a_block_are_the_settings_with_the_same_defaults() -> None:
    arguments = dict(inspect.signature(xsp.profile).parameters)
    defaults = {each.name: each.default for each in fields(Settings)}
    assert MISSING not in defaults.values()
    assert defaults.keys() - OF_COMMANDS == arguments.keys() - OF_THE_BLOCK
    assert {name: defaults[name] for name in arguments if name in defaults} == {
        name: each.default for name, each in arguments.items() if name in defaults
    }
    documented = inspect.getdoc(xsp.profile) or ""
    assert [name for name in arguments if f"\n    {name}: " not in documented] == []


def test_what_a_block_was_given_is_in_its_settings(tmp_path: Path) -> None:
    given = {"levels": "M/L", "warmup": 2, "every": 5, "seed": 3, "samples": False, "only": Level.MODEL, "settle": 4}
    block = xsp.profile("a/b", out=tmp_path, **given)  # type: ignore[arg-type]
    assert block.settings == Settings("a/b", out=tmp_path, **given)  # type: ignore[arg-type]
    assert xsp.profile("a/b").out == Path("runs/a-b")
    with pytest.raises(FrozenInstanceError):
        block.settings.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "name", "place"),
    [
        ("/somewhere/b.run", "b.run", "/somewhere/b.run"),
        ("./b", "b", "b"),
        ("../b/", "b", "../b"),
        ("~/b", "b", str(Path.home() / "b")),
        ("runs/b", "b", "runs/b"),
        (Path("a/b"), "b", "a/b"),
        (Path("b"), "b", "b"),
        ("org/model", "org/model", "runs/org-model"),
        ("b.run", "b.run", "runs/b.run"),
        ("..", "..", "runs/run"),
    ],
)
def test_a_path_in_place_of_the_name_is_where_the_run_goes(given: Any, name: str, place: str) -> None:
    block = xsp.profile(given)
    assert (block.name, block.out) == (name, Path(place))


def test_a_path_for_a_name_beside_another_one_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'/a/b' is a path, and out='/c' is another one"):
        xsp.profile("/a/b", out="/c")
    with pytest.raises(UsageError, match="name=5: the name of a run is text"):
        xsp.profile(5)  # type: ignore[arg-type]
    assert xsp.profile("/a/b", out="/a/b").name == "b"
    assert xsp.profile("org/model", out="/a/b").name == "org/model"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"warmup": -1}, "warmup=-1: the number of warm-up steps cannot be negative"),
        ({"settle": -1}, "settle=-1: the number of steps cannot be negative"),
        ({"every": 0}, "every=0: one step in this many"),
        ({"batch_size": 0}, "batch_size=0: not a whole number of samples"),
        ({"batch_size": 2.5}, "batch_size=2.5: not a whole number of samples"),
        ({"budget": "all"}, "budget='all': write a share"),
        ({"budget": ""}, "budget='': write a share"),
        ({"levels": "M/Q"}, "Q"),
        ({"kernels": "nsys"}, "kernels='nsys'"),
        ({"levels": "M/L", "only": Level.KERNEL}, "KERNEL is not among the level sets M, M/L, M/L/op"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_starts(wrong: dict[str, Any], says: str) -> None:
    for make in (Settings, xsp.profile):
        with pytest.raises(UsageError, match=says):
            make(**wrong)


@given(
    levels=st.sampled_from(["M", "M/L", "M/L/G", "model/layer"]),
    warmup=st.none() | st.integers(0, 9),
    every=st.none() | st.integers(1, 99),
    seed=st.integers(0, 2**31),
    kernels=st.sampled_from(["auto", "cupti", "kineto"]),
    samples=st.booleans(),
    otlp_policy=st.sampled_from(["wait", "shed"]),
    only=st.none() | st.just(Level.MODEL),
)
def test_another_process_records_as_this_one_does(**chosen: Any) -> None:
    settings = Settings("train", out="runs/a b", next_free=False, **chosen)
    parser = argparse.ArgumentParser()
    command.arguments(parser)
    read = parser.parse_args([*settings.options(), "train.py"])
    read.only = Level[read.only.upper()] if read.only else None
    read.budget, read.otlp = None, None
    assert read.quiet
    found = options.recording_settings(read, "train")
    assert found == Settings("train", out=Path("runs/a b"), next_free=False, **chosen)


def test_the_samples_of_a_step_are_stated_on_the_command_line_too() -> None:
    parser = argparse.ArgumentParser()
    command.arguments(parser)
    read = parser.parse_args(["--batch-size", "24", "train.py"])
    assert options.recording_settings(read, "train").batch_size == 24
