"""Many clients at once: the queue takes them, and reading and cancelling stay quick."""

import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from fault_service import JOBS, Serve

pytestmark = [pytest.mark.slow, pytest.mark.alone]
CLIENTS, EACH = 10, 10
BAR_S = 0.2


class Client:
    """Asks, and notes how long answers took."""

    def __init__(self, serve: Serve) -> None:
        self.serve = serve
        self.seconds: list[float] = []

    def ask(self, method: str, path: str, expected: int) -> None:
        began = time.monotonic()
        status, answer = self.serve.ask(method, path)
        self.seconds.append(time.monotonic() - began)
        assert status == expected, answer

    def p95(self) -> float:
        return sorted(self.seconds)[int(0.95 * len(self.seconds))]


def test_a_hundred_jobs_by_ten_clients_and_quick_lists_and_cancels_meanwhile(make_serve, database):
    serve: Serve = make_serve(database).start()

    lists, cancels = measure(serve)
    if max(lists, cancels) > BAR_S:  # once more: the machine may have had other work
        lists, cancels = measure(serve)

    assert serve.get(JOBS)["total"] % (CLIENTS * EACH) == 0
    assert lists < BAR_S
    assert cancels < BAR_S


def measure(serve: Serve) -> tuple[float, float]:
    """p95 of lists and of cancels while all clients submit."""
    made: queue.SimpleQueue[str] = queue.SimpleQueue()
    lists, cancels = Client(serve), Client(serve)

    def submit(client: int) -> None:
        for number in range(EACH):
            made.put(serve.generate(100_000, name=f"{client}-{number}")["id"])

    def cancel() -> None:
        for _ in range(CLIENTS * EACH):
            cancels.ask("POST", f"{JOBS}/{made.get(timeout=60)}/cancel", 202)

    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        others: list[Future[None]] = [pool.submit(submit, client) for client in range(CLIENTS)]
        others.append(pool.submit(cancel))
        while not all(other.done() for other in others):
            lists.ask("GET", JOBS, 200)
            time.sleep(0.02)
        for other in others:
            other.result()
    return lists.p95(), cancels.p95()
