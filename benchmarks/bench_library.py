"""How much of the engine's speed is left when module, optimiser, data and web application are the caller's own?

    python benchmarks/bench_library.py [--device cuda] [--seconds 3] [--markdown FILE]

Training: brim.train with a caller's module and SGD over a Resident of a TensorDataset, batch 256, as a share of the
step on fixed batches, beside the loop one would write over a DataLoader. Serving: answers in time per second of one
sequence classifier, by Batcher and by the runner and servable that `brim serve` uses, both awaited in one plain FastAPI
app, without a network between client and app.
"""

import argparse
import asyncio
import io
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import brim
from brim.engine.batching import BatchRunner, Payload
from brim.engine.device import resolve_device
from brim.sequences import EncoderShape, SequenceTraining, make_sequences, pack
from brim.sequences import train as train_sequences
from brim.sequences.evaluation import load_run
from brim.sequences.evaluation.serving import ClassifyServable
from page import machine, number, table, tell

BATCH, WIDTH, ROWS = 256, 512, 100_000
FRAMES, DIM, CLIENTS, LIMIT_MS, REPEATS = 48, 8, 16, 500, 5

Ask = Callable[[bytes], Awaitable[object]]


def main() -> None:
    """Measure both, print tables and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    device = resolve_device(options.device)
    results: dict[str, Any] = {"machine": machine(device, options.commit)}
    with tempfile.TemporaryDirectory() as folder:
        results["training"] = measure_training(device, options.seconds, Path(folder))
        results["serving"] = asyncio.run(measure_serving(device, options.seconds, Path(folder)))
    text = f"{training_table(results['training'])}\n{serving_table(results['serving'])}"
    print(text)
    print(json.dumps(results))
    if options.markdown is not None:
        head = f"# {__doc__.splitlines()[0]}\n\n" if __doc__ else ""
        command = (
            f"- command: `python benchmarks/bench_library.py --device {device.type} --seconds {options.seconds:g}`\n"
        )
        facts = f"- machine: {json.dumps(results['machine'])}\n{command}\n"
        options.markdown.write_text(f"{head}{facts}{text}\n```json\n{json.dumps(results)}\n```\n", encoding="utf-8")


# Training


def measure_training(device: torch.device, seconds: float, folder: Path) -> dict[str, Any]:
    x = torch.randn(ROWS, WIDTH)
    rows = torch.utils.data.TensorDataset(x, x[:, :1].sin())
    tell("training over a DataLoader")
    loop_per_s = plain_loop(rows, device, seconds)
    epochs = max(2, round(seconds * loop_per_s * 2 / ROWS))
    shares, rates = [], []
    for repeat in range(3):
        tell(f"brim.train, {epochs} epochs")
        data = brim.Resident(rows, batch_size=BATCH, device=device)
        report = brim.train(
            network(), nn.MSELoss(), data, out=folder / f"run-{repeat}", epochs=epochs,
            optimizer=lambda params: torch.optim.SGD(params, 0.01),
        )  # fmt: skip
        data.close()
        rates.append(report.samples_per_s)
        shares.append(report.ceiling_share)
    return {
        "rows_per_s": statistics.median(rates),
        "ceiling_share": shares,
        "loader_rows_per_s": loop_per_s,
        "step_kind": report.step_kind,
        "epochs": epochs,
    }


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


def plain_loop(rows: torch.utils.data.TensorDataset, device: torch.device, seconds: float) -> float:
    """Rows per second of the loop one would write, after a short warm-up."""
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = torch.utils.data.DataLoader(rows, BATCH, shuffle=True, pin_memory=device.type == "cuda")
    done, began_s = 0, time.perf_counter() + seconds / 4
    while True:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            now_s = time.perf_counter()
            done += len(x) if now_s > began_s else 0
            if now_s > began_s + seconds:
                return done / (now_s - began_s)


def training_table(found: dict[str, Any]) -> str:
    shares = [share for share in found["ceiling_share"] if share is not None]
    reached = f"{min(shares):.1%} to {max(shares):.1%}" if shares else "not measured"
    return table(
        f"{ROWS} rows of {WIDTH} values, batch {BATCH}, SGD, steps {found['step_kind']}",
        ["way", "rows/s", "of the ceiling"],
        [
            ["brim.train over a Resident", number(found["rows_per_s"]), reached],
            ["plain loop over a DataLoader", number(found["loader_rows_per_s"]), ""],
        ],
    )


# Serving


async def measure_serving(device: torch.device, seconds: float, folder: Path) -> dict[str, Any]:
    run = await asyncio.to_thread(trained, folder)
    module = load_run(run).module.to(device)
    servable = ClassifyServable(run, device)
    sizes = tuple(servable.sizes)
    body = io.BytesIO()
    np.save(body, np.random.default_rng(0).normal(size=(FRAMES, DIM)).astype(np.float32))
    data = body.getvalue()

    def predict(items: list[np.ndarray[Any, Any]]) -> list[dict[str, float]]:
        frames = torch.from_numpy(np.stack(items)).to(device)
        with torch.inference_mode():
            scores = module(frames, torch.full((len(items),), FRAMES, device=device)).float().softmax(-1).cpu()
        return [{str(place): round(value, 6) for place, value in enumerate(row)} for row in scores.tolist()]

    rates: dict[str, list[float]] = {"Batcher": [], "predictor": []}
    batcher = brim.Batcher(predict, max_latency_ms=LIMIT_MS, max_batch=sizes[-1], example=np.load(io.BytesIO(data)))
    with batcher, BatchRunner(lambda name: servable) as runner:

        async def ours(content: bytes) -> object:
            return await batcher(np.load(io.BytesIO(content)))

        async def theirs(content: bytes) -> object:
            due_s = time.monotonic() + LIMIT_MS / 1e3
            return json.loads((await asyncio.wrap_future(runner.submit("m", Payload(content), due_s))).body)

        for repeat in range(REPEATS + 1):
            for name, ask in (("Batcher", ours), ("predictor", theirs)):
                tell(f"serving by the {name}")
                rate = await load(ask, data, seconds)
                rates[name] += [rate] if repeat else []  # the first warms up
    return {
        "in_time_per_s": rates,
        "share": statistics.median(rates["Batcher"]) / statistics.median(rates["predictor"]),
    }


def trained(folder: Path) -> Path:
    """A small classifier; its speed does not depend on how well it was trained."""
    make_sequences(folder / "npy", 60, dim=DIM, classes=3, mean_length=12)
    pack(folder / "npy", folder / "corpus")
    shape = EncoderShape(channels=64, hidden=64, attention=32, embedding=64, convolutions=2)
    config = SequenceTraining(mode="supervised", classifier_epochs=1, batch_size=16, model=shape, method="cnn_lstm")
    train_sequences(folder / "corpus", folder / "run", config)
    return folder / "run"


async def load(ask: Ask, data: bytes, seconds: float) -> float:
    """Answers in time per second of clients that ask a FastAPI app again and again."""
    from fastapi import FastAPI, Request, Response
    from httpx import ASGITransport, AsyncClient

    app = FastAPI()

    @app.post("/predict")
    async def route(request: Request) -> Any:
        try:
            return await ask(await request.body())
        except (brim.errors.Overloaded, brim.errors.DeadlinePassed):
            return Response(status_code=503)

    route.__annotations__["request"] = Request  # made in a function: FastAPI looks names up in the module
    done, until_s = 0, time.perf_counter() + seconds

    async def client(http: AsyncClient) -> None:
        nonlocal done
        while time.perf_counter() < until_s:
            began_s = time.perf_counter()
            answer = await http.post("http://app/predict", content=data)
            done += answer.status_code == 200 and time.perf_counter() - began_s <= LIMIT_MS / 1e3
            if answer.status_code == 503:  # a client that asks again at once takes the time of the others
                await asyncio.sleep(0.02)

    async with AsyncClient(transport=ASGITransport(app), timeout=None) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    return done / seconds


def serving_table(found: dict[str, Any]) -> str:
    rows = [
        [name, number(statistics.median(rates)), f"{min(rates):.0f} to {max(rates):.0f}"]
        for name, rates in found["in_time_per_s"].items()
    ]
    title = f"answers within {LIMIT_MS} ms, {CLIENTS} clients in one FastAPI app; Batcher has {found['share']:.1%}"
    return table(title, ["way", "in time/s", "spread"], rows)


if __name__ == "__main__":
    main()
