"""A Ray cluster of simulated nodes in a process of its own: a line of JSON in, a line out; it ends with its input.

Apart from the tests, because Ray leaves files open and says so, which would fail them.
"""

import json
import sys
from typing import Any

STORE_BYTES = 100 * 2**20


def main(client_port: int) -> None:
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**small, "include_dashboard": False, "ray_client_server_port": client_port},
    )
    nodes: list[Any] = []
    say(cluster.address)
    for line in sys.stdin:
        what, value = json.loads(line)
        if what == "add":
            nodes.append(cluster.add_node(**{**small, **value}))
            say(len(nodes) - 1)
        else:  # "kill": as if its power failed
            cluster.remove_node(nodes[value], allow_graceful=what == "leave")
            say(value)
    cluster.shutdown()


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]))
