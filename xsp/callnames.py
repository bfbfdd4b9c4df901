"""Information in the name of a call of a device's runtime or driver: whether it starts device work, or waits for it.

This is the only module that interprets names of such calls. The patterns follow the interfaces of CUDA
(`cudaStreamSynchronize`), HIP, MTIA (`synchronizeStream`), Ascend (`aclrtSynchronizeStream`), Level Zero
(`zeEventHostSynchronize`), SYCL's unified runtime (`urQueueFinish`), OpenCL, and ROCr (`hsa_signal_wait_scacquire`).
They are RE2 expressions that Python reads alike, and ignore case; `KIND`, `AWAITED` and `STARTS_WORK` are SQL
expressions made of them, which read a column `name`. A stream that waits for an event (`cudaStreamWaitEvent`) makes no
host wait, and a call that adds a copy to a graph (`cudaGraphAddMemcpyNode`) starts none.
"""

from __future__ import annotations

import re
from functools import lru_cache

from xsp.schema import Kind

_STARTS = "launch|mem(cpy|set)"
_GRAPH_NODE = r"graph\w*node"
_WAITS = r"synchroni[sz]e|signal_wait|^(ur(queuefinish|eventwait)|cl(finish|waitforevents))"
_AWAITED = (("stream|queue|finish", "stream"), ("event|signal", "event"), ("ctx|context", "context"))
_NAMES_DEVICE = "device|thread"

STARTS_WORK = f"(regexp_matches(name, '(?i){_STARTS}') AND NOT regexp_matches(name, '(?i){_GRAPH_NODE}'))"
"""Whether the call starts device work, even if the work ran after the end of the recording."""

AWAITED = f"""
    CASE WHEN NOT regexp_matches(name, '(?i){_WAITS}') THEN NULL
         {" ".join(f"WHEN regexp_matches(name, '(?i){pattern}') THEN '{what}'" for pattern, what in _AWAITED)}
         ELSE 'device' END
"""
"""The object for which the call makes the host wait: stream, event, context or device; NULL if it does not wait."""

_MEMORY = r"(?i)^(cuda|cu|hip)(mem)?({})(async|_v\d+)*$"
REQUESTS_MEMORY, RETURNS_MEMORY = (
    f"regexp_matches(name, '{_MEMORY.format(verb)}')" for verb in ("malloc|alloc", "free")
)
"""Whether the call requests memory of a device from the driver, or returns it."""

KIND = f"""
    CASE WHEN {STARTS_WORK} THEN '{Kind.LAUNCH}' WHEN {AWAITED} IS NOT NULL THEN '{Kind.SYNC}' ELSE '{Kind.CALL}' END
"""


@lru_cache(maxsize=4096)
def kind_of(name: str) -> Kind:
    """Return the kind of a runtime or driver call by its name: it starts device work, waits, or neither.

    >>> [kind_of(name).value for name in ("cudaLaunchKernel", "synchronizeStream", "cudaStreamWaitEvent")]
    ['launch', 'sync', 'call']
    """
    if re.search(_STARTS, name, re.IGNORECASE) and not re.search(_GRAPH_NODE, name, re.IGNORECASE):
        return Kind.LAUNCH
    return Kind.SYNC if re.search(_WAITS, name, re.IGNORECASE) else Kind.CALL


@lru_cache(maxsize=4096)
def awaited_of(name: str) -> str | None:
    """Return the object for which the call makes the host wait, as far as its name says it: None otherwise.

    >>> awaited_of("cuCtxSynchronize"), awaited_of("cudaDeviceSynchronize"), awaited_of("synchronize")
    ('context', 'device', None)
    """
    if not re.search(_WAITS, name, re.IGNORECASE):
        return None
    for pattern, what in (*_AWAITED, (_NAMES_DEVICE, "device")):
        if re.search(pattern, name, re.IGNORECASE):
            return what
    return None
