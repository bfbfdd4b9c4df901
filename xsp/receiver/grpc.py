"""OTLP over gRPC: `TraceService/Export`.

An event loop reads requests, so that one that arrives slowly takes no thread. On the wire a request is unary; here it
is a stream of one message, so that its arrival has the deadline of `xsp.connections`, and gives its place to others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
import grpc.aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from xsp.connections import Connections, State
from xsp.errors import OutputError, TraceError
from xsp.receiver.http import PROTOBUF, parts_of, response_of
from xsp.receiver.journal import RunWriter
from xsp.receiver.limits import BodyTooLarge, MemoryBudget, MemoryFull, RequestLimits

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
THREADS = 8
AGE_MS = 60_000
"""Age in milliseconds at which a connection is renewed, so that requests that never end do not stay."""

MAX_CONNECTIONS = 4096
"""Connections at a time. They take no thread, and one that sends no complete preface is closed like a late header."""

Result = TypeVar("Result")


class OtlpGrpcServer:
    """The gRPC server of a receiver, with an event loop in a thread of its own."""

    def __init__(self, address: str, writer: RunWriter, budget: MemoryBudget, limits: RequestLimits) -> None:
        """Bind the address, without accepting requests yet.

        Raises:
            OSError: the address cannot be used.
        """
        self._writer, self._budget = writer, budget
        self._requests = Connections(limits.clients)
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="xsp-grpc")
        threading.Thread(target=self._loop.run_forever, name="xsp-grpc", daemon=True).start()
        try:
            self.port = self._run(self._bind(address, limits))
        except BaseException:
            self._end_loop()
            raise

    def start(self) -> None:
        """Accept requests, in other threads."""
        self._run(self._server.start())
        self._sweeping = asyncio.run_coroutine_threadsafe(self._sweep(), self._loop)

    def stop(self, grace_s: float) -> None:
        """Refuse further requests, and return when those in progress have ended or the time is over."""
        self._sweeping.cancel()
        self._run(self._server.stop(grace_s))
        self._end_loop()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_loop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _bind(self, address: str, limits: RequestLimits) -> int:
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limits.max_body),
                ("grpc.max_metadata_size", limits.clients.header_bytes),
                ("grpc.server_handshake_timeout_ms", int(limits.clients.header_s * 1000)),
                ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
                ("grpc.max_concurrent_streams", limits.clients.connections),
                ("grpc.max_connection_age_ms", AGE_MS),
                ("grpc.max_connection_age_grace_ms", int(limits.clients.body_s * 1000)),
                ("grpc.so_reuseport", 0),
            ],
        )
        # no deserializer: a request that cannot be decoded gets an answer of ours
        handler = grpc.stream_unary_rpc_method_handler(self._export, None, ExportTraceServiceResponse.SerializeToString)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": handler}),))
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"{address} cannot be used: {error}") from error
        if not port:
            raise OSError(f"{address} cannot be used")
        return int(port)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self._requests.sweep()

    async def _export(self, messages: AsyncIterator[bytes], context: Any) -> ExportTraceServiceResponse:
        arrival = asyncio.ensure_future(anext(messages, b""))
        request = self._requests.admit(
            context.peer().rpartition(":")[0], lambda: self._loop.call_soon_threadsafe(arrival.cancel)
        )
        if request is None:
            arrival.cancel()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "too many requests at once; send again")
            raise AssertionError("abort raises")
        request.enter(State.BODY)
        try:
            await asyncio.wait([arrival])
            if arrival.cancelled():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the request did not arrive in time; send again")
            request.enter(State.WORK)
            return await self._loop.run_in_executor(self._threads, self._store, arrival.result())
        except BodyTooLarge as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except TraceError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (MemoryFull, OutputError) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            self._requests.leave(request)
        raise AssertionError("abort raises")

    def _store(self, message: bytes) -> ExportTraceServiceResponse:
        with self._budget.share() as share:
            share.acquire(len(message))
            return response_of(self._writer.store(parts_of(PROTOBUF, message)))
