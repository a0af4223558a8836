"""Whatever is killed, an open page goes on by itself."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("victim", ["dashboard", "api"])
def test_a_page_goes_on_after_a_kill(visit, service, victim):
    page = visit.open("/jobs")
    before = service.children()[victim]

    service.kill_child(victim)

    page.wait_for_function("!window.socket?.connected")
    page.wait_for_function("window.socket?.connected && window.did_handshake")
    page.get_by_role("link", name="Tuning").click()
    page.get_by_role("heading", name="Tuning").wait_for()
    assert service.children()[victim] != before
    visit.faults.clear()  # of the moment in which nobody answered


def test_a_dashboard_that_ends_takes_no_job_with_it(service):
    job = service.generate(40, "beside a kill")
    service.wait_progress(job["id"], 1)

    service.kill_child("dashboard")

    assert service.wait(job["id"], "completed")["attempts"] == 1
