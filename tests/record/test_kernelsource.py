"""One source of device work: which one, and why, on collectors that say of themselves what they can."""

from __future__ import annotations

import pytest

from xsp.collector import DeviceCollector, Kernels
from xsp.errors import PluginError
from xsp.record.kernelsource import KernelSource
from xsp.schema import Level


def collector(source: Kernels, refuses: str | None = None) -> DeviceCollector:
    made = DeviceCollector()
    made.name, made.device_work = str(source), source  # type: ignore[misc]
    made.innermost = source is Kernels.CUPTI  # type: ignore[misc]
    made.trial = lambda: refuses  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    ("wanted", "refuses", "deepest", "source", "left"),
    [
        ("auto", None, Level.KERNEL, "cupti", ["cupti", "kineto"]),
        ("auto", "it is taken", Level.KERNEL, "kineto", ["kineto"]),
        ("kineto", None, Level.KERNEL, "kineto", ["kineto"]),
        ("cupti", None, Level.KERNEL, "cupti", ["cupti", "kineto"]),
        ("auto", None, Level.OP, None, ["kineto"]),
        ("cupti", "it is taken", Level.OP, None, ["kineto"]),
    ],
)
def test_the_first_that_is_wanted_and_passes_its_trial_is_the_source(wanted, refuses, deepest, source, left):
    work = KernelSource(Kernels.parse(wanted))
    found = [collector(Kernels.CUPTI, refuses), collector(Kernels.KINETO)]
    assert [each.name for each in work.choose(found, {}, deepest)] == left
    assert work.content()["source"] == source
    assert [each.name for each in found if each.is_device_source] == ([source] if source else [])


def test_a_wish_that_cannot_be_met_is_an_error_with_the_reason():
    with pytest.raises(PluginError, match="kernels=cupti: it is taken"):
        KernelSource(Kernels.CUPTI).choose([collector(Kernels.CUPTI, "it is taken")], {}, Level.KERNEL)
    with pytest.raises(PluginError, match="kernels=cupti: no driver"):
        KernelSource(Kernels.CUPTI).choose([collector(Kernels.KINETO)], {"cupti": "no driver"}, Level.RUNTIME)


def test_why_it_is_not_cupti_is_a_note_only_where_there_is_device_work():
    work = KernelSource(Kernels.AUTO)
    work.choose([collector(Kernels.KINETO)], {"cupti": "no binding"}, Level.KERNEL)
    assert work.note() == "device work comes from kineto, not from cupti: no binding"
    work = KernelSource(Kernels.AUTO)
    work.choose([collector(Kernels.KINETO, "no device")], {"cupti": "no driver"}, Level.KERNEL)
    assert work.note() is None
    assert work.content() == {
        "wanted": "auto", "source": None, "reasons": {"cupti": "no driver", "kineto": "no device"},
    }  # fmt: skip


def test_a_source_that_gives_up_has_a_successor():
    work = KernelSource(Kernels.AUTO)
    first, second = collector(Kernels.CUPTI), collector(Kernels.KINETO)
    work.choose([first, second], {}, Level.KERNEL)
    assert work.replace() is None
    first.gave_up = "the driver said no"
    said = "cupti gave up recording device work, which comes from kineto from then on: the driver said no"
    assert work.replace() == said
    assert (first.is_device_source, second.is_device_source) == (False, True)
    second.gave_up = "so did it"
    assert work.replace() == "kineto gave up recording device work, which is not recorded from then on: so did it"
