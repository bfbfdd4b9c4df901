"""What the name of a runtime call says, in Python and in SQL alike."""

from __future__ import annotations

import duckdb
import pytest

from xsp import callnames
from xsp.schema import Kind

NAMES = {
    "cudaLaunchKernel": (Kind.LAUNCH, None),
    "cuLaunchKernelEx": (Kind.LAUNCH, None),
    "cudaGraphLaunch": (Kind.LAUNCH, None),
    "hipExtModuleLaunchKernel": (Kind.LAUNCH, None),
    "cudaMemcpyAsync": (Kind.LAUNCH, None),
    "cuMemsetD32Async": (Kind.LAUNCH, None),
    "enqueueCommand memcpyHtoDAsync": (Kind.LAUNCH, None),
    "cudaGraphAddMemcpyNode": (Kind.CALL, None),
    "cudaGraphExecKernelNodeSetParams": (Kind.CALL, None),
    "cudaStreamSynchronize": (Kind.SYNC, "stream"),
    "synchronizeStream": (Kind.SYNC, "stream"),
    "aclrtSynchronizeStream": (Kind.SYNC, "stream"),
    "cudaEventSynchronize": (Kind.SYNC, "event"),
    "zeEventHostSynchronize": (Kind.SYNC, "event"),
    "urEventWait": (Kind.SYNC, "event"),
    "urQueueFinish": (Kind.SYNC, "stream"),
    "hsa_signal_wait_scacquire": (Kind.SYNC, "event"),
    "cuCtxSynchronize": (Kind.SYNC, "context"),
    "cudaDeviceSynchronize": (Kind.SYNC, "device"),
    "cudaStreamWaitEvent": (Kind.CALL, None),
    "cudaEventRecord": (Kind.CALL, None),
    "cudaMalloc": (Kind.CALL, None),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_call_starts_work_or_waits_by_its_name(name: str) -> None:
    kind, awaited = NAMES[name]
    assert (callnames.kind_of(name), callnames.awaited_of(name)) == (kind, awaited)
    query = f"SELECT {callnames.KIND}, {callnames.AWAITED} FROM (SELECT ? AS name)"
    assert duckdb.execute(query, [name]).fetchall() == [(kind, awaited)]


def test_a_wait_whose_name_has_no_object_is_for_the_device_unless_something_else_says_it() -> None:
    assert callnames.awaited_of("synchronize") is None
    assert duckdb.execute(f"SELECT {callnames.AWAITED} FROM (SELECT 'synchronize' AS name)").fetchall() == [("device",)]
