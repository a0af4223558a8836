"""The first version. A new database gets the tables of today at once, so only those that have these come by here."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Nothing: its tables exist."""
