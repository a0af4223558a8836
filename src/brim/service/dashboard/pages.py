"""Every page of the dashboard, in the order of the navigation."""

from brim.service.dashboard import job, job_form, jobs, now, segment, tuning
from brim.service.dashboard.client import Api


def add_all(api: Api) -> None:
    """Make the pages known to the server."""
    for page in (now, jobs, job_form, job, tuning, segment):  # /jobs/new before /jobs/{id}
        page.add(api)
