"""Each test leaves the process as it found it: no hook, no wrapper, no switched profiler, no open block."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sources
from realparts import Collector, Jaeger, to_file

from xsp import testing
from xsp.record import session

with contextlib.suppress(ImportError):  # Hypothesis is not everywhere: its tests skip
    import fuzzing  # noqa: F401

if TYPE_CHECKING:
    from roundtrip import Snapshot

_REPOSITORY = Path(__file__).resolve().parents[1]
_OURS = ("ONEDNN_VERBOSE_TIMESTAMP", "KINETO_LOG_LEVEL", "NVTX_INJECTION64_PATH", "CUBLAS_NVTX_LEVEL")

_MEMORY = Path("/dev/shm")
_ENOUGH_BYTES = 2 << 30


def pytest_configure() -> None:
    """Put temporary directories into memory where that is possible: each stored step waits for the disk, 6 ms or more.

    Tests start scripts that they have written, so a file system that runs none does not serve.

    Interrupts are taken as in a terminal: what a shell starts in the background ignores them, and so would all that the
    tests start and interrupt.

    What other processes found out about models and software stays out: tests change the code that it is of.
    """
    os.environ.setdefault("XSP_CACHE", "")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError):
        room = os.statvfs(_MEMORY)
        free = room.f_bavail * room.f_frsize
        if free >= _ENOUGH_BYTES and os.access(_MEMORY, os.W_OK) and not room.f_flag & getattr(os, "ST_NOEXEC", 0):
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


def _left_behind() -> dict[str, object]:
    """Return what xsp installs into a process and must take out again; torch's own state shows as such."""
    state = testing.process_state()
    ours = {name: state.get(f"environment {name}") for name in _OURS}
    hooks = {name: value for name, value in state.items() if not name.startswith("environment ")}
    for name in ("Module.__call__", "the autograd engine's entry", "DataLoader's __next__"):
        if name in hooks:
            hooks[name] = getattr(hooks[name], "__module__", "").partition(".")[0]
    return {**ours, **hooks, "active profile": session._active}


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name what is compressed by that: its bytes hold the time, and all processes have to see the same names."""
    return "gzip" if isinstance(val, bytes) and val.startswith(b"\x1f\x8b") else None


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = _left_behind()
    assert _foreign(before) == []
    yield
    after = _left_behind()
    assert _foreign(after) == []
    assert {name: after.get(name) for name in before} == before


def _foreign(state: dict[str, object]) -> list[str]:
    """Name what is not as torch made it."""
    wrong = [name for name, value in state.items() if isinstance(value, str) and "__" in name and value != "torch"]
    wrong += [name for name, value in state.items() if name.startswith("optimizers'") and value]
    return wrong + [name for name in ("active profile", "the profiler of torch") if state.get(name)]


@pytest.fixture(scope="module", autouse=True)
def no_tree_is_kept() -> Iterator[None]:
    """Forget the syntax trees of all sources after a file of tests that reads them."""
    yield
    if sources.tree_of.cache_info().currsize:
        sources.forget_trees()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of published figures and sample traces beside the checkout."""
    folder = _REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the folder of published figures and sample traces (shared/) is not beside the checkout")
    return folder


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run of a small network with all levels, for all tests: who sends it or changes it takes a copy."""
    from roundtrip import record

    return record(tmp_path_factory.mktemp("shared") / "run", repeats=3)


@pytest.fixture(scope="module")
def run(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of that run for the tests of a file."""
    return shutil.copytree(small_run, tmp_path_factory.mktemp("copy") / "run")


@pytest.fixture(scope="session")
def small_whole(small_run: Path) -> Snapshot:
    """All rows of that run, and all its tables."""
    from roundtrip import snapshot

    return snapshot(small_run)


@pytest.fixture(scope="session")
def jaeger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jaeger]:
    """A real Jaeger that keeps spans in memory; all tests share it."""
    started = Jaeger(tmp_path_factory.mktemp("jaeger"))
    started.start()
    yield started
    started.stop()


@pytest.fixture
def otel_collector(tmp_path: Path) -> Iterator[Callable[..., Collector]]:
    """A function that starts a real Collector that appends to a file: `otel_collector(path, form="json")`."""
    started: list[Collector] = []

    def start(path: Path, form: str = "json") -> Collector:
        started.append(Collector(tmp_path, to_file(path, form)))
        started[-1].start()
        return started[-1]

    yield start
    for collector in started:
        collector.stop()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium that reaches nothing but this machine."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--window-size=1280,900",
        "--disable-component-update", f"--user-data-dir={tmp_path_factory.mktemp('browser')}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()
