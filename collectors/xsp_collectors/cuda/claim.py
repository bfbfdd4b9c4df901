"""The claim to CUPTI, which serves one client in a process at a time: take it, or report its holder.

The claim is a subscription. Kineto of torch 2.14 and older subscribes at its first use and never unsubscribes, and
without a subscription it never records. So Kineto is made to subscribe first, and xsp then records beside its idle
subscription. Later versions of Kineto do not subscribe.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xsp_collectors import kinetouse

NAME = "xsp"

_TOOLS = {
    "NSYS_PROFILING_SESSION_ID": "Nsight Systems (nsys)",
    "NV_COMPUTE_PROFILER_PERFWORKS_DIR": "Nsight Compute (ncu)",
    "NV_SANITIZER_INJECTION_PORT_RANGE_BEGIN": "compute-sanitizer",
    "NVPROF_ID": "nvprof",
}
"""Variables that tools set in the environment of the program that they start."""

_CLIENTS = ("toolsinjection", "cuda-injection", "sanitizer", "libtau", "libpapi", "score-p", "hpctoolkit")
"""Parts of the names of mapped libraries that show other clients of CUPTI."""

REMEDY = "run without it, or take device work from torch.profiler with --kernels kineto"

_ALREADY_SUBSCRIBED = "ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"

_NO_NAME = ("", "unknown", "(null)", "<not provided>")
"""CUPTI's texts, after the prefix `CUPTI for`, for a client that gave no name; CUPTI 13.0 writes the last."""

_kineto_names: set[str | None] = {None}
"""CUPTI's names of this process's Kineto as a subscriber; None because a client without a name may be Kineto."""


def running_tool() -> str | None:
    """Return the name of a tool that runs this process and needs CUPTI exclusively, or None."""
    return next((name for variable, name in _TOOLS.items() if variable in os.environ), None)


def conflicting_setting() -> str | None:
    """Return why a setting of Kineto excludes another client of CUPTI, and a remedy, or None."""
    if os.environ.get("TEARDOWN_CUPTI") == "1":
        return "TEARDOWN_CUPTI=1 makes torch.profiler shut CUPTI down after each use: unset it"
    if os.environ.get("KINETO_USE_DAEMON"):
        return "KINETO_USE_DAEMON lets other processes switch torch.profiler on at any time: unset it"
    return None


class Claim:
    """A subscription in xsp's name, or the knowledge that Kineto holds the only one and is idle."""

    def __init__(self, cupti: Any, callback: Callable[..., None] | None = None) -> None:
        """Prepare a claim; CUPTI calls `callback` if the subscription is taken."""
        self._cupti = cupti
        self._callback = callback or _ignore
        self.subscriber: int | None = None
        """Handle of the subscription; None if CUPTI is used beside Kineto's."""

        self._params: Any = None
        self._error: Exception | None = None

    def take(self) -> str | None:
        """Take CUPTI and return None, or return its holder and a remedy."""
        reason = self._subscribe()
        if reason is not None:
            may_be_kineto = self._has_other_client() and self._holder() in _kineto_names and _only_kineto_can_hold_it()
            return None if may_be_kineto else reason
        self.release()
        if not kinetouse.use_once():
            return self._subscribe()
        # it was free a moment ago, and the only event since then is Kineto's first use
        reason = self._subscribe()
        if self._has_other_client():
            _kineto_names.add(self._holder())
            return None
        return reason

    def release(self) -> None:
        """Release CUPTI."""
        if self.subscriber is not None:
            subscriber, self.subscriber = self.subscriber, None
            self._cupti.unsubscribe(subscriber)

    def _subscribe(self) -> str | None:
        cupti = self._cupti
        self._params = None
        try:
            if hasattr(cupti, "subscribe_v2") and hasattr(cupti, "SubscriberParams"):
                self._params = cupti.SubscriberParams()
                self._params.struct_size = cupti.SUBSCRIBER_PARAMS_SIZE
                self._params.subscriber_name = NAME
                self.subscriber = cupti.subscribe_v2(self._callback, None, self._params.ptr)
            else:
                self.subscriber = cupti.subscribe(self._callback, None)
        except Exception as error:
            self._error = error
            if not self._has_other_client():
                return f"CUPTI cannot be subscribed to ({type(error).__name__}: {error})"
            return f"CUPTI is held by {self._holder() or 'another client, which gives no name'}: {REMEDY}"
        self._error = None
        return None

    def _has_other_client(self) -> bool:
        """Return whether the last attempt was refused because another client has subscribed."""
        refused_status = getattr(getattr(self._cupti, "Result", None), _ALREADY_SUBSCRIBED, None)
        return refused_status is not None and getattr(self._error, "status", None) == refused_status

    def _holder(self) -> str | None:
        """Return the name that the other client subscribed with, if it gave one."""
        try:
            name = getattr(self._params, "old_subscriber_name", None)
        except UnicodeDecodeError:  # nothing was written into the binding's buffer
            return None
        label = str(name or "").lower().removeprefix("cupti").strip().removeprefix("for").strip()
        return None if label in _NO_NAME else str(name)


def _only_kineto_can_hold_it() -> bool:
    """Return whether an idle Kineto is the only visible client of CUPTI in this process; the trial decides finally."""
    if "torch" not in sys.modules or kinetouse.is_used_by_program() or _is_traced():
        return False
    try:
        mappings = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False
    return not any(name in mappings for name in _CLIENTS)


def _is_traced() -> bool:
    """Return whether a debugger is attached to this process."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    return "TracerPid:\t0\n" not in status


def _ignore(*args: object) -> None:
    """Ignore callbacks: the subscription is only a claim, and no callbacks per call are enabled."""
