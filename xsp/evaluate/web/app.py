"""The server of a folder's evaluations: REST and pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

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

    from xsp.evaluate.web import routes
    from xsp.evaluate.web.answers import without_paths
    from xsp.evaluate.web.guard import Guard
except ImportError as error:
    raise ManifestError("the pages of evaluations need FastAPI and uvicorn: pip install 'xsp[evaluate]'") from error

PORT = 8610
CONNECTIONS = 64


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

    app.include_router(routes.result_routes(Shelf(store)))
    app.include_router(routes.job_routes(store, job_agents, job_queue, sizes))
    app.include_router(routes.page_routes())
    return app


def server(store: Path, address: str, port: int, agents: Sequence[Agent] | None = None) -> uvicorn.Server:
    """Return a server of a folder's evaluations, behind its guard; `run` serves until a signal.

    Args:
        store: folder of results.
        address: IP address or host name to listen on.
        port: port to listen on.
        agents: agents, as for `application`.
    """
    guarded = Guard(application(store, agents), address)
    return uvicorn.Server(uvicorn.Config(
        guarded, host=address, port=port, log_level="warning", access_log=False, server_header=False,
        limit_concurrency=CONNECTIONS, timeout_keep_alive=5, timeout_graceful_shutdown=1, ws="none", lifespan="on",
    ))  # fmt: skip
