"""The API as one ASGI application: counted and logged → gate → limits → routes.

make_app(settings, catalogue, queue)   what a server runs
make_api(…)                            the routes alone, unguarded: for tests and for pages added to it
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path

import fastapi_offline
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.types import ASGIApp

from brim import __version__
from brim.jobs.store import Catalogue
from brim.jobs.worker.redact import Redactor
from brim.service.api import errors
from brim.service.api.auth import Gate
from brim.service.api.context import Context, Queue
from brim.service.api.dashboard_proxy import Front, is_api
from brim.service.api.data.device_history import DeviceHistory
from brim.service.api.events import Hub
from brim.service.api.limits import BodyLimit
from brim.service.api.metrics import CSP, Metrics, Observed
from brim.service.api.openapi import document
from brim.service.api.routes import dataset_views as routes_dataset_views
from brim.service.api.routes import datasets as routes_datasets
from brim.service.api.routes import jobs as routes_jobs
from brim.service.api.routes import kinds as routes_kinds
from brim.service.api.routes import models as routes_models
from brim.service.api.routes import predict as routes_predict
from brim.service.api.routes import run_views as routes_run_views
from brim.service.api.routes import runs as routes_runs
from brim.service.api.routes import system as routes_system
from brim.service.prediction.intake import Intake
from brim.service.prediction.known_models import KnownModels
from brim.service.prediction.process.client import Predictions
from brim.service.settings import Settings

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
_HOME = f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>brim</title></head>
<body>
<h1>brim {__version__}</h1>
<p>The service is running.</p>
<ul>
<li><a href="/docs">the API, to read and to try</a></li>
<li><a href="/api/training/jobs">jobs</a></li>
<li><a href="/api/datasets">datasets</a></li>
<li><a href="/api/runs">runs</a></li>
<li><a href="/api/models">models</a></li>
<li><a href="/api/devices">devices</a></li>
<li><a href="/api/batch-sizes">tuned batch sizes</a></li>
<li><a href="/ready">readiness</a></li>
<li><a href="/metrics">metrics</a></li>
</ul>
</body>
</html>
"""


def make_app(settings: Settings, catalogue: Catalogue, queue: Queue) -> ASGIApp:
    """The whole API, guarded."""
    return guard(make_api(settings, catalogue, queue))


def make_api(settings: Settings, catalogue: Catalogue, queue: Queue, predictions: Predictions | None = None) -> FastAPI:
    """The routes, without the gate: not to be served as they are."""
    predictions = predictions or Predictions.of(settings)
    context = Context(
        settings=settings,
        catalogue=catalogue,
        queue=queue,
        redact=Redactor({settings.data: "the data directory"}),
        hub=Hub(catalogue.events, limit=settings.max_watchers),
        metrics=Metrics(),
        predictions=predictions,
        known=KnownModels(catalogue.models, predictions),
        intake=Intake(settings.max_predicting),
        history=DeviceHistory(settings.data, catalogue.devices.all),
        front=Front(settings.dashboard_socket, tile_url=settings.tile_url) if settings.dashboard else None,
    )
    api = FastAPI(
        title="brim", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, lifespan=_lifespan,
        redirect_slashes=False,
    )  # fmt: skip
    api.state.context = context
    errors.install(api, context.redact)
    listed = (
        routes_jobs,
        routes_kinds,
        routes_datasets,
        routes_dataset_views,
        routes_runs,
        routes_run_views,
        routes_predict,
        routes_models,
        routes_system,
    )
    for routes in listed:
        api.router.routes.extend(routes.router.routes)  # not included: each stays a route one can see in api.routes
    _add_pages(api)
    return api


def guard(api: FastAPI) -> ASGIApp:
    """The routes behind the gate and the limits, counted."""
    context: Context = api.state.context
    settings = context.settings

    larger = {routes_datasets.router.prefix: settings.max_upload_bytes, **routes_predict.body_limits(settings)}

    def limit_of(path: str) -> int:
        of_file = settings.max_predict_bytes + settings.max_body_bytes  # dropped onto a page
        return larger.get(path, settings.max_body_bytes if is_api(path) else of_file)

    served = api if context.front is None else context.front.before(api)
    limited = BodyLimit(served, limit_of=limit_of)
    return Observed(Gate(limited, token=settings.token, hosts=settings.hosts), context.metrics)


@asynccontextmanager
async def _lifespan(api: FastAPI) -> AsyncIterator[None]:
    context: Context = api.state.context
    if context.settings.api_processes == 1:  # else others may be at theirs: the supervisor did it
        routes_datasets.discard_uploads(context.settings.data)
    context.warm.start()
    with context.history:
        async with context.predictions, context.known, context.front or nullcontext():
            yield
    context.hub.close()


def _add_pages(api: FastAPI) -> None:
    """What people read: a first page, and the documentation."""
    page = partial(api.add_api_route, methods=["GET"], include_in_schema=False)

    def openapi() -> Response:
        return JSONResponse(document(api))

    page("/", lambda: HTMLResponse(_HOME))
    page("/openapi.json", openapi)
    page("/docs", lambda: HTMLResponse(_DOCS, headers={"Content-Security-Policy": _DOCS_CSP}))
    page("/docs/start.js", lambda: Response(_START, media_type="text/javascript"))
    api.mount("/docs/assets", StaticFiles(directory=ASSETS), name="docs-assets")
