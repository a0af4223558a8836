"""Every page of the dashboard, in the order of the navigation."""

from brim.service.dashboard import dataset, datasets, job, job_form, jobs, now, run, runs, segment, tuning
from brim.service.dashboard.client import Api


def add_all(api: Api) -> None:
    """Make the pages known to the server."""
    # /jobs/new before /jobs/{id}
    for page in (now, jobs, job_form, job, datasets, dataset, runs, run, tuning, segment):
        page.add(api)
