"""`xsp share status` and `xsp share check`: what each says of the same store, and what only one of them does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xsp.cli import main, share_check, share_status
from xsp.share import client, devices

HELD = {"key": "9f86d081" * 8, "source": "a.safetensors", "nbytes": 4096, "tensors": 3, "hits": 1, "attached": [7]}
STORE = {"pid": 5, "held_bytes": 4096, "capacity_bytes": 8192, "copying_bytes": 0, "evictions": 0, "objects": [HELD]}
DEVICE = {"ordinal": 0, "name": "a device", "uuid": "00"}
COMPARED = {"device": DEVICE, "corrupted": None, "error": None, **HELD}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand in for a store with a device, and return what a comparison finds; it is none until the test adds some."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(client, "status", lambda folder: STORE)
    monkeypatch.setattr(devices, "status", lambda folder: [{**STORE, "device": DEVICE}])
    monkeypatch.setattr(devices, "check", lambda folder: found)
    return found


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["share", *words]) == code
    return capsys.readouterr().out


def test_status_compares_nothing_and_says_who_does(
    store: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "check", None)
    shown = said(capsys, "status")
    assert "attached: 7" in shown
    assert shown.splitlines()[-1].startswith("nothing was compared; xsp share check compares")
    monkeypatch.setattr(devices, "status", lambda folder: [])
    assert "xsp share check" not in said(capsys, "status")


def test_check_says_that_it_compared_and_how_many_are_equal(
    store: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    store.append(COMPARED)
    lines = said(capsys, "check").splitlines()
    assert lines[0] == "compared, block by block, with the memory of the store:"
    assert lines[-1] == "1 of 1 equal"
    store += [{**COMPARED, "corrupted": "byte 5, in w"}, {**COMPARED, "error": "it is gone"}]
    lines = said(capsys, "check", code=1).splitlines()
    assert lines[-1] == "1 of 3 equal, 1 differ, 1 not compared"
    assert [line.split(": ")[-1] for line in lines[1:-1]] == [
        "equal", "DIFFERS from the host at byte 5, in w; end the processes that are attached", "it is gone"
    ]  # fmt: skip


def test_check_without_a_device_is_json_where_json_is_asked_for(
    store: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "status", lambda folder: [])
    monkeypatch.setattr(devices, "check", None)
    assert json.loads(said(capsys, "check", "--format", "json")) == []
    assert "nothing to compare" in said(capsys, "check")


@pytest.mark.parametrize(("one", "other"), [(share_status, "xsp share check"), (share_check, "xsp share status")])
def test_each_help_names_the_other_command(one: Any, other: str) -> None:
    assert other in (one.__doc__ or "")
