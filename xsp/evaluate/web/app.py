"""The server of a folder's evaluations: REST and pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from xsp.connections import Connection, ConnectionLimits, Connections, State
from xsp.errors import ManifestError, XspError
from xsp.evaluate import transports
from xsp.evaluate.agents import Agent
from xsp.evaluate.web.modelsize import ModelSizes
from xsp.evaluate.web.queue import Queue, QueueFullError
from xsp.evaluate.web.shelf import Shelf
from xsp.version import __version__

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from xsp.evaluate.web import routes
    from xsp.evaluate.web.guard import Guard
    from xsp.evaluate.web.routes import without_paths
except ImportError as error:
    raise ManifestError("the pages of evaluations need FastAPI and uvicorn: pip install 'xsp[evaluate]'") from error

PORT = 8610
LIMITS = ConnectionLimits(idle_s=5.0)


def application(store: Path, agents: Sequence[Agent] | None = None, queue: Queue | None = None) -> FastAPI:
    """Return the application without the guard in front of it.

    Args:
        store: folder of results.
        agents: agents; an agent with a subprocess per evaluation if None.
        queue: queue of evaluations; a new one if None. It is closed with the application.
    """
    job_queue, sizes = queue or Queue(), ModelSizes()
    job_agents = list(agents) if agents is not None else [transports.SubprocessAgent()]

    @asynccontextmanager
    async def lifetime(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(job_queue.close)
            await asyncio.to_thread(sizes.close)

    app = FastAPI(
        title="xsp evaluate", version=__version__, openapi_url="/api/openapi.json", docs_url=None, redoc_url=None,
        lifespan=lifetime, description="Evaluations of models: results, comparisons, and new ones.",
    )  # fmt: skip

    @app.exception_handler(XspError)
    async def _xsp_error(_: Request, error: XspError) -> JSONResponse:
        return JSONResponse(
            {"error": without_paths(str(error), store)}, 429 if isinstance(error, QueueFullError) else 422
        )

    @app.exception_handler(RequestValidationError)
    async def _validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:8]]
        return JSONResponse({"error": "; ".join(problems)}, 422)

    @app.exception_handler(HTTPException)
    async def _http_error(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code)

    shelf = Shelf(store)
    app.include_router(routes.result_routes(shelf))
    app.include_router(routes.comparison_routes(shelf))
    app.include_router(routes.job_routes(store, job_agents, job_queue, sizes))
    app.include_router(routes.page_routes())
    return app


class Server(uvicorn.Server):
    """Serves until a signal, within the limits of `xsp.connections`."""

    def __init__(self, application: Guard, address: str, port: int, limits: ConnectionLimits) -> None:
        """Prepare to serve an application; `run` serves it."""
        self.connections = Connections(limits)

        class Protocol(_BoundedProtocol):
            places = self.connections

        super().__init__(uvicorn.Config(
            application, host=address, port=port, log_level="warning", access_log=False, server_header=False,
            http=Protocol, h11_max_incomplete_event_size=limits.header_bytes, timeout_keep_alive=int(limits.idle_s),
            timeout_graceful_shutdown=1, ws="none", lifespan="on",
        ))  # fmt: skip

    async def on_tick(self, counter: int) -> bool:
        """End the connections whose time is over, ten times a second."""
        self.connections.sweep()
        return await super().on_tick(counter)


class _BoundedProtocol(H11Protocol):
    """A connection that is in the table of its server."""

    places: Connections
    _connection: Connection | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = self.client[0] if self.client else ""
        self._connection = self.places.admit(peer, transport.abort)
        if self._connection is None:
            transport.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection is not None:
            self.places.leave(self._connection)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._connection is not None:
            super().data_received(data)
            self._follow(State.HEADER)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow(State.IDLE)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._enter(State.ANSWER)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._follow(State.IDLE)

    def _follow(self, between: State) -> None:
        """Enter the state of the current request; `between` if there is none."""
        if self.cycle is None or self.cycle.response_complete:
            self._enter(between)
        else:
            self._enter(State.BODY if self.cycle.more_body else State.WORK)

    def _enter(self, state: State) -> None:
        if self._connection is not None and self._connection.state is not state:  # the time counts from its beginning
            self._connection.enter(state)


def server(
    store: Path,
    address: str,
    port: int,
    agents: Sequence[Agent] | None = None,
    limits: ConnectionLimits = LIMITS,
) -> Server:
    """Return a server of a folder's evaluations, behind its guard; `run` serves until a signal.

    Args:
        store: folder of results.
        address: IP address or host name to listen on.
        port: port to listen on.
        agents: agents, as for `application`.
        limits: limits of connections.
    """
    return Server(Guard(application(store, agents), address, body_s=limits.body_s), address, port, limits)
