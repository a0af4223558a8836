"""A Ray cluster of simulated nodes for all tests of a file; each node has one CPU and little memory."""

import os
from collections.abc import Iterator

import pytest
from cluster_nodes import Nodes

from brim.rf.config import GenerateConfig


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Nodes]:
    """One node, to which tests add others; RAY_ADDRESS names them: "auto" finds no other cluster of this machine."""
    pytest.importorskip("ray")
    nodes = Nodes()
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = nodes.address
    try:
        yield nodes
    finally:
        if before is None:
            del os.environ["RAY_ADDRESS"]
        else:
            os.environ["RAY_ADDRESS"] = before
        nodes.close()


@pytest.fixture(scope="session")
def config() -> GenerateConfig:
    """Short records and small shards under gates that refuse about half of the attempts."""
    return GenerateConfig(
        tx_power_dbm=20.0, max_gdop=2.5, min_receivers=4, duration_s=0.2, samples_per_shard=8, seed=31
    )
