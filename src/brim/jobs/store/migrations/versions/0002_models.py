"""Models that requests may name."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "models",
        sa.Column("number", _BIG, sa.Identity(), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("network", sa.Text, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("about", sa.JSON, nullable=False),
        sa.Column("added_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_models"),
        sa.UniqueConstraint("name", name="uq_models_name"),
        sqlite_autoincrement=True,
    )
