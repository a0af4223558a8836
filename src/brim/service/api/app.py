"""The API as one ASGI application: metrics and log → authentication → limits → routes.

make_api(settings, catalogue, queue)   the routes alone, without authentication
guard(api)                             what a server runs
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import fastapi_offline
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.types import ASGIApp

from brim import __version__
from brim.jobs.store import Catalogue
from brim.jobs.worker.redact import Redactor
from brim.service.access import Access, Actions
from brim.service.api import errors
from brim.service.api.auth import Gate
from brim.service.api.body import BodyLimit
from brim.service.api.context import Context
from brim.service.api.dashboard_proxy import DashboardProxy, is_api
from brim.service.api.devices import DeviceHistory
from brim.service.api.events import Hub
from brim.service.api.metrics import CSP, Observed, ServiceMetrics
from brim.service.api.openapi import document
from brim.service.api.routes import access, datasets, jobs, locate, predict, runs, system
from brim.service.api.sign_in import SignIn
from brim.service.prediction.client import KnownModels, Predictions
from brim.service.prediction.request import Admission, EarlyRefusal
from brim.service.reader.client import Reader
from brim.service.settings import Settings

if TYPE_CHECKING:
    from brim.jobs.durable import Queue

ASSETS = Path(fastapi_offline.__file__).parent / "static"  # Swagger UI, so that /docs needs no network
_DOCS_CSP = f"{CSP}; img-src 'self' data:; style-src 'self' 'unsafe-inline'"
_DOCS = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>brim API</title>
<link rel="icon" href="/docs/assets/favicon.png">
<link rel="stylesheet" href="/docs/assets/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="/docs/assets/swagger-ui-bundle.js"></script>
<script src="/docs/start.js"></script>
</body>
</html>
"""
_START = """SwaggerUIBundle({
  url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null,
  presets: [SwaggerUIBundle.presets.apis, SwaggerUIBundle.SwaggerUIStandalonePreset],
});
"""
_LINKS = {
    "/docs": "API documentation", "/api/training/jobs": "jobs", "/api/datasets": "datasets", "/api/runs": "runs",
    "/api/models": "models", "/api/devices": "devices", "/api/batch-sizes": "tuned batch sizes",
    "/ready": "readiness", "/metrics": "metrics",
}  # fmt: skip
_HOME = f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>brim</title></head>
<body><h1>brim {__version__}</h1><p>The service is running.</p>
<ul>{"".join(f'<li><a href="{path}">{text}</a></li>' for path, text in _LINKS.items())}</ul></body>
</html>
"""


def make_api(
    settings: Settings,
    catalogue: Catalogue,
    queue: "Queue",
    predictions: Predictions | None = None,
    reader: Reader | None = None,
) -> FastAPI:
    """The routes without authentication: not to be served as they are."""
    predictions = predictions or Predictions(settings.predict_sockets)
    reader = reader or Reader(settings.reader_socket)
    dashboard = DashboardProxy(settings.dashboard_socket, tile_url=settings.tile_url) if settings.dashboard else None
    context = Context(
        settings=settings,
        catalogue=catalogue,
        queue=queue,
        redact=Redactor({settings.data: "the data directory"}),
        hub=Hub(catalogue.events, limit=settings.max_watchers),
        metrics=ServiceMetrics(),
        reader=reader,
        statistics=datasets.CachedStatistics(reader),
        images=datasets.CachedImages(reader),
        predictions=predictions,
        models=KnownModels(catalogue.models, predictions, catalogue.runs, settings.data),
        admission=Admission(settings.max_predicting, settings.max_held_bytes),
        access=Access(settings.data, settings.token),
        actions=Actions(settings.data),
        history=DeviceHistory(settings.data, catalogue.devices.all),
        dashboard=dashboard,
    )
    api = FastAPI(
        title="brim", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, lifespan=_lifespan,
        redirect_slashes=False,
    )  # fmt: skip
    api.state.context = context
    errors.install(api, context.redact)
    for routes in (jobs, datasets, runs, predict, locate, system, access):
        api.router.routes.extend(routes.router.routes)  # not included: each stays visible in api.routes
    _add_pages(api)
    return api


def guard(api: FastAPI) -> ASGIApp:
    """The routes behind authentication and limits, counted."""
    context: Context = api.state.context
    settings = context.settings
    larger = {datasets.router.prefix: settings.max_upload_bytes, **predict.body_limits(settings)}

    def limit_of(path: str) -> int:
        of_page = settings.max_predict_bytes + settings.max_body_bytes  # a file dropped onto a page
        return larger.get(path, settings.max_body_bytes if is_api(path) else of_page)

    refusing = EarlyRefusal(api, context, predict.KINDS, api.routes)
    served = refusing if context.dashboard is None else context.dashboard.before(refusing)
    limited = BodyLimit(served, limit_of=limit_of)
    sign_in = SignIn(settings, context.access, context.actions) if settings.oidc_issuer else None
    gate = Gate(limited, context.access, hosts=settings.hosts, sign_in=sign_in)
    return Observed(gate, context.metrics, context.actions)


@asynccontextmanager
async def _lifespan(api: FastAPI) -> AsyncIterator[None]:
    context: Context = api.state.context
    if context.settings.api_processes == 1:  # others may be using theirs; the supervisor cleaned up at the start
        context.settings.discard_uploads()
    with context.history:
        async with context.predictions, context.models, context.dashboard or nullcontext():
            yield
    context.hub.close()


def _add_pages(api: FastAPI) -> None:
    page = partial(api.add_api_route, methods=["GET"], include_in_schema=False)

    def openapi() -> Response:
        return JSONResponse(document(api))

    page("/", lambda: HTMLResponse(_HOME))
    page("/openapi.json", openapi)
    page("/docs", lambda: HTMLResponse(_DOCS, headers={"Content-Security-Policy": _DOCS_CSP}))
    page("/docs/start.js", lambda: Response(_START, media_type="text/javascript"))
    api.mount("/docs/assets", StaticFiles(directory=ASSETS), name="docs-assets")
