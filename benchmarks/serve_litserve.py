"""LitServe for bench_serve.py: one worker that batches; a batch's images are decoded and traced by threads."""

from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Annotated, Any

import litserve
import numpy as np
from fastapi import File, Response

from serve_others import Steps, read_setting


class Limit:
    """Refuses what comes while a process holds so many requests, before anything of it is read."""

    def __init__(self, app: Any, held: int) -> None:
        self.app, self.held, self.inside = app, held, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif self.inside >= self.held:
            await Response(status_code=HTTPStatus.SERVICE_UNAVAILABLE)(scope, receive, send)
        else:
            self.inside += 1
            try:
                await self.app(scope, receive, send)
            finally:
                self.inside -= 1


class Segment(litserve.LitAPI):  # type: ignore[misc]
    """Bytes of a file → GeoJSON."""

    def setup(self, device: str) -> None:
        """In the worker."""
        self.setting = read_setting()
        self.steps = Steps(self.setting)
        self.steps.load()
        self.pool = ThreadPoolExecutor(self.setting["threads"])

    def decode_request(self, request: Annotated[bytes, File()]) -> Any:
        """Begun by a thread, so that a batch's images are decoded at once."""
        return self.pool.submit(self.steps.decode, request)

    def batch(self, inputs: list[Any]) -> list[np.ndarray]:
        """Wait for the threads."""
        return [each.result() for each in inputs]

    def predict(self, images: Any) -> Any:
        """A batch, or without batching the one image."""
        return self.steps.forward(images) if isinstance(images, list) else self.steps.forward([images.result()])[0]

    def unbatch(self, output: Any) -> list[bytes]:
        """Traced by threads."""
        return list(self.pool.map(self.steps.finish, output))

    def encode_response(self, output: Any) -> Response:
        """The answer; without batching it is traced here."""
        body = output if isinstance(output, bytes) else self.steps.finish(output)
        return Response(body, media_type="application/geo+json")


def main() -> None:
    """Serve until killed."""
    setting = read_setting()
    api = Segment(max_batch_size=setting["batch_size"], batch_timeout=setting["wait_ms"] / 1000)
    server = litserve.LitServer(
        api,
        accelerator="cpu",
        devices=1,
        workers_per_device=1,
        timeout=setting["timeout_s"],
        fast_queue=True,
        middlewares=[(Limit, {"held": max(1, setting["capacity"] // setting["api_servers"])})],
    )  # the steps choose the device themselves
    server.run(
        host="127.0.0.1",
        port=setting["port"],
        num_api_servers=setting["api_servers"],
        log_level="error",
        generate_client_file=False,
    )


if __name__ == "__main__":
    main()
