"""The tables of version 0001, as the first services made them: they do not change with those of today."""

import sqlalchemy as sa

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")
TYPES = {
    "text": sa.Text,
    "json": sa.JSON,
    "int": sa.Integer,
    "big": sa.BigInteger,
    "real": lambda: sa.Float(53),
    "bool": sa.Boolean,
}
# Each table's columns; one with ? may be null.
JOBS = """
    id:text kind:text name:text status:text wanted:text config:json inputs:json makes:text output_id:text result:json?
    error:text? key_hash:text? worker:text? attempts:int deaths:int deaths_at:big current:big total:big rate:real
    eta_s:real? message:text event_seq:int stopping_at:real? created_at:real queued_at:real? started_at:real?
    finished_at:real? updated_at:real
"""
EVENTS = "job_id:text seq:int kind:text data:json at:real"
DATASETS = """
    id:text name:text kind:text state:text path:text owned:bool items:big bytes:big job_id:text? about:json
    created_at:real
"""
RUNS = "id:text name:text kind:text state:text path:text job_id:text? config:json summary:json created_at:real"
USES = "job_id:text dataset_id:text? run_id:text?"


def create(op) -> None:
    table(op, "meta", "key:text value:text", key=["key"])
    table(op, "jobs", JOBS, unique("jobs", "id"), unique("jobs", "key_hash"))
    table(op, "events", EVENTS, to("events", "job_id", "CASCADE"), key=["job_id", "seq"])
    for name, columns in (("datasets", DATASETS), ("runs", RUNS)):
        table(op, name, columns, unique(name, "id"), to(name, "job_id", "SET NULL"))
    table(op, "uses", USES, *(to("uses", name, "CASCADE") for name in ("job_id", "dataset_id", "run_id")))
    table(op, "devices", "worker:text info:json at:real", key=["worker"])
    indexes = [("jobs", "status", "number"), ("jobs", "kind", "number"), ("datasets", "job_id"), ("runs", "job_id")]
    indexes += [("uses", "job_id"), ("uses", "dataset_id"), ("uses", "run_id")]
    for name, *columns in indexes:
        op.create_index("_".join(("ix", name, *columns)), name, columns)


def table(op, name: str, columns: str, *parts, key=("number",)) -> None:
    """A table of these columns, after the number of its rows where that is its key."""
    made = [sa.Column("number", BIG, sa.Identity(), nullable=False)] if key == ("number",) else []
    counts = bool(made) and name != "uses"  # numbers are not used again
    for column, _, kind in (word.partition(":") for word in columns.split()):
        made.append(sa.Column(column, TYPES[kind.rstrip("?")](), nullable=kind.endswith("?")))
    primary = sa.PrimaryKeyConstraint(*key, name=f"pk_{name}")
    op.create_table(name, *made, primary, *parts, sqlite_autoincrement=counts)


def unique(name: str, column: str) -> sa.UniqueConstraint:
    return sa.UniqueConstraint(column, name=f"uq_{name}_{column}")


def to(name: str, column: str, ondelete: str) -> sa.ForeignKeyConstraint:
    other = f"{column.removesuffix('_id')}s.id"
    return sa.ForeignKeyConstraint([column], [other], name=f"fk_{name}_{column}", ondelete=ondelete)
