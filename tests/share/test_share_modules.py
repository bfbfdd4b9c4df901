"""Shared weights in modules: the same outputs, and no way to write them."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from depth import deep
from sharing import StoreProcess, running_store

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import save_file  # noqa: E402

import xsp  # noqa: E402
from xsp import models, share  # noqa: E402
from xsp.errors import ShareError  # noqa: E402
from xsp.share.modules import SharedParameter, is_shared  # noqa: E402


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with running_store(tmp_path_factory.mktemp("m") / "s") as found:
        yield found


class Small(torch.nn.Module):
    """Convolution, running statistics, tied and plain weights, a buffer that no file has."""

    def __init__(self, kind: Any = torch.float32) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 5, 3)
        self.norm = torch.nn.BatchNorm2d(5)
        self.embed = torch.nn.Embedding(7, 5, dtype=kind)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(7.0), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.first(x)).mean((2, 3))) * self.scale


def small(seed: int = 1) -> Small:
    torch.manual_seed(seed)
    return Small().eval()


def written(folder: Path, state: dict[str, Any], name: str = "m.safetensors") -> Path:
    save_file({key: value.clone() for key, value in state.items()}, folder / name)
    return folder / name


@pytest.mark.parametrize("way", ["empty", "with values"])
def test_a_small_module_is_the_same_to_the_last_bit(there: StoreProcess, tmp_path: Path, way: str) -> None:
    module, x = small(), torch.randn(2, 3, 8, 8)
    path = written(tmp_path, module.state_dict())
    if way == "empty":
        with share.empty():
            other = Small()
        assert all(each.is_meta for each in other.parameters())
    else:
        other = small(2)
    found = share.attach(other, path, folder=there.folder)
    assert torch.equal(other(x), module(x))
    assert not other.training
    assert other.head.weight is other.embed.weight
    assert found.shared == 5  # two of the convolution, two of the normalisation, one that is tied
    assert sorted(found.private) == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    assert all(is_shared(each) for each in other.parameters())
    assert not any(is_shared(each) for each in other.buffers())
    for name, value in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_building_without_values_is_for_the_thread_that_asks_and_ends_with_the_last_one() -> None:
    before = torch.nn.Module.register_parameter
    entered, left = threading.Barrier(3, timeout=60), threading.Barrier(3, timeout=60)
    found: dict[int, list[bool]] = {}

    def build(number: int) -> None:
        with share.empty() if number else contextlib.nullcontext():
            entered.wait()
            first = torch.nn.Linear(2, 2).weight.is_meta
            if number == 2:
                with share.empty():
                    left.wait()
            else:
                left.wait()
            second = torch.nn.Linear(2, 2).weight.is_meta
        found[number] = [first, second, torch.nn.Linear(2, 2).weight.is_meta]

    threads = [threading.Thread(target=build, args=(number,)) for number in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == {0: [False] * 3, 1: [True, True, False], 2: [True, True, False]}
    assert torch.nn.Module.register_parameter is before


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        "torchvision:mobilenet_v3_small",
        deep("torchvision:shufflenet_v2_x0_5"),
        deep("timm:vit_tiny_patch16_224"),
        "transformers:gpt2?n_layer=2&n_embd=64&n_head=2",
        deep("transformers:bert?num_hidden_layers=2&hidden_size=64&num_attention_heads=2"),
        deep("transformers:t5?num_layers=2&d_model=64"),
    ],
)
def test_real_models_are_the_same_to_the_last_bit(there: StoreProcess, tmp_path: Path, spec: str) -> None:
    pytest.importorskip(spec.partition(":")[0])
    settings = models.Settings(sequence=16)
    built = models.build(spec, settings)
    assert isinstance(built, models.ModelCall)
    built.model.eval()
    path = written(tmp_path, built.model.state_dict())
    with share.empty():
        other = models.build(spec, settings)
    assert isinstance(other, models.ModelCall)
    share.attach(other.model, path, folder=there.folder)
    with torch.inference_mode():
        expected, found = built(), other.model(*built.args, **built.kwargs)
    assert [torch.equal(*each) for each in zip(tensors(expected), tensors(found), strict=True)].count(False) == 0


def tensors(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [each for inner in value for each in tensors(inner)] if isinstance(value, (list, tuple)) else []


class Odd(torch.nn.Module):
    """Parameters of one type: a matrix, a number, and one without elements."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(3, 5).to(kind), requires_grad=False)
        self.b = torch.nn.Parameter(torch.ones(()).to(kind), requires_grad=False)
        self.c = torch.nn.Parameter(torch.ones(0, 4).to(kind), requires_grad=False)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_other_types_and_shapes_of_nothing(there: StoreProcess, tmp_path: Path, kind: Any) -> None:
    module = Odd(kind)
    path = written(tmp_path, module.state_dict())
    other = Odd(kind)
    share.attach(other, path, folder=there.folder)
    for name, each in other.named_parameters():
        assert torch.equal(each, getattr(module, name))


@pytest.mark.slow
def test_the_attachment_ends_with_the_last_parameter(there: StoreProcess, tmp_path: Path) -> None:
    module = small()
    path = written(tmp_path, module.state_dict())
    other = small(2)
    before = len(os.listdir("/proc/self/fd"))
    there.wait_for([])
    share.attach(other, path, folder=there.folder)
    there.wait_for([os.getpid()])
    assert len(os.listdir("/proc/self/fd")) == before + 1
    weight = other.head.weight
    del other
    gc.collect()
    there.wait_for([os.getpid()])
    assert torch.equal(weight, module.head.weight)
    del weight
    gc.collect()
    there.wait_for([])
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.pop("first.bias"), "the file lacks first.bias"),
        deep(lambda state: state.pop("norm.running_mean"), "the file lacks norm.running_mean"),
        deep(lambda state: (state.pop("head.weight"), state.pop("embed.weight")), "lacks embed.weight, head.weight"),
        (lambda state: state.update(more=torch.ones(1)), "no place for more; pass strict=False"),
        (lambda state: state.update({"first.bias": torch.ones(6)}), r"first.bias is \[6\] in the file and \[5\]"),
        deep(lambda state: state.update({"first.bias": torch.ones(5).half()}), "float16 in the file and float32"),
        (lambda state: state.update({"head.weight": torch.ones(7, 5)}), "tied, but differ"),
        deep(lambda state: state.update({"norm.running_var": torch.ones(1)}), r"running_var is \[1\]"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    there: StoreProcess, tmp_path: Path, change: Any, says: str
) -> None:
    state = small().state_dict()
    change(state)
    path = written(tmp_path, state)
    other = Small()
    before = {name: (id(each), each.clone()) for name, each in other.state_dict(keep_vars=True).items()}
    with pytest.raises(ShareError, match=says):
        share.attach(other, path, folder=there.folder)
    assert other.training
    for name, each in other.state_dict(keep_vars=True).items():
        assert (id(each), bool(torch.equal(each, before[name][1]))) == (before[name][0], True)
    gc.collect()
    there.wait_for([])


def test_a_file_of_which_ties_name_one_is_enough(there: StoreProcess, tmp_path: Path) -> None:
    module, x = small(), torch.randn(2, 3, 8, 8)
    state = module.state_dict()
    del state["head.weight"]
    other = small(2)
    share.attach(other, written(tmp_path, state), folder=there.folder)
    assert torch.equal(other(x), module(x))


def test_another_type_is_a_copy_if_that_is_asked_for(there: StoreProcess, tmp_path: Path) -> None:
    state = small().state_dict()
    state["first.bias"] = state["first.bias"].half()
    state["more"] = torch.ones(1)
    other = small(2)
    found = share.attach(other, written(tmp_path, state), strict=False, cast=True, folder=there.folder)
    assert found.private["first.bias"] == "float16 in the file, float32 here"
    assert found.unused == ("more",)
    assert not is_shared(other.first.bias)
    assert torch.equal(other.first.bias, state["first.bias"].float())


def test_modules_that_cannot_be_shared_say_why(there: StoreProcess, tmp_path: Path) -> None:
    path = written(tmp_path, small().state_dict())
    with torch.device("meta"):
        meta = Small()
    with pytest.raises(ShareError, match=r"no file has the buffers scale.*share\.empty"):
        share.attach(meta, path, folder=there.folder)
    with pytest.raises(ShareError, match="lazy module"):
        share.attach(torch.nn.LazyLinear(3), path, folder=there.folder)


def test_training_and_writing_are_refused_until_it_is_detached(there: StoreProcess, tmp_path: Path) -> None:
    module, x = small(), torch.randn(2, 3, 8, 8)
    other = small(2)
    share.attach(other, written(tmp_path, module.state_dict()), folder=there.folder)
    for tries in (
        lambda: other.train(),
        lambda: other.requires_grad_(True),
        lambda: setattr(other.first.weight, "requires_grad", True),
        lambda: other.first.weight.add_(1),
        lambda: other.first.weight.zero_(),
        lambda: other.first.weight.__setitem__(0, 1),
        lambda: other.first.weight.__imul__(2),
        lambda: torch.nn.init.kaiming_uniform_(other.first.weight),
        lambda: other.load_state_dict(module.state_dict()),
    ):
        with pytest.raises(RuntimeError, match=r"shared by several processes.*detach\(module\)"):
            tries()
    other.eval()
    assert torch.equal(other(x), module(x))
    assert share.detach(other) == sum(each.nbytes for each in other.parameters())
    other.train()
    other(x).sum().backward()
    assert all(each.grad is not None for each in other.parameters())
    torch.optim.SGD(other.parameters(), 0.1).step()
    assert other.head.weight is other.embed.weight
    gc.collect()
    there.wait_for([])


def test_a_state_dict_has_weights_that_refuse_to_be_written_and_trained(there: StoreProcess, tmp_path: Path) -> None:
    module, x = small(), torch.randn(2, 3, 8, 8)
    shared, other = small(2), small(3)
    share.attach(shared, written(tmp_path, module.state_dict()), folder=there.folder)
    state = shared.state_dict()
    for tries in (
        lambda: state["first.weight"].zero_(),
        lambda: shared.first.state_dict()["bias"].add_(1),
        lambda: other.load_state_dict(state, assign=True),  # its parameters are to be trained
    ):
        with pytest.raises(RuntimeError, match="shared by several processes"):
            tries()
    frozen = small(4).requires_grad_(False)
    frozen.load_state_dict(state, assign=True)
    assert is_shared(frozen.first.weight)
    with pytest.raises(RuntimeError, match="shared by several processes"):
        frozen.first.weight.zero_()
    saved = io.BytesIO()
    torch.save(state, saved)
    another = small(5)
    another.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    another.train()
    for each in (shared, frozen, another.eval(), copy.deepcopy(shared)):
        assert torch.equal(each(x), module(x))
    share.detach(shared)
    assert not any(isinstance(each, SharedParameter) for each in shared.state_dict().values())


def test_copies_and_conversions_are_this_process_own(there: StoreProcess, tmp_path: Path) -> None:
    module, x = small(), torch.randn(2, 3, 8, 8)
    other = small(2)
    share.attach(other, written(tmp_path, module.state_dict()), folder=there.folder)
    copied = copy.deepcopy(other)
    assert copied.head.weight is copied.embed.weight
    assert not any(isinstance(each, SharedParameter) for each in copied.parameters())
    copied.train()
    copied.first.weight.add_(1)
    assert torch.equal(other(x), module(x))
    saved = io.BytesIO()
    torch.save(other, saved)
    read = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
    assert torch.equal(read(x), module(x))
    read.train()
    other.double()
    other.train()
    other.first.weight.add_(1)


def test_statistics_in_training_stay_private(there: StoreProcess, tmp_path: Path) -> None:
    path = written(tmp_path, small().state_dict())
    first, second = small(2), small(3)
    for each in (first, second):
        share.attach(each, path, folder=there.folder)
    first.norm.train()
    first(torch.randn(4, 3, 8, 8))
    assert not torch.equal(first.norm.running_mean, second.norm.running_mean)
    assert torch.equal(second.norm.running_mean, small().norm.running_mean)


_WRITER = """
import sys, ctypes, torch
from pathlib import Path
from xsp import share
module = torch.nn.Linear(64, 64)
share.attach(module, sys.argv[1], folder=Path(sys.argv[2]))
print("attached", flush=True)
if sys.argv[3] == "numpy":
    module.weight.detach().numpy()[0] = 1
elif sys.argv[3] == "operator":
    torch._foreach_add_([module.weight.detach()], 1.0)
elif sys.argv[3] == "optimizer":
    module.weight.grad = torch.ones(64, 64)
    torch.optim.SGD(module.parameters(), 1.0, foreach=True).step()
else:
    libc = ctypes.CDLL(None)
    page = module.weight.data_ptr() // 4096 * 4096
    failed = libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(4096), 3)
    print(failed, flush=True)
    ctypes.memset(module.weight.data_ptr(), 1, 1)
print("wrote", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["numpy", deep("operator"), deep("optimizer"), "mprotect"])
def test_who_writes_past_python_is_stopped_alone(there: StoreProcess, tmp_path: Path, way: str) -> None:
    torch.manual_seed(0)
    module, x = torch.nn.Linear(64, 64), torch.randn(3, 64)
    path = written(tmp_path, module.state_dict())
    mine = torch.nn.Linear(64, 64)
    share.attach(mine, path, folder=there.folder)
    done = subprocess.run(
        [sys.executable, "-c", _WRITER, str(path), str(there.folder), way], capture_output=True, text=True, timeout=120
    )
    assert "attached" in done.stdout
    assert "wrote" not in done.stdout
    assert done.returncode in (-signal.SIGSEGV, 1), done.stderr
    assert done.returncode != 1 or "shared by several processes" in done.stderr
    assert torch.equal(mine(x), module(x))
    there.wait_for([os.getpid()])


def test_a_state_dict_is_brought_without_a_file(there: StoreProcess, tmp_path: Path) -> None:
    module, x = small(), torch.randn(2, 3, 8, 8)
    key = share.put(module.state_dict(), folder=there.folder)
    other = small(2)
    assert share.attach(other, key, folder=there.folder).key == key
    assert torch.equal(other(x), module(x))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: 3, "w is int, not a tensor"),
        (lambda: None, "w is NoneType, not a tensor"),
        (lambda: torch.ones(2, device="meta"), "w has no values"),
        (lambda: torch.eye(2).to_sparse(), r"w is float32, torch\.sparse_coo; only dense"),
        (lambda: torch.eye(2).to_mkldnn(), r"w is float32, torch\._mkldnn"),
        (lambda: torch.ones(2, dtype=torch.complex128), "w is complex128"),
        (lambda: torch.ones(2).to(torch.float8_e4m3fnuz), "w is float8_e4m3fnuz"),
    ],
)
def test_what_no_file_of_weights_can_hold_is_refused_by_name(there: StoreProcess, value: Any, says: str) -> None:
    with pytest.raises(ShareError, match=f"the state dict cannot be shared: {says}"):
        share.put({"w": value()}, folder=there.folder)


def test_weights_that_cannot_be_written_are_refused_without_a_message_too(
    there: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensors: object) -> None:
        raise RuntimeError

    monkeypatch.setattr("safetensors.torch.save", fail)
    with pytest.raises(ShareError, match="the state dict cannot be shared: RuntimeError"):
        share.put({"w": torch.ones(2)}, folder=there.folder)


def test_a_cold_start_is_in_the_trace(there: StoreProcess, tmp_path: Path) -> None:
    path = written(tmp_path, small(77).state_dict())
    with xsp.profile("cold", levels="M/L", warmup=0, settle=0, samples=False, out=tmp_path / "run") as prof:
        for _ in range(2):
            with prof.step():
                with share.empty():
                    module = Small()
                share.attach(module, path, folder=there.folder)
                module(torch.randn(2, 3, 8, 8))
    con = xsp.load(tmp_path / "run").spans
    rows = con.filter("name LIKE 'share.%'").order("start_ns").fetchall()
    column = {name: at for at, name in enumerate(con.columns)}
    names = [row[column["name"]] for row in rows]
    assert [each for each in names if each in ("share.miss", "share.hit")] == ["share.miss", "share.hit"]
    by_id = {row[column["span_id"]]: row[column["name"]] for row in rows}
    parents = {row[column["name"]]: by_id.get(row[column["parent_id"]]) for row in rows}
    assert parents["share.copy"] == "share.miss"
    assert {parents[name] for name in ("share.miss", "share.map", "share.assign")} == {"share.attach"}
    assert {"first", "head"} <= {name for (name,) in con.filter("level = 30").project("name").fetchall()}


@pytest.mark.slow
def test_an_eviction_is_in_the_trace_with_the_layers(tmp_path: Path) -> None:
    paths = [written(tmp_path, small(seed).state_dict(), f"{seed}.safetensors") for seed in (1, 2)]
    with (
        running_store(tmp_path / "s", "10KiB") as there,  # room for one of them
        xsp.profile("full", levels="M/L", warmup=0, settle=0, samples=False, out=tmp_path / "run") as prof,
    ):
        for path in paths:
            with prof.step():
                module = small()
                share.attach(module, path, folder=there.folder)
                module(torch.randn(2, 3, 8, 8))
            share.detach(module)
            gc.collect()
            there.wait_for([])
    wanted = "span_id, parent_id, name, step, start_ns, start_ns + dur_ns"
    rows = xsp.load(tmp_path / "run").spans.project(wanted).fetchall()
    names = {identity: name for identity, _, name, *_ in rows}
    evicted = [row for row in rows if row[2].startswith("share.evict")]
    assert [row[2] for row in evicted] == ["share.evict 1"]
    _, parent, _, step, start_ns, end_ns = evicted[0]
    assert names[parent] == "share.miss"
    (miss,) = [row for row in rows if row[0] == parent]
    assert miss[4] <= start_ns <= end_ns <= miss[5]
    of_step = {name for _, _, name, at, _, _ in rows if at == step}
    assert {"share.attach", "share.copy", "share.map", "share.assign", "first", "head"} <= of_step


# --- shards -----------------------------------------------------------------------------------------------------------


def in_shards(folder: Path, weights: dict[str, Any], count: int = 3) -> Path:
    """Write a checkpoint as transformers does: shards, and an index of which tensor is in which."""
    folder.mkdir()
    names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    of = {name: names[place % count] for place, name in enumerate(weights)}
    for name in names:
        save_file({each: weights[each].contiguous() for each in weights if of[each] == name}, folder / name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": of}), encoding="utf-8")
    return index


def test_a_checkpoint_in_shards_is_attached_by_its_index_its_folder_or_its_keys(
    there: StoreProcess, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4)).eval()
    index = in_shards(tmp_path / "c", plain.state_dict())
    given = torch.randn(5, 8)
    key = ""
    for source in (index, index.parent, str(index), None):
        module = copy.deepcopy(plain)
        for each in module.parameters():
            each.data.zero_()
        found = share.attach(module, source if source is not None else key, folder=there.folder)
        key = found.key
        assert torch.equal(module(given), plain(given))
        assert found.shared == 6
        assert found.key.count("sha256:") == 3
    assert found.hit


@pytest.mark.parametrize(("text", "reason"), [
    ("{", "not an index of safetensors files"),
    ("[]", "not an index of safetensors files"),
    ('{"weight_map": {}}', "names no file"),
    ('{"weight_map": {"a": "../a.safetensors"}}', "is not the name of a file beside it"),
    ('{"weight_map": {"a": 3}}', "is not the name of a file beside it"),
    ('{"weight_map": {"a": "gone.safetensors"}}', "there is no gone.safetensors beside it"),
    ('{"weight_map": {"0.weight": "a.safetensors", "1.weight": "b.safetensors"}}', "more than one shard has 0.weight"),
])  # fmt: skip
def test_a_damaged_index_is_one_error(text: str, reason: str, there: StoreProcess, tmp_path: Path) -> None:
    for name in "ab":
        save_file({"0.weight": torch.ones(2, 2)}, tmp_path / f"{name}.safetensors")
        os.utime(tmp_path / f"{name}.safetensors", ns=(1, 1))
    (tmp_path / "m.index.json").write_text(text, encoding="utf-8")
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    before = module[0].weight.detach().clone()
    with pytest.raises(ShareError, match=reason):
        share.attach(module, tmp_path / "m.index.json", folder=there.folder)
    assert torch.equal(module[0].weight, before)
    with pytest.raises(ShareError, match="a folder without model"):
        share.attach(module, tmp_path, folder=there.folder)


def test_the_reason_of_a_device_is_said_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import standin

    standin.install(tmp_path / "site", monkeypatch, sharing_obstacle="its memory is its own: share on the host")
    monkeypatch.setattr(standin.StandIn, "torch_name", "meta")
    with pytest.raises(ShareError, match=r"^device='meta': its memory is its own: share on the host$"):
        share.attach(small(), tmp_path / "no.safetensors", device="meta", folder=tmp_path / "s")
    with pytest.raises(ShareError, match=r"^standin:0: its memory is its own: share on the host$"):
        standin.StandIn(0).sharing()
