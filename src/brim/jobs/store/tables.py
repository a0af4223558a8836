"""The tables of the catalogue: what people see of jobs, datasets, runs and models.

Times are seconds since 1970, UTC. Rows are ordered by `number`, never by a time: clocks jump. Ids are opaque.
On PostgreSQL the tables live in the schema `brim`, beside that of the job library; on SQLite in a file of their own.
"""

from typing import Final

import sqlalchemy as sa

SCHEMA: Final = "brim"  # PostgreSQL only

metadata: Final = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
    }
)


def _number() -> sa.Column[int]:
    """The order of insertion; SQLite counts only its own kind of primary key."""
    return sa.Column("number", _BIG, sa.Identity(), primary_key=True)


_BIG: Final = sa.BigInteger().with_variant(sa.Integer, "sqlite")

meta = sa.Table(
    "meta",
    metadata,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

jobs = sa.Table(
    "jobs",
    metadata,
    _number(),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("wanted", sa.Text, nullable=False),
    sa.Column("config", sa.JSON, nullable=False),
    sa.Column("inputs", sa.JSON, nullable=False),
    sa.Column("makes", sa.Text, nullable=False),  # dataset, run or result
    sa.Column("output_id", sa.Text, nullable=False),  # of the dataset or run it makes; the job's own for a result
    sa.Column("result", sa.JSON(none_as_null=True)),
    sa.Column("error", sa.Text),
    sa.Column("failure", sa.JSON(none_as_null=True)),  # field, code and hint of the error
    sa.Column("key_hash", sa.Text, unique=True),  # of the Idempotency-Key
    sa.Column("worker", sa.Text),  # that runs it now
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("deaths", sa.Integer, nullable=False),  # of its workers, in a row without getting further
    sa.Column("deaths_at", sa.BigInteger, nullable=False),  # `current` at the last of them
    sa.Column("current", sa.BigInteger, nullable=False),
    sa.Column("total", sa.BigInteger, nullable=False),
    sa.Column("rate", sa.Float(53), nullable=False),
    sa.Column("eta_s", sa.Float(53)),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("event_seq", sa.Integer, nullable=False),  # of its newest event
    sa.Column("stopping_at", sa.Float(53)),  # when a stop was first asked for
    sa.Column("created_at", sa.Float(53), nullable=False),
    sa.Column("queued_at", sa.Float(53)),
    sa.Column("started_at", sa.Float(53)),
    sa.Column("finished_at", sa.Float(53)),
    sa.Column("updated_at", sa.Float(53), nullable=False),
    sa.Index(None, "status", "number"),
    sa.Index(None, "kind", "number"),
    sqlite_autoincrement=True,
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),  # status, progress or log
    sa.Column("data", sa.JSON, nullable=False),
    sa.Column("at", sa.Float(53), nullable=False),
)

datasets = sa.Table(
    "datasets",
    metadata,
    _number(),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),  # rf, images or sequences
    sa.Column("state", sa.Text, nullable=False),  # writing, ready, partial or deleting
    sa.Column(
        "path", sa.Text, nullable=False
    ),  # within the data directory, or absolute where an administrator added it
    sa.Column("owned", sa.Boolean, nullable=False),  # whether deleting it deletes its files
    sa.Column("items", sa.BigInteger, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id", ondelete="SET NULL"), index=True),  # that made it
    sa.Column("about", sa.JSON, nullable=False),
    sa.Column("created_at", sa.Float(53), nullable=False),
    sqlite_autoincrement=True,
)

runs = sa.Table(
    "runs",
    metadata,
    _number(),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),  # of the job that made it, such as rf.train
    sa.Column("state", sa.Text, nullable=False),  # training, ready or partial
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id", ondelete="SET NULL"), index=True),
    sa.Column("config", sa.JSON, nullable=False),
    sa.Column("summary", sa.JSON, nullable=False),
    sa.Column("created_at", sa.Float(53), nullable=False),
    sqlite_autoincrement=True,
)

uses = sa.Table(  # what a job reads: not deleted while it may still run
    "uses",
    metadata,
    sa.Column("number", _BIG, sa.Identity(), primary_key=True),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("dataset_id", sa.Text, sa.ForeignKey("datasets.id", ondelete="CASCADE"), index=True),
    sa.Column("run_id", sa.Text, sa.ForeignKey("runs.id", ondelete="CASCADE"), index=True),
)

models = sa.Table(  # what requests may name, in the service's own process of predictions
    "models",
    metadata,
    _number(),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("kind", sa.Text, nullable=False),  # segment, locate or classify
    sa.Column("network", sa.Text, nullable=False),
    sa.Column("path", sa.Text, nullable=False),  # absolute: a run's directory or a file of weights
    sa.Column("version", sa.Text, nullable=False),  # another each time it is added
    sa.Column("about", sa.JSON, nullable=False),
    sa.Column("added_at", sa.Float(53), nullable=False),
    sqlite_autoincrement=True,
)

devices = sa.Table(  # what each worker computes on, as it said when it started
    "devices",
    metadata,
    sa.Column("worker", sa.Text, primary_key=True),
    sa.Column("info", sa.JSON, nullable=False),
    sa.Column("at", sa.Float(53), nullable=False),
)
