"""Names of the runtime's and the driver's calls, by CUPTI's numbers."""

from __future__ import annotations

from typing import Any

from xsp_collectors.cuda.activities import Activity

_ENUMS = {
    Activity.RUNTIME: ("Runtime_api_trace_cbid", "runtime_api_trace_cbid"),
    Activity.DRIVER: ("Driver_api_trace_cbid", "driver_api_trace_cbid"),
}
_DOMAINS = {Activity.RUNTIME: "RUNTIME_API", Activity.DRIVER: "DRIVER_API"}


class CallNames:
    """A cache of names, which looks up each number in the binding once."""

    def __init__(self, cupti: Any = None) -> None:
        self._cupti = cupti
        self._names: dict[tuple[Activity, int], str] = {}

    def lookup(self, interface: Activity, number: int) -> str:
        """Return the name of a call, or its number if the binding does not know it.

        Args:
            interface: RUNTIME or DRIVER.
            number: CUPTI's "callback id".
        """
        key = (interface, number)
        if key not in self._names:
            self._names[key] = (
                self._name_from_enum(*key) or self._name_from_library(*key) or f"{interface.name} call {number}"
            )
        return self._names[key]

    def _name_from_enum(self, interface: Activity, number: int) -> str | None:
        for enum_name in _ENUMS[interface]:
            numbers = getattr(self._cupti, enum_name, None)
            if numbers is not None:
                try:
                    return str(numbers(number).name)
                except ValueError:  # the number is of a newer library
                    continue
        return None

    def _name_from_library(self, interface: Activity, number: int) -> str | None:
        try:
            domain = getattr(self._cupti.CallbackDomain, _DOMAINS[interface])
            return str(self._cupti.get_callback_name(int(domain), number))
        except Exception:  # the binding, or the library, does not know it
            return None
