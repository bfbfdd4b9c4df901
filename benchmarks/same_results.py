"""Does a program compute the same results with every collector on as without xsp, to the last bit?

For each model, inference and training with dropout: digests of outputs, gradients, parameters, buffers and the states
of the random generators (torch, NumPy, Python) after each step, after an exception in the middle of a step, and after
the block are compared with those of a bare run. A model whose bare runs differ from each other is an error.

    python benchmarks/same_results.py                all models, inference and training
    python benchmarks/same_results.py --models torchvision:resnet18
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parts import turns

STEPS = 10
SMALL_SHAPE = (3, 64, 64)
MODELS = (
    "torchvision:resnet18",
    "torchvision:mobilenet_v3_small",
    "torchvision:vgg11",
    "torchvision:squeezenet1_1",
    "timm:vit_tiny_patch16_224",
    "timm:convnext_atto",
    "timm:efficientnet_b0",
    "transformers:bert?num_hidden_layers=2&hidden_size=128&num_attention_heads=2",
    "transformers:GPT2LMHeadModel?n_layer=2&n_embd=128&n_head=2",
    "transformers:llama?num_hidden_layers=2&hidden_size=128&num_attention_heads=2&num_key_value_heads=2&intermediate_size=256",
    "transformers:t5?num_layers=2&d_model=128&num_heads=2&d_kv=64",
)


def digest(value: Any) -> str:
    """Return a digest of tensors and of their containers, which changes with any bit."""
    state = hashlib.blake2b(digest_size=12)
    _feed(state, value)
    return state.hexdigest()


def _feed(state: Any, value: Any) -> None:
    if hasattr(value, "detach"):
        import torch

        plain = value.detach().cpu().contiguous()
        state.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        state.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    elif isinstance(value, Mapping):
        for key in value:
            state.update(str(key).encode())
            _feed(state, value[key])
    elif isinstance(value, (list, tuple)):
        for element in value:
            _feed(state, element)
    elif hasattr(value, "tobytes"):
        state.update(value.tobytes())
    else:
        state.update(repr(value).encode())


def random_states() -> str:
    """Return a digest of the states of the random generators."""
    import numpy
    import torch

    return digest([torch.get_rng_state(), numpy.random.get_state(), random.getstate()])


def run(name: str, train: bool, step_of: Callable[[], Any]) -> dict[str, str]:
    """Run a model's steps, one of which an exception aborts, and return digests of everything that it computes."""
    import numpy
    import torch

    from xsp import models

    random.seed(1)
    numpy.random.seed(1)
    modules: list[Any] = []
    with _captured_modules(modules):
        shape = SMALL_SHAPE if not name.startswith("transformers") and "vit" not in name else None
        workload = models.load(name, models.Settings(batch=2, train=train, sequence=16, seed=1, shape=shape))
    digests: dict[str, str] = {}
    for number in range(STEPS):
        with contextlib.suppress(KeyError), step_of():
            digests[f"output {number}"] = digest(workload.step())
            digests[f"drawn {number}"] = digest([torch.rand(3), numpy.random.rand(3), random.random()])
            if number == STEPS // 2:
                raise KeyError("the program's own")
        digests[f"random states {number}"] = random_states()
    (model,) = modules
    digests["gradients"] = digest([parameter.grad for parameter in model.parameters()])
    digests["parameters and buffers"] = digest(model.state_dict())
    return digests


@contextlib.contextmanager
def _captured_modules(modules: list[Any]) -> Iterator[None]:
    """Append the module that `xsp.models` builds in the block to `modules`."""
    from xsp import models

    original = models.step_of

    def step(built_model: Any, settings: Any) -> Any:
        modules.append(built_model.model)
        return original(built_model, settings)

    models.step_of = step
    try:
        yield
    finally:
        models.step_of = original


def differing_keys(left: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    """Return the names of the digests that differ."""
    return [key for key in {**left, **right} if left.get(key) != right.get(key)]


def differences(name: str, train: bool, out: Path) -> list[str]:
    """Return the names of the digests that differ with every collector on, and in the bare run after that.

    Raises:
        RuntimeError: two bare runs differ, or nothing was recorded.
    """
    import xsp

    bare = run(name, train, contextlib.nullcontext)
    with xsp.profile("same", levels="M/L/G", out=out, warmup=1, settle=False, overwrite=True) as prof:
        profiled = run(name, train, prof.step)
    after = run(name, train, contextlib.nullcontext)
    if not prof.steps_stored:
        raise RuntimeError(f"{name}: nothing was recorded")
    if run(name, train, contextlib.nullcontext) != after:
        raise RuntimeError(f"{name}: two bare runs differ from each other, so profiling cannot be judged")
    return differing_keys(bare, profiled) + [f"after the block: {key}" for key in differing_keys(bare, after)]


SCRIPT = """
import contextlib, json, sys
sys.path.insert(0, {here!r})
import same_results
print(json.dumps(same_results.run({name!r}, True, contextlib.nullcontext)))
"""


def script_output(name: str, folder: Path, mode: str) -> str:
    """Return the output of a training script, `bare` or under `xsp run`: the digests of everything that it computes."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent), name=name))
    launcher = ["-m", "xsp.cli", "run", "-q", "--overwrite", "--out", str(folder / "under")] if mode == "run" else []
    command = [sys.executable, *launcher, str(script)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, save; return 1 if something differs or could not be compared."""
    parser = turns.parser(__doc__)
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="as `xsp profile` names them (default: eleven)")
    options = turns.parse(parser, arguments)
    report = turns.Report("same_results", "What differs from a bare run", ("model", "inference", "training", "xsp run"))
    names = options.models or (MODELS[:1] if options.quick else MODELS)
    with report.until_interrupted():
        for name in names:
            with report.trying(name):
                with tempfile.TemporaryDirectory(prefix="xsp-") as folder:
                    different_names = [differences(name, train, Path(folder) / "run") for train in (False, True)]
                    is_same = script_output(name, Path(folder), "bare") == script_output(name, Path(folder), "run")
                cells = [
                    ", ".join(keys) or "nothing" for keys in (*different_names, [] if is_same else ["what it prints"])
                ]
                turns.say(f"  {name.partition('?')[0]}: {'; '.join(cells)}")
                report.add([name.partition("?")[0], *cells])
    report.finish(options)
    return int(len(report.rows) < len(names) or any(cell != "nothing" for row in report.rows for cell in row[1:]))


if __name__ == "__main__":
    sys.exit(main())
