"""Manifests: what to evaluate, that is, a model, the software, the hardware, the data and the load.

Unknown fields are kept, are part of the identity, and are reported (`unknown_fields`). The identity is the hash of the
canonical form: sorted keys, without values that equal their defaults. So comments, order, spaces and explicit defaults
make no difference, and everything else does.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from xsp import modelname
from xsp.errors import ManifestError
from xsp.plugins import importing

with importing(ManifestError, "manifests need pydantic and PyYAML: pip install 'xsp[evaluate]'"):
    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

FORMAT: Literal[1] = 1

Name = Annotated[str, Field(min_length=1, max_length=200)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Positive = Annotated[float, Field(gt=0, lt=1e12)]
Version = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, (int, float)) else value)]
Numbers = Annotated[
    list[float], BeforeValidator(lambda value: [value] if isinstance(value, (int, float)) else value),
    Field(min_length=1, max_length=64),
]  # fmt: skip


class Part(BaseModel):
    """A section of a manifest."""

    model_config = ConfigDict(extra="allow", frozen=True, str_strip_whitespace=True, allow_inf_nan=False)

    def unknown_fields(self, prefix: str = "") -> Iterator[str]:
        """Yield the paths of fields that no version of the format has."""
        for name in self.model_extra or {}:
            yield f"{prefix}{name}"
        for name in type(self).model_fields:
            value = getattr(self, name)
            for child, location in (
                [(item, f"{name}[{number}]") for number, item in enumerate(value)]
                if isinstance(value, list)
                else [(value, name)]
            ):
                if isinstance(child, Part):
                    yield from child.unknown_fields(f"{prefix}{location}.")

    def plain(self) -> dict[str, Any]:
        """Return the canonical form: plain data without values that equal their defaults, keys sorted, text in NFC."""
        content: dict[str, Any] = _canonical(self.model_dump(mode="json", exclude_defaults=True))
        return content


class Framework(Part):
    """The framework that runs a model."""

    name: Name
    version: Version = ""
    """A version, or a range as in packaging (`>=2.4,<3`) or with a caret (`^1.2`)."""


class Step(Part):
    """One operation before or after the model, written `- resize: {size: 256}` or `- op: resize`."""

    op: Name

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"op": value}
        if isinstance(value, dict) and "op" not in value and len(value) == 1:
            op, argument = next(iter(value.items()))
            return {
                "op": op,
                **(argument if isinstance(argument, dict) else {} if argument is None else {"value": argument}),
            }
        return value

    @property
    def options(self) -> dict[str, Any]:
        """Options of the operation."""
        return dict(self.model_extra or {})


class Function(Part):
    """A user function, `f(context, data)`, which runs in a separate process."""

    function: Name
    """`path/to/file.py:name`."""

    seconds: Positive = 10.0
    """Time limit of a call, in seconds."""


class Tensor(Part):
    """An input or an output of a model."""

    type: str = ""
    """`image`, `tokens`, `tensor`; of outputs `classification`, `probability`, `boxes`, `tensor`."""

    description: str = ""
    layer: str = ""
    element_type: str = ""
    shape: list[int] = []
    """Shape of one sample."""

    steps: list[Step] = []
    parameters: dict[str, Any] = {}
    """Other fields of a published manifest."""


class File(Part):
    """A file of a model: weights, graph."""

    path: Name
    checksum: str = ""
    """`sha256:…` or `md5:…`; without an algorithm it follows from the length."""

    role: str = ""
    """`graph` or `weights`, if a model consists of two files."""


class Model(Part):
    """The model to evaluate."""

    name: Name
    id: str = ""
    version: Version = ""
    description: str = ""
    task: str = ""
    source: str = ""
    """`torchvision:resnet18`, `timm:…`, `transformers:…`, `micro:…`, `file.pt2`, `file.onnx`, `file.py:build`."""

    @property
    def parsed_source(self) -> modelname.ModelName:
        """The parts of the source."""
        return modelname.parse(self.source)

    command: list[str] = []
    """A program that speaks JSON lines, instead of a source."""

    endpoint: str = ""
    """Address of a server with OpenAI's completions (`http://127.0.0.1:8000/v1`), instead of a source. It knows the
    model by `name`."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the weights."""

    sequence: Count = 128
    precision: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    job: Literal["inference", "training"] = "inference"
    share: bool = False
    """Attach to weights in the store of this machine (`xsp share serve`), one copy for all processes."""

    framework: Framework | None = None
    container: dict[str, Any] = {}
    """Image by processor architecture and `cpu` or `gpu`."""

    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    preprocess: Function | str | None = None
    postprocess: Function | str | None = None
    """Text is code of a published manifest, which is kept and never executed."""

    base_url: str = ""
    files: list[File] = []
    is_archive: bool = False
    license: str = ""
    author: str = ""
    references: list[str] = []
    attributes: dict[str, Any] = {}
    hidden: bool = False

    @model_validator(mode="after")
    def _check_exclusive_fields(self) -> Model:
        given = [name for name in ("source", "command", "endpoint") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: give one of them")
        if self.share and (self.command or self.parsed_source.is_program or self.parsed_source.is_python):
            raise ValueError("share is only for models by name (torchvision:…, timm:…, transformers:…, micro:…)")
        if self.share and self.job == "training":
            raise ValueError("share and training exclude each other: shared weights cannot be written")
        for name, function, tensors in (
            ("preprocess", self.preprocess, self.inputs),
            ("postprocess", self.postprocess, self.outputs),
        ):
            if function and any(tensor.steps for tensor in tensors):
                raise ValueError(f"{name} and built-in steps exclude each other")
        return self


class Software(Part):
    """The software that must be installed."""

    name: str = ""
    id: str = ""
    version: Version = ""
    python: Version = ""
    packages: dict[str, Version] = {}
    """Ranges of versions by package: `torch: ">=2.4,<3"`."""

    threads: Count | None = None
    environment: dict[str, Version] = {}
    container: str | dict[str, Any] = ""


class Hardware(Part):
    """The hardware that the machine must have."""

    name: str = ""
    id: str = ""
    architecture: str = ""
    cpu: str = ""
    """Part of the processor's name."""

    cores: Count | None = None
    gpu: str = ""
    """Part of a device's name; `none`, or `any`."""

    memory_gib: Positive | None = None
    memory: str = ""
    interconnect: str = ""
    host: str = ""
    labels: dict[str, Version] = {}
    setup: str = ""
    """A script of DLSpec, which is kept and never executed."""


class Dataset(Part):
    """The input data."""

    name: str = "synthetic"
    id: str = ""
    version: Version = ""
    source: str = "synthetic"
    """`synthetic` (the inputs of the model), `synthetic:images`, `synthetic:classes` (images with labels),
    `synthetic:text`, or `folder:path`."""

    sources: list[str] = []
    seed: Annotated[int, Field(ge=0)] = 0
    samples: Count = 64
    classes: Count = 8
    """Number of classes of `synthetic:classes`."""

    height: Count = 256
    width: Count = 320
    mean: Numbers = [0.5]
    std: Numbers = [0.25]
    license: str = ""
    checksum: str = ""


MOST_TOKENS = 1_000_000
"""Default of the longest prompt or output."""


class Lengths(Part):
    """A distribution of numbers of tokens: `64`, `[12, 80, 33]` to draw from a list, or its parameters by name."""

    distribution: Literal["fixed", "uniform", "normal", "lognormal", "values"] = "fixed"
    mean: Positive | None = None
    """Of a fixed length, and of normal and lognormal distributions before they are limited to `least` and `most`."""

    std: Annotated[float, Field(ge=0, lt=1e12)] = 0.0
    least: Count = 1
    most: Count = MOST_TOKENS
    values: Annotated[list[Count], Field(max_length=100_000)] = []

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {"mean": value}
        if isinstance(value, list):
            return {"distribution": "values", "values": value}
        return value

    @model_validator(mode="after")
    def _check_parameters(self) -> Lengths:
        if self.distribution in ("fixed", "normal", "lognormal") and self.mean is None:
            raise ValueError(f"a {self.distribution} length needs mean, in tokens")
        if self.distribution == "uniform" and self.most == MOST_TOKENS:
            raise ValueError("a uniform length needs most, and least if that is not 1")
        if self.distribution == "values" and not self.values:
            raise ValueError("lengths from a list need values")
        if self.least > self.most:
            raise ValueError(f"least, {self.least:,}, is above most, {self.most:,}")
        return self


class Generation(Part):
    """Text that a language model generates for each request; end-of-text tokens do not end it."""

    prompt: Lengths
    """Tokens of a request's prompt."""

    output: Lengths
    """Tokens that a request generates."""

    vocabulary: Count = 1000
    """The numbers of a prompt's tokens are drawn from 0 to this, exclusive."""

    slots: Annotated[int, Field(ge=1, le=4096)] = 8
    """Most requests that the model continues together; not used for an endpoint, whose server decides."""

    ttft_ms: Positive | None = None
    """Limit of goodput on the time to the first token; `latency_ms` is its limit on the whole request."""

    tpot_ms: Positive | None = None
    """Limit of goodput on a request's mean time per token after the first."""


GENERATION_KINDS = ("online", "concurrent", "offline", "poisson", "constant", "burst", "replay")
"""Loads in which requests can generate text."""


class Scenario(Part):
    """The load."""

    kind: Literal[
        "online", "batched", "offline", "poisson", "constant", "replay", "max-rate", "multi-stream", "server",
        "cold-start", "burst", "concurrent",
    ] = "online"  # fmt: skip
    seed: Annotated[int, Field(ge=0)] = 0
    requests: Count = 50
    warmup: Annotated[int, Field(ge=0, le=100_000)] = 3
    """Number of requests before the first that counts."""

    batch: Count = 1
    batches: Annotated[list[Count], Field(max_length=32)] = []
    """Batch sizes of a batched scenario, one after the other."""

    rate: Positive | None = None
    """Requests per second."""

    times_s: Annotated[list[Annotated[float, Field(ge=0)]], Field(max_length=100_000)] = []
    """Times at which the requests of a replay are due, in seconds after the first."""

    streams: Count = 1
    """Inputs per request of multi-stream; users of a concurrent load, each of whom sends the next request when the one
    before has ended."""

    together: Count = 1
    """Number of requests that arrive together in a burst."""

    latency_ms: Positive | None = None
    """Limit of the percentile, in a search for the highest rate and in LoadGen's server scenario; limit of goodput on
    the whole request if the requests generate text."""

    percentile: Annotated[float, Field(gt=0, lt=100)] = 99.0
    driver: Literal["xsp", "loadgen"] = "xsp"
    """What issues the requests: xsp, or MLPerf's LoadGen."""

    generation: Generation | None = None
    """Prompts and output lengths, if the requests generate text."""

    @model_validator(mode="after")
    def _check_kind(self) -> Scenario:
        if self.driver == "loadgen":
            if self.kind not in ("online", "multi-stream", "server", "offline"):
                raise ValueError(f"MLPerf's LoadGen has online, multi-stream, server and offline, but not {self.kind}")
            if self.kind == "server" and self.latency_ms is None:
                raise ValueError("LoadGen's server scenario needs latency_ms, the limit of its percentile")
            if self.sizes != (1,):
                raise ValueError("LoadGen's requests have one input; those of multi-stream have one per stream")
        if self.kind in ("poisson", "constant", "server", "burst") and self.rate is None:
            raise ValueError(f"a scenario {self.kind} needs a rate, in requests per second")
        if self.kind == "replay" and not self.times_s:
            raise ValueError("a replay needs times_s, the time at which each request is due")
        if self.kind == "max-rate" and self.latency_ms is None:
            raise ValueError("a search for the maximum rate needs latency_ms, the limit")
        if self.together > 1 and self.kind != "burst":
            raise ValueError("together is only for a burst; in other scenarios requests arrive one by one")
        if self.batches and self.kind not in ("batched", "offline"):
            raise ValueError("batches is only for batched and offline scenarios; others have one batch size")
        if self.kind == "concurrent" and self.generation is None:
            raise ValueError("a concurrent load needs generation: other models serve one request at a time")
        if self.generation is not None:
            if self.kind not in GENERATION_KINDS:
                raise ValueError(f"generation has the loads {', '.join(GENERATION_KINDS)}, but not {self.kind}")
            if self.driver == "loadgen":
                raise ValueError("MLPerf's LoadGen does not time tokens; omit driver, or generation")
            if self.sizes != (1,):
                raise ValueError("a request with generation has one prompt: omit batch and batches")
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes, in their order."""
        return tuple(dict.fromkeys(self.batches)) or (self.batch,)


class Reference(Part):
    """DLSpec's log of an earlier evaluation, to compare with."""

    ids: dict[str, Version] = {}
    results: dict[str, Any] = {}
    outputs: Any = None
    hyperparameters: dict[str, Any] = {}
    remarks: str = ""


class Manifest(Part):
    """An evaluation."""

    format: Literal[1] = FORMAT
    name: str = ""
    description: str = ""
    model: Model
    software: Software = Software()
    hardware: Hardware = Hardware()
    dataset: Dataset = Dataset()
    scenario: Scenario = Scenario()
    reference: Reference | None = None

    def plain(self) -> dict[str, Any]:
        """Return the canonical form, with its version."""
        return {"format": self.format, **super().plain()}

    @property
    def identity(self) -> str:
        """SHA-256 of the canonical form, 64 hexadecimal digits."""
        text = json.dumps(self.plain(), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def title(self) -> str:
        """The manifest's name, or the model's name with the scenario."""
        return self.name or f"{self.model.name}-{self.scenario.kind}"


def schema() -> dict[str, Any]:
    """Return the JSON Schema of manifests."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Manifest.model_json_schema()}


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        items = {unicodedata.normalize("NFC", str(name)): child for name, child in value.items()}
        return {name: _canonical(items[name]) for name in sorted(items)}
    if isinstance(value, list):
        return [_canonical(child) for child in value]
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value
