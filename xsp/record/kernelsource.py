"""The choice of the collector that records device work, and the reasons for it.

Runtime calls, kernels and copies come through CUPTI, which serves one client in a process at a time. So only one of
the collectors that can record them does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from xsp.collector import Collector, DeviceCollector, Kernels
from xsp.errors import PluginError
from xsp.schema import Level


class KernelSource:
    """The source of a run's device work: chosen before the block is entered, replaced if it gives up."""

    def __init__(self, requested: Kernels = Kernels.KINETO) -> None:
        self.requested = requested
        self.source: DeviceCollector | None = None
        self.reasons: dict[str, str] = {}
        """Why sources that could have been chosen were not, by the source's name."""

        self._successors: list[DeviceCollector] = []

    def choose(self, collectors: Sequence[Collector], absent: Mapping[str, str], deepest: Level) -> list[Collector]:
        """Choose the source, and return the collectors without those that are only a source and were not chosen.

        Args:
            collectors: the collectors that are available.
            absent: why other collectors are not available, by name.
            deepest: deepest level of the run.

        Raises:
            PluginError: a source was requested, the run reaches its levels, and it cannot work here.
        """
        sources = [collector for collector in collectors if isinstance(collector, DeviceCollector)]
        for source in sources:
            source.is_device_source, source.gave_up = False, None
        kinds = {str(kind) for kind in Kernels}
        self.reasons = {name: reason for name, reason in absent.items() if name in kinds}
        by_kind = {collector.device_work: collector for collector in sources}
        if deepest >= Level.LIBRARY:
            candidates = [by_kind[kind] for kind in Kernels if kind in by_kind]
            self._try(
                [collector for collector in candidates if self.requested in (collector.device_work, Kernels.AUTO)]
            )
            if self.requested is Kernels.CUPTI and self.source is None and deepest >= Level.RUNTIME:
                absence = self.reasons.get(Kernels.CUPTI.value, "its collector is not among those that were asked for")
                raise PluginError(f"kernels=cupti: {absence}")
            # successors, if the source gives up later
            self._successors = candidates[candidates.index(self.source) + 1 :] if self.source is not None else []
        return [collector for collector in collectors if not collector.innermost or collector is self.source]

    def replace(self) -> str | None:
        """Switch to another collector if the source gave up, and return a sentence on it, else None."""
        if self.source is None or self.source.gave_up is None:
            return None
        failed, reason = self.source, self.source.gave_up
        failed.is_device_source, failed.gave_up = False, None
        self.source = None
        self.reasons[str(failed.device_work)] = reason
        self._try(self._successors)
        self._successors = (
            self._successors[self._successors.index(self.source) + 1 :] if self.source is not None else []
        )
        outcome = f"comes from {self.source.device_work}" if self.source is not None else "is not recorded"
        return f"{failed.device_work} gave up recording device work, which {outcome} from then on: {reason}"

    def note(self) -> str | None:
        """Return a sentence if device work does not come from the preferred source, else None."""
        if self.source is None or self.source.device_work is Kernels.CUPTI or self.requested is not Kernels.AUTO:
            return None
        reason = self.reasons.get(Kernels.CUPTI.value)
        return f"device work comes from {self.source.device_work}, not from cupti: {reason}" if reason else None

    def content(self) -> dict[str, object]:
        """Return its content for `run.json`: the wanted and actual source, its details, why others were not chosen."""
        kind = self.source.device_work if self.source is not None else None
        content: dict[str, object] = {
            "wanted": str(self.requested),
            "source": str(kind) if kind else None,
            "reasons": self.reasons,
        }
        with contextlib.suppress(Exception):  # third-party code, whose failure must not cost the run.json
            content |= {"details": dict(self.source.details())} if self.source is not None else {}
        return content

    def _try(self, candidates: Sequence[DeviceCollector]) -> None:
        """Make the first candidate that passes its trial the source."""
        for collector in candidates:
            try:
                reason = collector.trial()
            except Exception as error:  # a source whose trial fails cannot work
                reason = f"its trial failed: {type(error).__name__}: {error}"
            if reason is None:
                collector.is_device_source = True
                self.source = collector
                return
            self.reasons[str(collector.device_work)] = reason
