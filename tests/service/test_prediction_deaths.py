"""What becomes of requests when a prediction process, an API process or the supervisor dies. Real kills."""

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from predicting import MODEL, Predicting, ask, client, gate, is_held, wait_for

from brim.errors import Unavailable
from brim.service.prediction.channel import LIMITS_S
from brim.service.prediction.client import Predictions
from brim.service.prediction.process.predictor import Peer
from brim.service.run.unix_socket import listen, short_name
from waiting import PATIENCE_S

STAGES = ["inspect", "decode", "forward", "finish"]


@pytest.mark.parametrize("stage", STAGES)
def test_what_was_worked_on_in_a_death_is_answered_by_the_next_predictor_and_runs_alone(own, tmp_path, stage):
    async def run(predicting: Predicting) -> None:
        async with client(predicting) as predictions:
            before = (await ask(predictions)).facts["pid"]
            answer = await ask(predictions, b"mine", at=stage, do="kill", once=str(tmp_path / "once"))
            assert answer.body == b"mine"
            assert answer.facts["pid"] != before
            assert answer.facts["batch"] == 1
            assert predictions._under_way == {}

    asyncio.run(run(own()))


@pytest.mark.parametrize("stage", STAGES)
def test_only_a_request_that_kills_twice_fails(own, stage):
    async def run(predicting: Predicting) -> None:
        async with client(predicting) as predictions:
            await ask(predictions)
            poison = ask(predictions, b"poison", at=stage, do="kill")
            others = [ask(predictions, b"%d" % index, seconds=0.01) for index in range(12)]
            failed, *answers = await asyncio.gather(poison, *others, return_exceptions=True)
            assert isinstance(failed, Unavailable)
            assert "died twice" in str(failed)
            assert [getattr(answer, "body", answer) for answer in answers] == [b"%d" % index for index in range(12)]
            assert predictions._under_way == {}

    asyncio.run(run(own()))


def test_a_hung_forward_is_ended_and_the_others_are_answered(own, tmp_path):
    async def run(predicting: Predicting) -> None:
        async with client(predicting) as predictions:
            await ask(predictions)
            hung = asyncio.create_task(ask(predictions, at="forward", do="hold", gate=str(tmp_path / "never")))
            await wait_for(lambda: is_held(tmp_path / "never"))
            others = [ask(predictions, b"%d" % index) for index in range(5)]
            answers = await asyncio.gather(*others)
            assert [answer.body for answer in answers] == [b"%d" % index for index in range(5)]
            with pytest.raises(Unavailable, match="died twice"):
                await hung

    asyncio.run(run(own(predict_hang_s=1.0)))


def test_a_model_whose_loading_kills_is_left_alone_and_the_others_answer(own):
    deadly = {**MODEL, "name": "deadly"}

    async def run(predicting: Predicting) -> None:
        async with client(predicting) as predictions:
            predictions.register([deadly, MODEL])
            assert (await ask(predictions, b"mine")).body == b"mine"
            with pytest.raises(Unavailable, match='"deadly" cannot be loaded: the prediction process died 3 times'):
                await predictions.request(deadly, b"", deadline_s=time.monotonic() + PATIENCE_S)
            pid = predicting.pid()
            predictions.register([{**deadly, "version": "2"}, MODEL])
            await wait_for(lambda: predicting.supervisor.pids()["predict0"] not in (pid, None))
            assert (await ask(predictions, b"mine")).body == b"mine"

    asyncio.run(run(own()))


def test_a_predictor_asked_to_end_gives_the_answers_under_way_and_the_next_one_the_others(own, tmp_path):
    async def run(predicting: Predicting) -> None:
        async with client(predicting) as predictions:
            before = (await ask(predictions)).facts["pid"]
            with gate(tmp_path / "gate") as held:
                under_way = asyncio.create_task(ask(predictions, b"first", at="forward", **held))
                await wait_for(lambda: is_held(tmp_path / "gate"))
                os.kill(predicting.pid(), signal.SIGTERM)
                await wait_for(lambda: not listens(predicting.settings.predict_sockets[0]))
                later = asyncio.create_task(ask(predictions, b"second"))
            assert ((await under_way).body, (await under_way).facts["pid"]) == (b"first", before)
            assert (await later).body == b"second"
            assert (await later).facts["pid"] != before

    asyncio.run(run(own()))


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking, short_name(path) as name:
        return asking.connect_ex(name) == 0


def test_requests_of_an_api_process_that_ends_are_dropped_with_all_they_held(own, tmp_path):
    async def run(predicting: Predicting) -> None:
        async with client(predicting) as predictions:
            before = (await ask(predictions)).facts["forwards"]
            files = Path(f"/proc/{predicting.pid()}/fd")
            num_files = len(list(files.iterdir()))
            with gate(tmp_path / "gate") as first:
                async with client(predicting) as theirs:
                    asks = [ask(theirs, b"x" * 1_000_000, at="forward", **first) for _ in range(20)]
                    lost = [asyncio.create_task(one) for one in asks]
                    await wait_for(lambda: has_requests(predictions, range(20, 21)))
                await wait_for(lambda: has_requests(predictions, range(10)))  # at most those of the batch that runs
            mine = await ask(predictions, b"mine")
            assert mine.body == b"mine"
            assert mine.facts["forwards"] - before < 5  # 20 of theirs would be 5 and more
            await wait_for(lambda: len(list(files.iterdir())) <= num_files)
            assert {type(one) for one in await asyncio.gather(*lost, return_exceptions=True)} == {Unavailable}

    async def has_requests(predictions: Predictions, nums: range) -> bool:
        return (await predictions.snapshot())[0]["requests"] in nums

    asyncio.run(run(own(predict_hang_s=PATIENCE_S)))


@pytest.mark.parametrize(("waits_s", "shares"), [((0.1, 0.1), (20, 20)), ((0.1, 0.3), (30, 10))])
def test_two_predictors_share_what_arrives_at_once_by_how_long_each_takes(tmp_path, waits_s, shares):
    """The predictors only say how long they take, and answer nothing."""
    paths = [tmp_path / "0.sock", tmp_path / "1.sock"]
    listening = [listen(path, socket.SOCK_SEQPACKET) for path in paths]

    async def run() -> tuple[int, ...]:
        async with Predictions(paths) as predictions:
            peers = [Peer((await asyncio.to_thread(one.accept))[0], lambda: None) for one in listening]
            for peer, wait_s in zip(peers, waits_s, strict=True):
                peer.page.publish({"toy": [wait_s] * len(LIMITS_S)})
            await wait_for(lambda: len(predictions._links) == 2)
            asked = [asyncio.create_task(ask(predictions)) for _ in range(40)]
            await wait_for(lambda: len(predictions._under_way) == 40)
            received = tuple(len(list(iter(peer.channel.receive, None))) for peer in peers)
        await asyncio.gather(*asked, return_exceptions=True)
        for end in (*listening, *(peer.channel for peer in peers)):
            end.close()
        return received

    assert asyncio.run(run()) == shares
