"""Many clients at once: the queue takes them, and lists and cancels are answered meanwhile."""

import queue
from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_service import JOBS, Serve

from waiting import PATIENCE_S

pytestmark = pytest.mark.long

CLIENTS, EACH = 10, 10


@pytest.mark.parametrize("database", [pytest.param("sqlite", marks=pytest.mark.smoke), "postgres"], indirect=True)
def test_a_hundred_jobs_by_ten_clients_with_lists_and_cancels_meanwhile(make_serve, database):
    serve: Serve = make_serve(database).start()
    made: queue.SimpleQueue[str] = queue.SimpleQueue()

    def submit(client: int) -> None:
        for number in range(EACH):
            made.put(serve.generate(100_000, name=f"{client}-{number}")["id"])

    def cancel() -> set[str]:
        return {serve.act(made.get(timeout=PATIENCE_S), "cancel")["id"] for _ in range(CLIENTS * EACH)}

    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        others = [pool.submit(submit, client) for client in range(CLIENTS)]
        cancels = pool.submit(cancel)
        totals = [serve.get(JOBS)["total"]]
        while not cancels.done():
            totals.append(serve.get(JOBS)["total"])
        for other in others:
            other.result()

    assert len(cancels.result()) == CLIENTS * EACH
    assert totals == sorted(totals)
    assert serve.get(JOBS)["total"] == CLIENTS * EACH
