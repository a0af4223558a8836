"""Every page of the dashboard, in the order of the navigation."""

from brim.service.dashboard import now
from brim.service.dashboard.client import Api


def add_all(api: Api) -> None:
    """Make the pages known to the server."""
    for page in (now,):
        page.add(api)
