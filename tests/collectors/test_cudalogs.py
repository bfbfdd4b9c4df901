"""Libraries' logs as calls: the real cuBLASLt, cuBLAS and cuDNN, which log calls that need no device too."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import xsp  # noqa: E402
from xsp.testing import check_collector  # noqa: E402
from xsp_collectors.cuda import loggers  # noqa: E402
from xsp_collectors.cuda.loggers import LibraryLogs  # noqa: E402


def loaded(kind: Any) -> Any:
    library = kind.find_loaded()
    if library is None:
        pytest.skip(f"{kind.library} is not part of this torch")
    return library


def told(monkeypatch: pytest.MonkeyPatch, kind: Any, work: Any) -> list[tuple[str, dict[str, Any]]]:
    monkeypatch.setattr(loggers, "_LOGS", (kind,))
    return [(span.name, json.loads(span.attributes or "")) for span in check_collector(LibraryLogs(), work)]


def test_cublaslt(monkeypatch, capfd):
    library, layout = loaded(loggers._CublasLt), ctypes.c_void_p()
    work = lambda: library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), 0, 4, 8, 4)  # noqa: E731
    expected = {"type": "R_32F", "rows": "4", "cols": "8", "ld": "4"}
    assert told(monkeypatch, loggers._CublasLt, work) == [
        ("cublasLtMatrixLayoutCreate", {"library": "cuBLASLt", "evidence": "logger", "parameters": expected})
    ]
    assert capfd.readouterr().out == ""


def test_cublas(monkeypatch, capfd):
    library = loaded(loggers._Cublas)
    seen = told(monkeypatch, loggers._Cublas, lambda: library.cublasSetMathMode(None, 0))
    expected = {"mode": "CUBLAS_DEFAULT_MATH(0)"}
    assert seen == [("cublasSetMathMode", {"library": "cuBLAS", "evidence": "logger", "parameters": expected})]
    assert capfd.readouterr().out == ""


def test_cudnn(monkeypatch):
    library, tensor = loaded(loggers._Cudnn), ctypes.c_void_p()
    seen = told(monkeypatch, loggers._Cudnn, lambda: library.cudnnCreateTensorDescriptor(ctypes.byref(tensor)))
    assert seen == [("cudnnCreateTensorDescriptor", {"library": "cuDNN", "evidence": "logger"})]


def test_logs_that_the_user_directed_elsewhere_are_left_alone(monkeypatch):
    loaded(loggers._CublasLt)
    monkeypatch.setattr(loggers, "_LOGS", (loggers._CublasLt,))
    monkeypatch.setenv("CUBLASLT_LOG_LEVEL", "5")
    assert LibraryLogs().available() == "the logs of cuBLASLt are redirected by the environment"


def test_it_is_on_only_where_it_is_asked_for(tmp_path):
    with xsp.profile("net", out=tmp_path / "run", samples=False):
        pass
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "cudalogs" not in content["collectors"]
    assert "cudalogs" not in content["absent"]
