"""Where workers run: devices of this machine, nodes of a cluster, and who else could reach them."""

import dataclasses
import http.server
import threading
from types import SimpleNamespace

import pytest
import torch

from brim.cluster import exposure, processes, ray_connect
from brim.cluster.exposure import Listener
from brim.cluster.processes import ProcessPool, device_names
from brim.cluster.ray_connect import Node, check_address, check_versions
from brim.cluster.ray_pool import RayPool
from brim.errors import ClusterError, ConfigError, DeviceError
from brim.rf.generation.pool import WorkerLost

# Devices of this machine


def test_devices_are_named_as_people_write_them(monkeypatch):
    assert device_names("cpu,cpu") == device_names(" cpu , cpu ") == device_names(2) == ("cpu", "cpu")
    assert device_names("all") == ("cpu",)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(processes, "resolve_device", torch.device)
    assert device_names("all") == device_names(3) == ("cuda:0", "cuda:1", "cuda:2")
    assert device_names("2,cpu,cuda:0") == ("cuda:2", "cpu", "cuda:0")
    for devices, family, said in (("0,1,0", ConfigError, "names cuda:0 twice"), (4, DeviceError, "more than the 3")):
        with pytest.raises(family, match=said):
            device_names(devices)


@pytest.mark.parametrize(
    ("devices", "family", "said"),
    [("gpu", ConfigError, '"gpu" is no device'), ("cpu,", ConfigError, "is no device"), ("99", DeviceError, "cuda:99")],
)
def test_devices_that_are_not_here_are_refused(devices, family, said):
    with pytest.raises(family, match=said):
        device_names(devices)


def test_workers_on_the_cpu_share_its_cores_and_names_tell_them_apart(monkeypatch):
    monkeypatch.setattr(processes, "worker_count", lambda: 7)
    launched = []
    pool = ProcessPool(["cpu", "cuda:1", "cpu"])
    pool._launch = lambda *args: launched.append(args)

    assert pool.start(SimpleNamespace()) == 3
    assert launched == [("cpu#0", "cpu", 3), ("cuda:1", "cuda:1", None), ("cpu#1", "cpu", 3)]


def test_a_worker_that_dies_again_and_again_is_replaced_five_times(monkeypatch):
    opens = "import sys; from multiprocessing.connection import Connection as C; here = C(int(sys.argv[1]))"
    dies = "here.recv(); here.recv(); here.send(('ready', 0, None)); sys.exit(4)"
    monkeypatch.setattr(processes, "_ENTRY", f"{opens}; {dies}")
    pool, seen = ProcessPool(["cpu"]), []
    pool.start(SimpleNamespace())

    while pool._workers and len(seen) < 20:
        seen += pool.wait(5.0)
    pool.close()

    lost = [event for event in seen if isinstance(event, WorkerLost)]
    assert [event.worker for event in lost] == [0, 1, 2, 3, 4, 5]
    assert "worker cpu died: its process ended with exit code 4" in str(lost[0].error)


def test_the_gpus_of_a_process_are_those_it_sees(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7")
    assert processes._environment("cuda:1")["CUDA_VISIBLE_DEVICES"] == "GPU-7"
    assert processes._environment("cpu")["CUDA_VISIBLE_DEVICES"] == "3,GPU-7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert processes._environment("cuda:1")["CUDA_VISIBLE_DEVICES"] == "1"


# Nodes


def node(host="a", cpus=4.0, gpus=0.0, **versions):
    return Node(id=f"id-{host}", host=host, cpus=cpus, gpus=gpus, free_bytes=2**33, versions=versions)


@pytest.mark.parametrize(
    ("use_gpus", "launched"),
    [(True, [("a", "id-a", None), ("a", "id-a", None)]), (False, [("a", "id-a", 8), ("b", "id-b", 4)])],
)
def test_there_is_a_worker_for_each_gpu_or_for_each_node_with_its_cores(monkeypatch, use_gpus, launched):
    pytest.importorskip("ray")
    cluster = SimpleNamespace(address="auto", nodes=(node("a", 8.0, 2.0), node("b"), node("c", 0.5)))
    pool, found = RayPool(cluster, use_gpus=use_gpus), []
    pool._ray = SimpleNamespace(put=lambda assignment: assignment)

    def launch(host, id, *, threads):
        found.append((host, id, threads))
        pool._workers[len(found)] = None

    pool._launch = launch
    assert pool.start(SimpleNamespace()) == len(launched)
    assert found == launched
    cluster.nodes, pool._workers = (node("c", 0.5),), {}
    with pytest.raises(ClusterError, match="neither GPUs nor CPUs"):
        pool.start(SimpleNamespace())


def fake_ray(ended):
    """Actors whose calls end when a test says so: with a value, or with None as those of a dead node."""

    def get(ref):
        if ended[ref] is None:
            raise RuntimeError("The actor died.\nIts node is gone.\n")
        return ended[ref]

    def make(**given):
        ray.options.append(given)
        number = len(ray.options)
        begin, call = (SimpleNamespace(remote=lambda *v, k=k: (k, number, v[-1])) for k in ("open", "call"))
        return SimpleNamespace(remote=lambda: SimpleNamespace(number=number, open=begin, call=call))

    ray = SimpleNamespace(get=get, put=lambda value: value, options=[], killed=[])
    ray.remote, ray.exceptions = lambda _: SimpleNamespace(options=make), SimpleNamespace(RayError=RuntimeError)
    ray.wait = lambda refs, **_: ([ref for ref in refs if ref in ended], [])
    ray.kill = lambda handle: ray.killed.append(handle.number)
    return ray


def test_an_actor_that_dies_again_and_again_is_replaced_five_times_anywhere():
    pytest.importorskip("ray")
    only = dataclasses.replace(node(cpus=8.0), id="ab" * 28)
    pool, ended = RayPool(SimpleNamespace(address="auto", nodes=(only,))), {}
    pool._ray = ray = fake_ray(ended)
    pool.start(SimpleNamespace())

    for number in range(1, 7):
        ended["open", number, 8] = "ready", None
        (ready,) = pool.wait(0)
        pool.submit(ready.worker, "a"), pool.submit(ready.worker, "b")
        ended["call", number, "a"] = None
        (lost,) = pool.wait(0)
        assert (lost.worker, lost.was_ready, "node is gone" in str(lost.error)) == (number - 1, True, True)

    assert pool._workers == pool._refs == {}  # nobody waits for "b"
    assert ray.killed == [1, 2, 3, 4, 5, 6]
    assert [(one["num_cpus"], one["num_gpus"]) for one in ray.options] == [(8, 0)] * 6
    assert [one["scheduling_strategy"] for one in ray.options[1:]] == ["SPREAD"] * 5


def test_nodes_with_other_versions_are_refused_by_name():
    here = ray_connect._make_probe()()["versions"]

    check_versions([node(**here)])
    for name in ("python", "brim", "torch", "ray"):
        for installed, said in (("0.0.1", f"node b has {name} 0.0.1, this"), (None, f"node b has no {name}, this")):
            with pytest.raises(ClusterError, match=said):
                check_versions([node(**here), node("b", **{**here, name: installed})])


@pytest.mark.parametrize(
    ("address", "is_one"),
    [
        ("auto", True), ("local", True), ("ray://head", True), ("ray://10.0.0.1:65535/", True), ("ray://[::1]:9", True),
        ("ray://head:65536", False), ("ray://head:0", False), ("10.0.0.1:6379", False), ("ray://a b", False),
        ("ray://::1", False), ("ray://head/path", False), ("http://head", False),
    ],
)  # fmt: skip
def test_what_is_an_address(address, is_one):
    if is_one:
        check_address(address)
    else:
        with pytest.raises(ConfigError, match="use auto, local or ray://HOST:PORT"):
            check_address(address)


def test_a_port_that_is_left_out_is_rays_own(monkeypatch):
    pytest.importorskip("ray")
    assert ray_connect._find("ray://head") == ray_connect._find("ray://head/") == "ray://head:10001"
    assert ray_connect._find("ray://head:7") == "ray://head:7"
    monkeypatch.setenv("RAY_ADDRESS", "ray://other:9")
    assert ray_connect._find("auto") == "ray://other:9"


# Who else could reach them


def test_the_kernels_tables_are_read(tmp_path):
    """Lines as Linux writes them: words of an address in the machine's order of bytes."""
    proc = tmp_path
    (proc / "net").mkdir()
    head, rest = "sl local_address rem_address st", "00000000:00000000 00:00000000 00000000 1000 0"
    v6 = "B80D0120000000000000000001000000"  # 2001:db8::1
    (proc / "net/tcp").write_text(f"{head}\n0: 0100007F:18EB 0:0 0A {rest} 11 1\n1: 0200000A:2049 0:0 01 {rest} 12 1\n")
    (proc / "net/tcp6").write_text(f"{head}\n0: {v6}:2711 0:0 0A {rest} 13 1\n")
    for pid, command, sockets in ((7, "gcs/gcs_server", (11, 12)), (8, "raylet/raylet", (13,)), (9, "other", (11,))):
        (proc / f"{pid}/fd").mkdir(parents=True)
        (proc / f"{pid}/cmdline").write_bytes(f"/x/{command}\0--a".encode())
        for number in sockets:
            (proc / f"{pid}/fd/{number}").symlink_to(f"socket:[{number}]")
    routes = "  |-- 10.0.0.0\n  /24 link UNICAST\n  |-- 10.0.0.2\n  /32 host LOCAL\n  |-- 127.0.0.1\n  /32 host LOCAL\n"
    (proc / "net/fib_trie").write_text(routes)
    addresses = ["20010db8000000000000000000000001", "fe800000000000000000000000000001"]
    (proc / "net/if_inet6").write_text("".join(f"{address} 02 40 20 80 eth0\n" for address in addresses))

    found = exposure.listeners(proc)

    assert found == [Listener("GCS", "127.0.0.1", 6379), Listener("raylet", "2001:db8::1", 10001)]
    assert exposure.own_addresses(proc) == ["10.0.0.2", "2001:db8::1"]


def test_a_program_that_refuses_strangers_is_told_from_one_that_does_not():
    class Page(http.server.BaseHTTPRequestHandler):
        status = 200

        def do_GET(self) -> None:
            self.send_response(self.status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        answers = {}
        for Page.status in (200, 401, 403, 404):
            answers[Page.status] = exposure.ask_without_token("dashboard", "127.0.0.1", server.server_address[1])
        server.shutdown()

    assert answers == {200: "open", 401: "refuses", 403: "refuses", 404: "open"}
    assert exposure.ask_without_token("raylet", "127.0.0.1", 1) == "unknown"


def test_the_ports_that_are_asked_are_those_that_start_code(monkeypatch):
    ports = [
        Listener("GCS", "0.0.0.0", 6379),
        Listener("raylet", "10.0.0.1", 5),
        Listener("dashboard", "127.0.0.1", 8265),
        Listener("client server", "127.0.0.1", 10001),  # for this machine alone
    ]
    here = {("127.0.0.1", 6379): "GCS", ("127.0.0.1", 8265): "dashboard"}

    assert exposure._doors("local", ports) == here
    there = {("head", 6379): "GCS", ("head", 8265): "dashboard", ("head", 10001): "client server"}
    assert exposure._doors("ray://head:10001", ports) == here | there
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:7000")
    named = {("10.0.0.9", 6379): "GCS", ("10.0.0.9", 8265): "dashboard", ("10.0.0.9", 7000): "GCS"}
    assert exposure._doors("auto", []) == named


def test_a_token_is_one_that_would_be_sent(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert not exposure._has_token()
    (tmp_path / "token").touch()
    assert exposure._has_token()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert not exposure._has_token()
