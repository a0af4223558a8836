"""What Alembic runs for a migration; the connection and its transaction are the caller's."""

from alembic import context

from brim.jobs.store.engine import VERSION_TABLE
from brim.jobs.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,  # SQLite changes a table by making it anew
)
context.run_migrations()
