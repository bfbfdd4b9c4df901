"""Each family of micro-models varies one measure, and holds the other three: on graphs that are captured."""

from __future__ import annotations

import pytest
from depth import first

pytest.importorskip("torch")

from xsp import graph, micromodels, models
from xsp.errors import ModelError

SPOC = ("input_elements", "parameters", "flops", "longest_path")


@pytest.mark.parametrize("family", first(2, micromodels.VARIED_MEASURES))
def test_a_family_varies_one_measure_and_holds_the_others_within_a_percent(family: str) -> None:
    names = [name for name in micromodels.names() if name.rpartition("-")[0] == family]
    result = [graph.of(f"micro:{name}", batch=2).measures() for name in names]
    varied = micromodels.VARIED_MEASURES[family]
    for measure in SPOC:
        figures = [entry[measure] for entry in result]
        if measure == varied:
            assert figures == sorted(set(figures)), "it grows with the number"
            assert figures[-1] > 4 * figures[0]
        else:
            assert max(figures) <= 1.01 * min(figures), measure
    if family == "path":
        assert len({(entry["computing"], entry["bytes"], entry["unique"]) for entry in result}) == 1


def test_their_values_stay_in_scale() -> None:
    """A deep model without norms would end in denormal numbers, which take many times as long."""
    import torch

    for name in ("depth-7", "path-7", "operations-1"):
        made = models.build(f"micro:{name}", models.Settings())
        assert isinstance(made, models.ModelCall)
        with torch.inference_mode():
            spread = float(made.model(*made.args).std())
        assert 1e-6 < spread < 1e3


def test_a_wrong_name_says_which_are_like_it() -> None:
    assert len(models.names("micro")) == len(micromodels.names()) == 32
    with pytest.raises(ModelError, match="did you mean path-3"):
        models.build("micro:pth-3", models.Settings())
    with pytest.raises(ModelError, match="omit --input"):
        models.build("micro:path-3", models.Settings(shape=(3, 8, 8)))
