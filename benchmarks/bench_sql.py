"""How much faster is one bulk read from PostgreSQL than one query per batch?

    python benchmarks/bench_sql.py --url postgresql://user:password@host/database [--rows 100000]

A table of numbers is made in the database and dropped at the end. One epoch of shuffled batches of 256 rows is read
both ways: all rows once through Arrow and batches from memory, or every batch by its own query over the keys.
"""

import argparse
import json
import random
import time
from typing import Any

import torch

from brim.engine.rows import Resident, SqlSource
from page import machine, number, table, tell

BATCH = 256
COLUMNS = 20
MAX_QUERIES = 100  # batches read by queries; their rate does not change with more


def main() -> None:
    """Make the table, read it both ways, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", required=True, help="a PostgreSQL database that may be written to")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--commit", default=None)
    options = parser.parse_args()
    results = {"machine": machine(torch.device("cpu"), options.commit), **measure(options.url, options.rows)}
    ways = [
        ["one bulk read, and its first epoch", results["bulk_rows_per_s"]],
        ["every epoch after it", results["later_rows_per_s"]],
        ["one query per batch", results["query_rows_per_s"]],
    ]
    base = results["query_rows_per_s"]
    rows = [[name, number(rate), f"{rate / base:.1f}"] for name, rate in ways]
    title = f"PostgreSQL, {options.rows} rows of {COLUMNS} columns, shuffled batches of {BATCH}"
    print(table(title, ["way", "rows/s", "× as fast"], rows))
    print(json.dumps(results))


def measure(url: str, num_rows: int) -> dict[str, Any]:
    """Rows per second of an epoch both ways."""
    import adbc_driver_postgresql.dbapi as driver

    names = [f"c{k}" for k in range(COLUMNS)]
    chosen = ", ".join(names)
    with driver.connect(url, autocommit=True) as connection, connection.cursor() as cursor:
        tell(f"writing {num_rows} rows")
        values = ", ".join(f"random()::float4 AS {name}" for name in names)
        cursor.execute("DROP TABLE IF EXISTS brim_bench")
        cursor.execute(f"CREATE TABLE brim_bench AS SELECT i AS id, {values} FROM generate_series(1, {num_rows}) AS i")
        cursor.execute("ALTER TABLE brim_bench ADD PRIMARY KEY (id)")
        try:
            bulk = read_in_bulk(url, f"SELECT {chosen} FROM brim_bench ORDER BY id")
            tell("one query per batch")
            order = random.Random(0).sample(range(1, num_rows + 1), num_rows)
            batches = [order[at : at + BATCH] for at in range(0, num_rows, BATCH)][:MAX_QUERIES]
            began_s = time.perf_counter()
            for keys in batches:
                cursor.execute(f"SELECT {chosen} FROM brim_bench WHERE id IN ({','.join(map(str, keys))})")
                found = cursor.fetch_arrow_table()
                assert found.num_rows == len(keys)
                {name: torch.from_numpy(found[name].to_numpy().copy()) for name in names}
            query_s = time.perf_counter() - began_s
        finally:
            cursor.execute("DROP TABLE brim_bench")
    return bulk | {"query_rows_per_s": sum(map(len, batches)) / query_s}


def read_in_bulk(url: str, query: str) -> dict[str, Any]:
    """Rows per second of the first epoch, reading included, and of the second."""
    tell("one bulk read")
    began_s = time.perf_counter()
    source = SqlSource(url, query)
    with Resident(source, batch_size=BATCH, device=torch.device("cpu"), tier="vram") as resident:
        num_rows = sum(len(batch["c0"]) for batch in resident.epoch(0))
        first_s = time.perf_counter() - began_s
        sum(len(batch["c0"]) for batch in resident.epoch(1))
        later_s = time.perf_counter() - began_s - first_s
    return {"rows": num_rows, "bulk_rows_per_s": num_rows / first_s, "later_rows_per_s": num_rows / later_s}


if __name__ == "__main__":
    main()
