"""What becomes of requests when a prediction process, an API process or the supervisor dies. Real kills."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from predicting import MODEL, Predicting, ask, client, wait_for

from brim.errors import Unavailable
from brim.service.prediction.client import Predictions
from waiting import until

STAGES = ["inspect", "decode", "forward", "finish"]


def test_a_predictor_killed_while_idle_is_back_for_the_next_request(own):
    async def run(predicting: Predicting) -> None:
        async with client(predicting) as predictions:
            before = (await ask(predictions)).facts["pid"]
            predicting.kill()
            answer = await ask(predictions, b"again")
            assert answer.body == b"again"
            assert answer.facts["pid"] != before

    asyncio.run(run(own()))


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


def test_under_load_every_answer_is_right_whenever_the_predictor_is_killed(own):
    async def one(predictions: Predictions, number: int) -> bool:
        rng = random.Random(number)
        data = b"%d " % number * rng.choice([1, 1000, 40_000])
        await asyncio.sleep(rng.uniform(0, 6))
        answer = await ask(predictions, data, seconds=rng.uniform(0, 0.02))
        return answer.body == data

    async def run(predicting: Predicting) -> None:
        async with client(predicting) as predictions:
            await ask(predictions)
            tasks = [asyncio.create_task(one(predictions, number)) for number in range(300)]
            for _ in range(3):
                await asyncio.sleep(random.uniform(0.5, 1.5))
                predicting.kill()
                await wait_for(lambda: not predictions.is_up)
                await wait_for(lambda: predictions.is_up)
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert set(outcomes) <= {True} or [one for one in outcomes if one is not True] == []
            assert predictions._under_way == {}

    asyncio.run(run(own()))


def test_a_hung_forward_is_ended_and_the_others_are_answered(own):
    async def run(predicting: Predicting) -> None:
        async with client(predicting) as predictions:
            await ask(predictions)
            hung = asyncio.create_task(ask(predictions, at="forward", do="hang"))
            await asyncio.sleep(0.1)
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
            assert (await ask(predictions, b"mine", within_s=60)).body == b"mine"
            with pytest.raises(Unavailable, match='"deadly" cannot be loaded: the prediction process died 3 times'):
                await predictions.request(deadly, b"", deadline_s=time.monotonic() + 30)
            pid = predicting.pid()
            predictions.register([{**deadly, "version": "2"}, MODEL])
            await wait_for(lambda: predicting.supervisor.pids()["predict0"] not in (pid, None))
            assert (await ask(predictions, b"mine", within_s=60)).body == b"mine"

    asyncio.run(run(own()))


def test_a_stopped_predictor_is_killed_and_its_requests_answered(own, monkeypatch):
    monkeypatch.setattr("brim.service.run.supervisor.PREDICT_SILENCE_S", 1.0)

    async def run(predicting: Predicting) -> None:
        async with client(predicting) as predictions:
            await ask(predictions)
            os.kill(predicting.pid(), signal.SIGSTOP)
            assert (await ask(predictions, b"patient")).body == b"patient"

    asyncio.run(run(own(predict_hang_s=1.0)))


@pytest.mark.alone
def test_a_predictor_asked_to_end_gives_the_answers_under_way_and_the_next_one_the_others(own):
    async def run(predicting: Predicting) -> None:
        async with client(predicting) as predictions:
            before = (await ask(predictions)).facts["pid"]
            under_way = asyncio.create_task(ask(predictions, b"first", seconds=0.5))
            await asyncio.sleep(0.1)
            os.kill(predicting.pid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
            later = asyncio.create_task(ask(predictions, b"second"))
            assert ((await under_way).body, (await under_way).facts["pid"]) == (b"first", before)
            assert (await later).body == b"second"
            assert (await later).facts["pid"] != before

    asyncio.run(run(own()))


API = """
import asyncio, sys, time
from pathlib import Path
from brim.service.prediction.client import Predictions
model = {model!r}

async def main():
    async with Predictions([Path({socket!r})]) as predictions:
        asks = [
            predictions.request(model, b"x" * 1_000_000, deadline_s=time.monotonic() + 30, options={{"seconds": 0.2}})
            for _ in range(20)
        ]
        first = asyncio.gather(*asks)
        await asyncio.sleep(0.3)
        print("sent", flush=True)
        await first

asyncio.run(main())
"""


@pytest.mark.alone
def test_requests_of_a_killed_api_process_are_dropped_with_all_they_held(own):
    async def run(predicting: Predicting) -> None:
        async with client(predicting) as predictions:
            await ask(predictions)
            pid = predicting.pid()
            files, memory = held(pid)
            code = API.format(model=MODEL, socket=str(predicting.settings.predict_sockets[0]))
            for _ in range(3):
                api = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
                assert api.stdout is not None
                assert api.stdout.readline() == b"sent\n"
                api.kill()
                api.wait()
                api.stdout.close()
            began_s = time.monotonic()
            assert (await ask(predictions, b"mine")).body == b"mine"
            assert time.monotonic() - began_s < 1.5  # 60 of theirs would take 3 s and more
            await wait_for(lambda: held(pid)[0] <= files, 5.0)
            assert held(pid)[1] < memory + 30e6
            assert predicting.pid() == pid

    asyncio.run(run(own()))


def held(pid: int) -> tuple[int, int]:
    """Open files and resident bytes of a process."""
    status = Path(f"/proc/{pid}/status").read_text().split()
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), 1024 * int(status[status.index("VmRSS:") + 1])


def test_an_api_process_that_does_not_read_keeps_nobody_waiting(own):
    async def run(predicting: Predicting) -> None:
        async with client(predicting) as predictions:
            await ask(predictions)
            code = API.format(model=MODEL, socket=str(predicting.settings.predict_sockets[0]))
            api = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
            assert api.stdout is not None
            assert api.stdout.readline() == b"sent\n"
            os.kill(api.pid, signal.SIGSTOP)
            try:
                for index in range(20):
                    assert (await ask(predictions, b"%d" % index)).body == b"%d" % index
            finally:
                api.kill()
                api.wait()
                api.stdout.close()

    asyncio.run(run(own()))


def test_with_two_predictors_the_death_of_one_is_hardly_noticed(own):
    async def run(predicting: Predicting) -> None:
        async with client(predicting) as predictions:
            predictions.register([MODEL])
            await wait_for(lambda: len(predictions._links) == 2)
            asks = [asyncio.create_task(ask(predictions, b"%d" % index, seconds=0.05)) for index in range(20)]
            await asyncio.sleep(0.05)
            predicting.kill(0)
            answers = await asyncio.gather(*asks)
            assert [answer.body for answer in answers] == [b"%d" % index for index in range(20)]
            await wait_for(lambda: len(predictions._links) == 2)

    asyncio.run(run(own(predictors=2)))


@pytest.mark.alone
def test_two_predictors_share_what_arrives_at_once(own):
    async def run(predicting: Predicting) -> None:
        async with client(predicting) as predictions:
            predictions.register([MODEL])
            await wait_for(lambda: len(predictions._links) == 2)
            for _ in range(10):  # both have it by then, and know how long it takes
                await asyncio.gather(*(ask(predictions, seconds=0.01) for _ in range(4)))
                await asyncio.sleep(0.2)
            answers = await asyncio.gather(*(ask(predictions, seconds=0.01) for _ in range(40)))
            pids = [answer.facts["pid"] for answer in answers]
            assert min(pids.count(pid) for pid in set(pids)) >= 4  # fewer to one that others on the machine slow
            assert len(set(pids)) == 2

    asyncio.run(run(own(predictors=2)))


def test_a_predictor_ends_with_its_supervisor(tmp_path):
    code = f"""
import sys, time
sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}
from pathlib import Path
from predicting import Predicting
with Predicting(Path({str(tmp_path)!r})) as made:
    print(made.pid(), flush=True)
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}").exists()

    parent.kill()
    parent.wait()
    parent.stdout.close()

    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])
