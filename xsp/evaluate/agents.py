"""Which agents can run a manifest: their facts, the requirements that they do not meet, and the contract of an agent.

An agent is any object with a name, facts, and `submit`, which takes a manifest and returns the path of a result, or
raises an error with the reason. This process is an agent, a subprocess is another; other machines may have more.
"""

from __future__ import annotations

import platform
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Protocol

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from xsp import processes
from xsp.device import machine
from xsp.errors import ManifestError
from xsp.evaluate import hardware as requested
from xsp.evaluate.manifest import Manifest

Progress = Callable[[str, int, int], None]
"""Callback with a description of the current work, the number of requests done, and their total."""

FRAMEWORKS = {
    "pytorch": "torch",
    "torch": "torch",
    "onnxruntime": "onnxruntime",
    "onnx-runtime": "onnxruntime",
    "transformers": "transformers",
    "timm": "timm",
    "torchvision": "torchvision",
}
"""Names of frameworks in manifests, and their packages."""

PACKAGES = ("torch", "torchvision", "timm", "transformers", "onnxruntime", "onnx", "numpy", "pillow")

DEAD_AFTER_S = 30.0


class AgentLost(ManifestError):
    """An agent died or stopped responding while it ran a manifest; it accepts no further manifests."""


class ProcessLost(ManifestError):
    """The process in which an agent ran a manifest was killed; the agent accepts further manifests."""


@dataclass(frozen=True)
class Facts:
    """Properties of an agent, as the agent reports them."""

    name: str
    architecture: str
    cpu: str
    cores: int
    memory_gib: float | None
    gpus: tuple[str, ...]
    host: str
    python: str
    packages: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    beat_s: float | None = None
    """Time of its last sign of life, as `time.time` counts; None for an agent in this process."""

    trusts: bool = True
    """Whether it runs programs and sets variables that a manifest names, and reads files outside its folder."""

    @property
    def is_alive(self) -> bool:
        """Whether its last sign of life is recent."""
        return self.beat_s is None or time.time() - self.beat_s < DEAD_AFTER_S


class Agent(Protocol):
    """Runs manifests, one at a time."""

    def facts(self) -> Facts:
        """Return its facts, with the time of its last sign of life."""
        ...

    def submit(self, manifest: Manifest, folder: Path, options: Options, progress: Progress) -> Path:
        """Run a manifest, and return the directory of the result.

        Args:
            manifest: what to evaluate.
            folder: base of relative paths in the manifest.
            options: settings that are not part of the identity.
            progress: see `Progress`.

        Raises:
            AgentLost: the agent died meanwhile.
            ProcessLost: the agent's process for this manifest was killed.
            ManifestError: it cannot be run, with the reason. After each of these errors there is no result.
        """
        ...

    def check(self, manifest: Manifest, folder: Path, options: Options, progress: Progress) -> list[str] | None:
        """Do everything that precedes the load, without storing anything, as `xsp.evaluate.running.check`.

        Returns:
            Notes on the samples; None if this agent does it only when it runs the manifest.

        Raises:
            ManifestError: it cannot be run, with the reason.
        """
        ...


@dataclass(frozen=True)
class Options:
    """Settings outside the manifest: they affect what is stored, not what is evaluated."""

    store: Path = Path("evaluations")
    levels: str = ""
    """Levels of the trace that is recorded in separate steps, `M/L/G`; no trace if empty."""

    needs_bound: bool = False
    trusted: bool = False
    """Whether code that the manifest names may run, and files outside its folder be read; not for network manifests."""


def local_facts(name: str = "local", labels: Mapping[str, str] | None = None, devices: bool = True) -> Facts:
    """Return the facts of this process.

    Args:
        name: name of the agent.
        labels: properties that no program can look up: rack, interconnect.
        devices: include GPUs, which imports torch if it is installed.
    """
    memory_bytes = processes.total_memory_bytes()
    return Facts(
        name=name,
        architecture=platform.machine(),
        cpu=machine.cpu_model() or "",
        cores=processes.cores(),
        memory_gib=None if memory_bytes is None else memory_bytes / 2**30,
        gpus=requested.accelerators() if devices else (),
        host=socket.gethostname(),
        python=platform.python_version(),
        packages={package: version for package in PACKAGES if (version := machine.version_of(package)) is not None},
        labels=dict(labels or {}),
    )


def unmet_requirements(manifest: Manifest, facts: Facts) -> list[str]:
    """Return the requirements of a manifest that an agent does not meet, each as a sentence; empty if it meets all."""
    trust_reasons = [] if facts.trusts else trust_objections(manifest)
    return [*_unmet_hardware(manifest, facts), *_unmet_software(manifest, facts), *trust_reasons]


def trust_objections(manifest: Manifest) -> list[str]:
    """Return the reasons, as sentences, not to run a manifest whose author is not trusted.

    It could run a program, change how a program runs, or read a file outside its folder.
    """
    model, (kind, _, path) = manifest.model, manifest.dataset.source.partition(":")
    reasons = []
    if model.command or model.parsed_source.is_python:
        reasons.append("model: it names a program, which is not run for untrusted manifests")
    reasons += [
        f"model.{side}: it names code, which is not run for untrusted manifests"
        for side, function in (("preprocess", model.preprocess), ("postprocess", model.postprocess))
        if function
    ]
    if model.endpoint:
        reasons.append("model.endpoint: no server is called for untrusted manifests")
    if manifest.software.environment:
        reasons.append("software.environment: variables are not set for untrusted manifests")
    file = None if model.command else model.parsed_source.file
    files = [("model.source", file)] if file is not None else []
    files += [("dataset.source", path)] if kind == "folder" else []
    return reasons + [f"{name}: {file!r} leads out of the folder" for name, file in files if is_outside_folder(file)]


def is_outside_folder(path: str) -> bool:
    """Return whether a path of a manifest leads out of its folder."""
    pure = PurePath(path)
    return pure.is_absolute() or ".." in pure.parts or path.startswith("~")


def match_agents(manifest: Manifest, agents: Sequence[Agent]) -> tuple[list[Agent], dict[str, list[str]]]:
    """Return the agents that satisfy a manifest, and for each other agent the reasons why it does not."""
    suitable, reasons = [], {}
    for agent in agents:
        facts = agent.facts()
        unmet = unmet_requirements(manifest, facts)
        if not facts.is_alive:
            unmet = [f"it has not responded for {DEAD_AFTER_S:.0f} s", *unmet]
        if unmet:
            reasons[facts.name] = unmet
        else:
            suitable.append(agent)
    return suitable, reasons


def _unmet_hardware(manifest: Manifest, facts: Facts) -> list[str]:
    hardware = manifest.hardware
    unmet = []
    if hardware.architecture and _architecture_name(hardware.architecture) != _architecture_name(facts.architecture):
        unmet.append(f"architecture {hardware.architecture} is required, it is {facts.architecture}")
    if (
        hardware.cpu
        and hardware.cpu.lower() not in ("any", facts.architecture.lower())
        and not requested.matches(hardware.cpu, facts.cpu)
    ):
        unmet.append(f"a processor {hardware.cpu!r} is required, it has {facts.cpu}")
    if hardware.cores is not None and hardware.cores > facts.cores:
        unmet.append(f"{hardware.cores} cores are required, it can use {facts.cores}")
    gpu = hardware.gpu.lower()
    if gpu == "any" and not facts.gpus:
        unmet.append("a GPU is required, it has none")
    elif gpu not in ("", "any", "none") and not any(requested.matches(hardware.gpu, device) for device in facts.gpus):
        unmet.append(f"a GPU {hardware.gpu!r} is required, it has {', '.join(facts.gpus) or 'none'}")
    needed_gib = hardware.memory_gib if hardware.memory_gib is not None else _parse_gib(hardware.memory)
    if needed_gib is not None and (facts.memory_gib is None or needed_gib > facts.memory_gib):
        actual = "its memory is unknown" if facts.memory_gib is None else f"it has {facts.memory_gib:.1f}"
        unmet.append(f"{needed_gib:g} GiB of memory are required, {actual}")
    elif hardware.memory and needed_gib is None:
        unmet.append(f"memory {hardware.memory!r} is required, which is not an amount: write memory_gib: 16")
    if hardware.host and hardware.host != facts.host:
        unmet.append(f"the host {hardware.host} is required, this is another one")
    labels = {**hardware.labels, **({"interconnect": hardware.interconnect} if hardware.interconnect else {})}
    for name, value in labels.items():
        if facts.labels.get(name) != value:
            unmet.append(f"label {name}={value} is required, it has {facts.labels.get(name, 'none')}")
    return unmet


def _unmet_software(manifest: Manifest, facts: Facts) -> list[str]:
    software, framework = manifest.software, manifest.model.framework
    unmet = _unmet_range("python", software.python, facts.python)
    ranges = {_package_name(name): specifier for name, specifier in software.packages.items()}
    if framework is not None:
        package = FRAMEWORKS.get(framework.name.lower())
        if package is None:
            unmet.append(f"the framework {framework.name} has no predictor here; there are pytorch and onnxruntime")
        elif package not in ranges:
            ranges[package] = framework.version
    for package, specifier in ranges.items():
        installed = facts.packages.get(package) or (machine.version_of(package) if facts.beat_s is None else None)
        unmet += [f"{package} is not installed"] if installed is None else _unmet_range(package, specifier, installed)
    if software.container or manifest.model.container:
        container = "a container" if not isinstance(software.container, str) or not software.container else (
            f"the container {software.container}"
        )  # fmt: skip
        unmet.append(f"{container} is required, and no container engine is supported: remove the field to run without")
    if software.threads is not None and software.threads > facts.cores:
        unmet.append(f"{software.threads} threads are required, it can use {facts.cores} cores")
    return unmet


def _unmet_range(package: str, specifier: str, installed: str) -> list[str]:
    if not specifier:
        return []
    try:
        return [] if version_range(specifier).contains(Version(installed), prereleases=True) else [
            f"{package} {specifier} is required, it has {installed}"
        ]  # fmt: skip
    except InvalidVersion:
        return [f"{package}: cannot determine whether {installed} satisfies {specifier}"]
    except ValueError:  # no specifier, or a number of thousands of digits
        return [f"{package}: {specifier[:80]!r} is not a range of versions; write >=2.4,<3 or ^1.2"]


def version_range(specifier: str) -> SpecifierSet:
    """Return a range of versions: a specifier of packaging, a caret or tilde range of semantic versions, or a prefix.

    `1.12` means 1.12 and 1.12.x; `^1.2` means 1.2 up to 2, `^0.1` 0.1 up to 0.2, and `~1.2` 1.2.x.

    Raises:
        InvalidSpecifier: it is not a range of versions.
    """
    parts = []
    for clause in filter(None, re.split(r"[,\s]+(?![\d.])", specifier.strip())):
        compact = clause.replace(" ", "")
        match = re.fullmatch(r"([~^]?)v?(\d+(?:\.\d+)*)", compact)
        if match is None:
            parts.append(compact)
            continue
        sign, numbers = match[1], [int(number) for number in match[2].split(".")]
        if not sign:
            parts.append(f"=={match[2]}.*")
            continue
        if sign == "^":
            bump_index = next((index for index, number in enumerate(numbers) if number), len(numbers) - 1)
        else:
            bump_index = min(1, len(numbers) - 1)
        upper = [*numbers[:bump_index], numbers[bump_index] + 1]
        parts.append(f">={match[2]},<{'.'.join(map(str, upper))}")
    return SpecifierSet(",".join(parts))


def _package_name(name: str) -> str:
    plain = re.sub(r"[-_.]+", "-", name.lower())
    return FRAMEWORKS.get(plain, plain)


def _architecture_name(name: str) -> str:
    return {"amd64": "x86_64", "x86-64": "x86_64", "arm64": "aarch64"}.get(name.lower(), name.lower())


def _parse_gib(text: str) -> float | None:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(g|gb|gib|m|mb|mib|t|tb|tib)?\s*", text.lower())
    if match is None:
        return None
    unit = (match[2] or "g")[0]
    return float(match[1]) * {"m": 1 / 1024, "g": 1.0, "t": 1024.0}[unit]
