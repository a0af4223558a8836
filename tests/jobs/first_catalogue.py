"""The tables of version 0001, as the first services made them: they do not change with those of today."""

import sqlalchemy as sa

_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def create(op) -> None:
    op.create_table(
        "meta",
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("value", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_meta"),
    )
    _create_jobs(op)
    _create_events(op)
    _create_datasets(op)
    _create_runs(op)
    _create_uses(op)
    op.create_table(
        "devices",
        sa.Column("worker", sa.Text, nullable=False),
        sa.Column("info", sa.JSON, nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("worker", name="pk_devices"),
    )


def _create_jobs(op) -> None:
    op.create_table(
        "jobs",
        sa.Column("number", _BIG, sa.Identity(), nullable=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("wanted", sa.Text, nullable=False),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("inputs", sa.JSON, nullable=False),
        sa.Column("makes", sa.Text, nullable=False),
        sa.Column("output_id", sa.Text, nullable=False),
        sa.Column("result", sa.JSON),
        sa.Column("error", sa.Text),
        sa.Column("key_hash", sa.Text),
        sa.Column("worker", sa.Text),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("deaths", sa.Integer, nullable=False),
        sa.Column("deaths_at", sa.BigInteger, nullable=False),
        sa.Column("current", sa.BigInteger, nullable=False),
        sa.Column("total", sa.BigInteger, nullable=False),
        sa.Column("rate", sa.Float(53), nullable=False),
        sa.Column("eta_s", sa.Float(53)),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("event_seq", sa.Integer, nullable=False),
        sa.Column("stopping_at", sa.Float(53)),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("queued_at", sa.Float(53)),
        sa.Column("started_at", sa.Float(53)),
        sa.Column("finished_at", sa.Float(53)),
        sa.Column("updated_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_jobs"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
        sa.UniqueConstraint("key_hash", name="uq_jobs_key_hash"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_jobs_status_number", "jobs", ["status", "number"])
    op.create_index("ix_jobs_kind_number", "jobs", ["kind", "number"])


def _create_events(op) -> None:
    op.create_table(
        "events",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "seq", name="pk_events"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_events_job_id", ondelete="CASCADE"),
    )


def _create_datasets(op) -> None:
    op.create_table(
        "datasets",
        sa.Column("number", _BIG, sa.Identity(), nullable=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("owned", sa.Boolean, nullable=False),
        sa.Column("items", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("job_id", sa.Text),
        sa.Column("about", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_datasets"),
        sa.UniqueConstraint("id", name="uq_datasets_id"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_datasets_job_id", ondelete="SET NULL"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_datasets_job_id", "datasets", ["job_id"])


def _create_runs(op) -> None:
    op.create_table(
        "runs",
        sa.Column("number", _BIG, sa.Identity(), nullable=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("summary", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_runs"),
        sa.UniqueConstraint("id", name="uq_runs_id"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_runs_job_id", ondelete="SET NULL"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_runs_job_id", "runs", ["job_id"])


def _create_uses(op) -> None:
    op.create_table(
        "uses",
        sa.Column("number", _BIG, sa.Identity(), nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("dataset_id", sa.Text),
        sa.Column("run_id", sa.Text),
        sa.PrimaryKeyConstraint("number", name="pk_uses"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_uses_job_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name="fk_uses_dataset_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_uses_run_id", ondelete="CASCADE"),
    )
    for column in ("job_id", "dataset_id", "run_id"):
        op.create_index(f"ix_uses_{column}", "uses", [column])
