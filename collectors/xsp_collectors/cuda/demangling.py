"""Demangled names of kernels, from the C++ library that torch brings along."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


@functools.lru_cache(maxsize=16384)
def demangle(name: str) -> str:
    """Return the C++ name of a symbol; other names (Triton's, C's) are returned unchanged."""
    library = _library() if name.startswith("_Z") else None
    if library is None:
        return name
    status = ctypes.c_int()
    text = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if status.value != 0 or not text:
        return name
    try:
        return ctypes.string_at(text).decode("utf-8", "replace")
    finally:
        library.free(text)


@functools.cache
def _library() -> Any:
    """Return the C++ library, or None if there is none: names then stay unchanged."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    library.__cxa_demangle.restype = ctypes.c_void_p
    library.__cxa_demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    library.free.restype = None
    library.free.argtypes = [ctypes.c_void_p]
    return library
