"""OTLP over gRPC: `TraceService/Export`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from xsp.errors import OutputError, TraceError
from xsp.receiver.http import PROTOBUF, parts_of, response_of
from xsp.receiver.journal import RunWriter
from xsp.receiver.limits import Limits, MemoryBudget, MemoryFull, TooLarge

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
THREADS = 4
AGE_MS = 60_000
"""Age in milliseconds at which a connection is renewed, so that requests that never end do not stay."""


def server(address: str, writer: RunWriter, budget: MemoryBudget, limits: Limits) -> tuple[grpc.Server, int]:
    """Return a gRPC server that is bound but not started, and its port.

    Raises:
        OSError: the address cannot be used.
    """

    def export(request: bytes, context: grpc.ServicerContext) -> ExportTraceServiceResponse:
        try:
            with budget.share() as share:
                share.acquire(len(request))
                return response_of(writer.store(parts_of(PROTOBUF, request)))
        except TooLarge as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except TraceError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (MemoryFull, OutputError) as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        raise AssertionError("abort raises")

    rpc_server = grpc.server(
        ThreadPoolExecutor(THREADS, thread_name_prefix="xsp-grpc"),
        maximum_concurrent_rpcs=limits.connections,
        options=[
            ("grpc.max_receive_message_length", limits.max_body),
            ("grpc.max_connection_age_ms", AGE_MS),
            ("grpc.max_connection_age_grace_ms", int(limits.seconds * 1000)),
            ("grpc.so_reuseport", 0),
        ],
    )
    # no deserializer: a request that cannot be decoded gets an answer of ours
    handler = grpc.unary_unary_rpc_method_handler(export, None, ExportTraceServiceResponse.SerializeToString)
    rpc_server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Export": handler})])
    try:
        port = rpc_server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"{address} cannot be used: {error}") from error
    if not port:
        raise OSError(f"{address} cannot be used")
    return rpc_server, int(port)
