"""Ray Serve for bench_serve.py: one replica that batches; it decodes and traces in threads."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from serve_others import Steps, read_setting

SETTING = read_setting()
NO_LIMIT = 1024  # requests held, as bench_serve.py says it


class Segment:
    """Bytes of a file → GeoJSON."""

    def __init__(self, setting: dict[str, Any]) -> None:
        self.steps = Steps(setting)
        self.steps.load()
        self.pool, self.device = ThreadPoolExecutor(setting["threads"]), ThreadPoolExecutor(1)

    @serve.batch(max_batch_size=SETTING["batch_size"], batch_wait_timeout_s=SETTING["wait_ms"] / 1000)  # type: ignore[untyped-decorator]
    async def forward(self, images: list[np.ndarray]) -> list[Any]:
        """A batch."""
        found: list[Any] = await self._run(self.device, self.steps.forward, images)
        return found

    async def __call__(self, request: Request) -> Response:
        """One request."""
        image = await self._run(self.pool, self.steps.decode, await request.body())
        found = await self.forward(image)
        return Response(await self._run(self.pool, self.steps.finish, found), media_type="application/geo+json")

    async def _run(self, pool: ThreadPoolExecutor, work: Any, item: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, work, item)


def main() -> None:
    """Serve until killed."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": SETTING["port"], "request_timeout_s": SETTING["timeout_s"]})
    held = SETTING["capacity"]  # one of them waits at the proxy
    options = {"max_ongoing_requests": max(1, held - 1), "max_queued_requests": 1 if held < NO_LIMIT else -1}
    deployment = serve.deployment(num_replicas=1, **options)(Segment)
    serve.run(deployment.bind(SETTING))
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
