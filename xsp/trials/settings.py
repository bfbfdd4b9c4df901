"""Trials that are settings of the process: threads, oneDNN, memory, TF32, cuDNN."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xsp.device import devices
from xsp.errors import UsageError
from xsp.trials.trial import Trial, parse_count, require_on


class Threads(Trial):
    """torch computes with a number of threads, whatever the program sets."""

    def __init__(self, value: str = "") -> None:
        super().__init__(value)
        self.threads = parse_count("threads", value)

    def environment(self) -> Mapping[str, str]:
        """See `Trial`."""
        return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))

    def start(self) -> None:
        """See `Trial`."""
        import torch

        torch.set_num_threads(self.threads)
        torch.set_num_threads = self._ignore  # type: ignore[assignment]
        self.record_change(f"torch computes with {self.threads} threads")

    def _ignore(self, threads: int) -> None:
        self.record_change(f"the program's set_num_threads({threads}) is ignored")

    def already_applied(self, facts: Mapping[str, Any]) -> str | None:
        """See `Trial`."""
        return f"torch already computed with {self.threads} threads" if facts.get("threads") == self.threads else None


class Interop(Trial):
    """torch runs up to a number of operators at once, in code that was compiled for it."""

    def __init__(self, value: str = "") -> None:
        super().__init__(value)
        self.threads = parse_count("interop", value)

    def start(self) -> None:
        """See `Trial`."""
        import torch

        torch.set_num_interop_threads(self.threads)
        torch.set_num_interop_threads = lambda nthreads: None
        self.record_change(f"up to {self.threads} operators at once")

    def already_applied(self, facts: Mapping[str, Any]) -> str | None:
        """See `Trial`."""
        is_same = facts.get("interop") == self.threads
        return f"torch already ran up to {self.threads} operators at once" if is_same else None


class OneDnn(Trial):
    """oneDNN is on, or off, in outermost calls, whatever the program sets."""

    def __init__(self, value: str = "") -> None:
        super().__init__(value)
        if value not in ("", "on", "off"):
            raise UsageError(f"onednn={value}: write onednn=on or onednn=off")
        self.is_on = value != "off"

    def start(self) -> None:
        """See `Trial`."""
        import torch

        if not torch.backends.mkldnn.is_available():
            self.record_reason("this torch has no oneDNN")

    def before(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See `Trial`."""
        import torch

        if not torch.backends.mkldnn.is_available():
            return
        self._switch()
        module.register_forward_pre_hook(self._switch)  # a program may switch it back between two calls

    def _switch(self, *_: Any) -> None:
        import torch

        if torch._C._get_mkldnn_enabled() != self.is_on:
            torch._C._set_mkldnn_enabled(self.is_on)
            self.record_change(f"oneDNN is switched {'on' if self.is_on else 'off'}")

    def already_applied(self, facts: Mapping[str, Any]) -> str | None:
        """See `Trial`."""
        is_same = facts.get("onednn") is not None and bool(facts["onednn"]) == self.is_on
        return f"oneDNN was already {'on' if self.is_on else 'off'}" if is_same else None


class Malloc(Trial):
    """The C library's allocator keeps free memory and does not return it to the system."""

    KEPT_GIB = 1
    VARIABLES: Mapping[str, str] = {"MALLOC_TOP_PAD_": str(KEPT_GIB << 30), "MALLOC_MMAP_MAX_": "0"}
    """Variables of glibc. The first alone disables glibc's dynamic threshold from which each tensor has its own memory
    mapping: a program whose model runs in a thread then has more page faults than before."""

    def __init__(self, value: str = "") -> None:
        super().__init__(value)
        if value not in ("", "keep"):
            raise UsageError(f"malloc={value}: write malloc=keep")

    def environment(self) -> Mapping[str, str]:
        """See `Trial`."""
        return self.VARIABLES

    def start(self) -> None:
        """See `Trial`."""
        library, version = platform.libc_ver()
        if library != "glibc":
            self.record_reason(f"the C library is {library or 'unknown'}, and this trial needs glibc")
            return
        self.record_change(f"glibc {version} keeps up to {self.KEPT_GIB} GiB of free memory")

    def already_applied(self, facts: Mapping[str, Any]) -> str | None:
        """See `Trial`."""
        setting = facts.get("malloc")
        return f"the allocator was already set to keep memory: {setting}" if setting else None


class Tf32(Trial):
    """Matrix products and convolutions of float32 in TF32."""

    changes_numbers = True

    def __init__(self, value: str = "") -> None:
        super().__init__(value)
        require_on("tf32", value)

    def before(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See `Trial`."""
        import torch

        if not devices.accelerators():
            self.record_reason("there is no GPU")
            return
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        self.record_change("TF32 is allowed")

    def already_applied(self, facts: Mapping[str, Any]) -> str | None:
        """See `Trial`."""
        return "TF32 was already allowed" if facts.get("matmul_precision") in ("high", "medium") else None


class CudnnBenchmark(Trial):
    """cuDNN chooses its algorithms by timing them."""

    def __init__(self, value: str = "") -> None:
        super().__init__(value)
        require_on("cudnn_benchmark", value)

    def before(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See `Trial`."""
        import torch

        if not torch.backends.cudnn.is_available() or not devices.accelerators():
            self.record_reason("there is no cuDNN")
            return
        torch.backends.cudnn.benchmark = True
        self.record_change("cuDNN chooses by timing")

    def already_applied(self, facts: Mapping[str, Any]) -> str | None:
        """See `Trial`."""
        return "cuDNN already chose by timing" if facts.get("cudnn_benchmark") else None


def facts() -> dict[str, Any]:
    """Return the current settings of this process that trials change."""
    import torch

    values: dict[str, Any] = {}
    getters: dict[str, Callable[[], Any]] = {
        "threads": torch.get_num_threads,
        "interop": torch.get_num_interop_threads,
        "onednn": torch._C._get_mkldnn_enabled,
        "matmul_precision": torch.get_float32_matmul_precision,
        "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
        "malloc": _malloc,
        "gradients": lambda: torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
    }
    for name, getter in getters.items():
        try:
            values[name] = getter()
        except (RuntimeError, AttributeError):
            values[name] = None
    return values


def _malloc() -> str | None:
    """Return what already keeps free memory in this process: variables of glibc, or another allocator; else None."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    library = next((name for name in ("jemalloc", "tcmalloc", "mimalloc") if name in preloaded), None)
    return library or (" ".join(Malloc.VARIABLES) if Malloc.VARIABLES.keys() <= os.environ.keys() else None)
