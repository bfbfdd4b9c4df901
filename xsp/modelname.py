"""Names of models, parsed in one place: what a policy judges is what is built.

```
torchvision:resnet50                  a library, and the name of a model
transformers:bert?hidden_size=256     with options, which transformers models take
transformers:./config.json            a configuration file: a name with a slash, or the ending .json
path/to/file.py:build                 a function in a Python file
model.pt2, model.onnx                 a program in a file
```
"""

from __future__ import annotations

from dataclasses import dataclass

LIBRARIES = ("torchvision", "timm", "transformers", "micro")
PROGRAM_ENDINGS = (".pt2", ".onnx")


@dataclass(frozen=True)
class ModelName:
    """A parsed name."""

    source: str
    """A library, a Python file, or the file of a program; else whatever is before the first colon."""

    name: str
    """What follows the source: the model's name in the library, the function in the file; without options."""

    options: tuple[tuple[str, str], ...] = ()
    """Names and values; a value without `=` is empty."""

    @property
    def is_python(self) -> bool:
        """Whether it is a function in a Python file."""
        return self.source.endswith(".py")

    @property
    def is_program(self) -> bool:
        """Whether it is the file of a program."""
        return self.source not in LIBRARIES and self.source.endswith(PROGRAM_ENDINGS)

    @property
    def is_program_in_library(self) -> bool:
        """Whether it names the file of a program as if it were a model of a library: there is none of such a name."""
        return self.source in LIBRARIES and self.name.lower().endswith(PROGRAM_ENDINGS)

    @property
    def file(self) -> str | None:
        """The file that is read to build the model; None if none is."""
        if self.is_python or self.is_program:
            return self.source
        is_configuration = self.name.lower().endswith(".json") or "/" in self.name
        return self.name if self.source == "transformers" and is_configuration else None


def parse(spec: str) -> ModelName:
    """Return the parts of a name. Any text has parts; whether there is such a model is known when it is built."""
    source, _, rest = spec.partition(":")
    if source.endswith(".py"):
        return ModelName(source, rest)
    if source not in LIBRARIES and spec.endswith(PROGRAM_ENDINGS):
        return ModelName(spec, "")
    name, _, query = rest.partition("?")
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    return ModelName(source, name, tuple((option, value) for option, _, value in pairs))
