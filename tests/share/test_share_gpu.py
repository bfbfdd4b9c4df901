"""Weights on a real device, by several processes: what `test_share_devices.py` does with a stand-in."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sharing import StoreProcess, running_store

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import save_file  # noqa: E402

from xsp import share  # noqa: E402
from xsp.device import cudasharing as driver  # noqa: E402
from xsp.share import devices  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDE = 4096
MIB = 1 << 20

_CLIENT = f"""
import sys, json, torch
from pathlib import Path
from xsp import share
from xsp.device import cudasharing as driver
torch.cuda.init()
torch.mm(*torch.zeros(2, 8, 8, device="cuda:0"))  # cuBLAS's workspace is 32 MiB on a device of compute 9.0
with share.empty():
    module = torch.nn.Sequential(torch.nn.Linear({WIDE}, {WIDE}), torch.nn.GELU(), torch.nn.Linear({WIDE}, {WIDE}))
before = torch.cuda.memory_allocated()
found = share.attach(module, sys.argv[1], device="cuda:0", folder=Path(sys.argv[2]))
x = torch.arange(8 * {WIDE}, device="cuda:0", dtype=torch.float32).reshape(8, {WIDE}) / {WIDE}
with torch.inference_mode():
    out = module(x).cpu()
if sys.argv[3] == "write":
    torch._foreach_add_([module[0].weight.detach()], 1.0)
    torch.cuda.synchronize()
print(json.dumps({{"hit": found.hit, "own": torch.cuda.memory_allocated() - before, "sum": out.double().sum().item(),
                  "bits": out.view(torch.int32).tolist()[0][:64]}}), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(WIDE, WIDE), torch.nn.GELU(), torch.nn.Linear(WIDE, WIDE))
    save_file(module.state_dict(), tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


@pytest.fixture
def there(tmp_path: Path) -> Iterator[StoreProcess]:
    with running_store(tmp_path / "s", "1GiB", "--device", "0", "--device-capacity", "1GiB") as found:
        yield found
        gc.collect()
        found.end()


def client(weights: Path, there: StoreProcess, does: str = "read") -> tuple[subprocess.Popen[str], dict]:  # type: ignore[type-arg]
    words = [sys.executable, "-c", _CLIENT, str(weights), str(there.folder), does]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def end(*processes: subprocess.Popen[str]) -> None:
    for each in processes:
        each.communicate("\n", timeout=120)
        assert each.returncode == 0


def own_outputs(weights: Path) -> list[int]:
    """Return the same outputs by weights that torch has loaded for itself."""
    from safetensors.torch import load_file

    module = torch.nn.Sequential(torch.nn.Linear(WIDE, WIDE), torch.nn.GELU(), torch.nn.Linear(WIDE, WIDE))
    module.load_state_dict(load_file(str(weights)))
    module.cuda()
    x = torch.arange(8 * WIDE, device="cuda:0", dtype=torch.float32).reshape(8, WIDE) / WIDE
    with torch.inference_mode():
        return module(x).cpu().view(torch.int32).tolist()[0][:64]  # type: ignore[no-any-return]


def test_two_processes_have_the_same_bits_as_one_by_itself(weights: Path, there: StoreProcess) -> None:
    first, told = client(weights, there)
    second, also = client(weights, there)
    end(first, second)
    assert (told["hit"], also["hit"]) == (False, True)
    assert told["bits"] == also["bits"] == own_outputs(weights)


def test_four_processes_have_one_copy(weights: Path, there: StoreProcess) -> None:
    before = driver.device(0).memory()[0]
    clients = [client(weights, there) for _ in range(4)]
    (held,) = (each["held_bytes"] for each in devices.status(there.folder))
    size = weights.stat().st_size
    assert size <= held <= size + 4 * MIB
    assert all(told["own"] < 4 * MIB for _, told in clients)  # activations and inputs
    print("memory with four processes, contexts included:", (before - driver.device(0).memory()[0]) / MIB, "MiB")
    end(*(process for process, _ in clients))


def test_what_a_process_writes_is_found_and_renewed(weights: Path, there: StoreProcess) -> None:
    wrote, told = client(weights, there, "write")
    (found,) = devices.check(there.folder)
    assert "in 0.weight" in found["corrupted"]
    assert found["attached"] == [wrote.pid]
    after, also = client(weights, there)
    assert not also["hit"]
    assert also["bits"] == told["bits"]
    end(wrote, after)


def test_memory_is_freed_when_it_is_evicted_after_a_kill(weights: Path, there: StoreProcess) -> None:
    process, _ = client(weights, there)
    process.kill()
    process.wait()
    import time

    until = time.monotonic() + 60
    while any(each["attached"] for each in devices.status(there.folder)[0]["objects"]):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert devices.evict("*", there.folder) == 1
    assert devices.status(there.folder)[0]["held_bytes"] == 0


def test_views_in_this_process_end_with_the_module(weights: Path, there: StoreProcess) -> None:
    torch.cuda.init()
    with share.empty():
        module = torch.nn.Sequential(torch.nn.Linear(WIDE, WIDE), torch.nn.GELU(), torch.nn.Linear(WIDE, WIDE))
    share.attach(module, weights, device="cuda:0", folder=there.folder)
    assert module[0].weight.device == torch.device("cuda:0")
    assert module[0].weight.data_ptr() % 512 == 0
    with pytest.raises(RuntimeError, match="shared by several processes"):
        module[0].weight.zero_()
    del module
    gc.collect()
    assert devices._addresses == {}
