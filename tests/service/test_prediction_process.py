"""Requests through shared memory to a prediction process and back, and what becomes of them when processes die."""

import asyncio
import os
import time
from collections.abc import Iterator

import pytest
from predicting import MODEL, Predicting, ask, client, gate, is_held, wait_for

from brim.errors import DeadlinePassed, ImageError, Overloaded
from brim.service.prediction.channel import SharedBytes


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Predicting]:
    """For tests that leave it as it was."""
    with Predicting(tmp_path_factory.mktemp("predicting")) as made:
        yield made


# The way there and back


def test_an_answer_is_that_of_its_own_request(shared):
    async def run() -> None:
        async with client(shared) as predictions:
            sent = [os.urandom(size) for size in (0, 1, 1000, 300_000, 5_000_000) * 4]
            answers = await asyncio.gather(*(ask(predictions, data) for data in sent))
            assert [answer.body for answer in answers] == sent
            assert {answer.media_type for answer in answers} == {"text/plain"}
            assert predictions._under_way == {}

    asyncio.run(run())


def test_one_that_is_refused_or_fails_fails_alone(shared):
    async def run() -> None:
        async with client(shared) as predictions:
            good = [ask(predictions, b"%d" % index) for index in range(6)]
            bad = [ask(predictions, at=stage, do=what) for stage in ("decode", "finish") for what in ("refuse", "fail")]
            answers = await asyncio.gather(*good, *bad, return_exceptions=True)
            assert [answer.body for answer in answers[:6]] == [b"%d" % index for index in range(6)]
            assert [type(failure) for failure in answers[6:]] == [ImageError, RuntimeError] * 2
            assert "does not like this one" in str(answers[6])
            assert "as it was told" not in str(answers[7])  # that is for the log

    asyncio.run(run())


def test_a_cancelled_request_is_forgotten_at_once_while_its_bytes_are_still_read(shared, tmp_path):
    async def run() -> None:
        async with client(shared) as predictions:
            await ask(predictions)
            payload = SharedBytes.of(b"y" * 100_000)
            with gate(tmp_path / "gate") as held:
                options = {"at": "decode", **held}
                request = predictions.request(MODEL, payload, deadline_s=time.monotonic() + 600, options=options)
                task = asyncio.create_task(request)
                await wait_for(lambda: is_held(tmp_path / "gate"))
                task.cancel()
                await asyncio.wait([task])
                payload.close()
                assert task.cancelled()
                assert predictions._under_way == {}
            assert (await ask(predictions)).body == b"x"

    asyncio.run(run())


def test_what_waits_is_given_up_at_its_deadline_and_its_bytes_come_back(shared, tmp_path):
    async def run() -> None:
        async with client(shared) as predictions:
            await ask(predictions)
            with gate(tmp_path / "gate") as held:
                busy = asyncio.create_task(ask(predictions, at="forward", **held))
                await wait_for(lambda: is_held(tmp_path / "gate"))
                with pytest.raises((DeadlinePassed, Overloaded)):
                    await ask(predictions, within_s=0.3)
                assert len(predictions._under_way) == 1
            assert (await busy).body == b"x"
            assert predictions._under_way == {}

    asyncio.run(run())
