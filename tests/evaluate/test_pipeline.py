"""Steps that prepare samples, and programs that answer over pipes: what they must agree with, and what they refuse."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from xsp.errors import ManifestError
from xsp.evaluate import dispatch, jsonlines, pipeline, results
from xsp.evaluate.web import policy


@pytest.mark.parametrize("size", [7, 224, 232, 256, 299])
@pytest.mark.parametrize("shape", [(333, 500), (500, 333), (400, 400), (800, 231), (1, 900), (375, 1242)])
def test_an_image_has_the_sides_that_torchvision_gives_it(size: int, shape: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    if size * max(shape) / min(shape) > 4096:
        pytest.skip("a long image")
    found = pipeline.resize(np.zeros((*shape, 3), np.uint8), size)
    expected = functional.resize(torch.zeros(3, *shape, dtype=torch.uint8), [size], antialias=True)
    assert found.shape[:2] == tuple(expected.shape[1:])


@pytest.mark.parametrize("decoder", ["pillow", "pillow-half", "torchvision"])
def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(
    decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip("PIL.Image")
    if decoder == "torchvision":
        pytest.importorskip("torchvision")
    stream = io.BytesIO()
    library.new("L", (40, 30)).save(stream, "PNG")
    monkeypatch.setattr(pipeline, "MOST_PIXELS", 40 * 30)
    assert pipeline.decode(stream.getvalue(), decoder=decoder).shape == (30, 40, 3)
    monkeypatch.setattr(pipeline, "MOST_PIXELS", 40 * 30 - 1)
    damaged = stream.getvalue()[:60]  # decoding would find it damaged
    with pytest.raises(ManifestError, match="an image of 40 x 30 pixels is too large"):
        pipeline.decode(damaged, decoder=decoder)


@pytest.mark.parametrize(("size", "shape"), [(4, (4, 4)), ([4], (4, 4)), ([4, 6], (4, 6))])
def test_a_crop_takes_a_side_or_both(size: int | list[int], shape: tuple[int, int]) -> None:
    assert pipeline.crop(np.zeros((8, 8, 3)), size).shape[:2] == shape


@pytest.mark.parametrize("size", [[], [4, 4, 3]])
def test_a_crop_of_another_number_of_sides_is_refused(size: list[int]) -> None:
    with pytest.raises(ManifestError, match="give one side, or height and width"):
        pipeline.crop(np.zeros((8, 8, 3)), size)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            f"model: {{name: m, source: 'transformers:bert?vocab_size={'9' * 5000}'}}\n",
            "model.source: the option 'vocab_size' is not a number",
        ),
        (
            "model: {name: m, source: 'torchvision:resnet18'}\ndataset: {samples: 10000, height: 4000, width: 4000}\n",
            "dataset.samples: their values: 480,000,000,000 is above",
        ),
        (
            "model: {name: m, source: 'torchvision:resnet18', inputs: [{shape: [3, 2000, 2000]}]}\n"
            "scenario: {kind: batched, batch: 1024}\n",
            "scenario: the values of a batch: 12,288,000,000 is above",
        ),
    ],
)
def test_manifests_from_a_network_that_would_fill_the_memory_are_refused(text: str, says: str) -> None:
    assert any(each.startswith(says) for each in policy.objections(policy.read(text).manifest))


def test_a_program_is_found_beside_its_manifest_and_one_that_does_not_read_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "board"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    program = folder / "sim"
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    program.chmod(0o755)
    asked = jsonlines.Program(["./sim"], folder)
    began = time.monotonic()
    with pytest.raises(ManifestError, match="did not read its request in time"):
        asked.ask({"predict": "x" * (1 << 22)}, 0.2)
    assert time.monotonic() - began < 30
    asked.end()


def test_digits_of_several_manifests_name_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = [f"{first}{'0' * (results.DIGITS - 2)}-0001" for first in ("ab", "ac", "bb")]
    monkeypatch.setattr(results, "_result_dirs", lambda store: [store / name for name in names])
    with pytest.raises(ManifestError, match=r"'a' begins 2 manifests: ab0+, ac0+; give more digits"):
        results.find("a", tmp_path)
    with pytest.raises(ManifestError, match=r"bb0+-0001"):  # it is the one, and not there
        results.find("b", tmp_path)


def test_pieces_are_carried_out_to_the_end_when_who_hears_of_them_fails() -> None:
    def refuse(piece: dispatch.Piece) -> None:
        raise OSError("no space left")

    work, _ = dispatch.pieces([], [], on_each_agent=False)
    state = dispatch._State([], lambda *said: None, refuse, len(work))
    for _ in range(2):
        state.end(dispatch.Piece(None, []))  # type: ignore[arg-type]
    assert isinstance(state.callback_error, OSError)
    assert state._ended_count == 2


@pytest.mark.parametrize(
    ("function", "value", "options", "said"),
    [
        (pipeline.resize, np.zeros((8, 8, 3), np.uint8), {"size": [1, 2, 3]}, "the shorter side, or height and width"),
        (pipeline.normalise, np.zeros((8, 8, 3)), {"divide": 0}, "divide is 0"),
        (pipeline.normalise, np.zeros((8, 8, 3)), {"std": [1, 0, 1]}, "std contains 0"),
        (pipeline.tokenise, "some text", {"length": 0}, "at least 1"),
        (pipeline.argsort, np.zeros(3), {"k": 0}, "at least 1"),
    ],
)
def test_options_without_a_meaning_are_refused(
    function: Callable[..., object], value: object, options: dict[str, object], said: str
) -> None:
    with pytest.raises(ManifestError, match=said):
        function(value, **options)
