"""A server of the S3 protocol on loopback, in a process of its own, and a proxy before it that fails on purpose."""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import boto3

from waiting import until

SECRET = "not-to-be-shown-anywhere"
KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",  # nobody is asked for credentials that the environment does not have
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}


class Store:
    """What tests ask of the server, by a client that is not brim's."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"
        self.env = {**KEYS, "AWS_ENDPOINT_URL": self.endpoint}
        self.s3 = self.client("s3")

    def client(self, service):
        return boto3.client(
            service,
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="testing",
            aws_secret_access_key=SECRET,
        )

    def files(self, bucket, prefix=""):
        """Every object's bytes, by its name under the prefix."""
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        read = {key: self.s3.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys}
        return {key.removeprefix(prefix).lstrip("/"): data for key, data in read.items()}

    @contextmanager
    def guarded(self, *actions):
        """Credentials are checked; yields the keys of someone who may do only these actions."""
        iam, name = self.client("iam"), f"user{uuid.uuid4().hex}"
        iam.create_user(UserName=name)
        statement = {"Effect": "Allow", "Action": list(actions) or ["s3:ListAllMyBuckets"], "Resource": "*"}
        document = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam.put_user_policy(UserName=name, PolicyName="only", PolicyDocument=document)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        self._check_after(0)
        try:
            yield {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
        finally:
            self._check_after(10**9)

    def _check_after(self, num_requests):
        url, data = f"{self.endpoint}/moto-api/reset-auth", str(num_requests).encode()
        urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "text/plain"})).close()


@contextmanager
def serve_s3() -> Iterator[Store]:
    """A server that forgets everything at the end."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, env={**os.environ, "PYTHONWARNINGS": ""}, **quiet)
    try:
        until(lambda: server.poll() is not None or _answers(port))
        assert server.poll() is None
        yield Store(port)
    finally:
        server.kill()
        server.wait()
        if "s3fs" in sys.modules:  # it keeps clients of the store that is gone
            sys.modules["s3fs"].S3FileSystem.clear_instance_cache()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _answers(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


class FailingProxy:
    """Passes connections on, except those it was told to fail; the server takes one request on each."""

    def __init__(self, port):
        self.target, self.port = port, free_port()
        self.requests = []  # first line and headers of each, as text
        self.received = 0  # bytes of answers passed on
        self._fail = []  # what to do with the next connections
        self._hang_after, self._hangs = "", False
        self._listener, self._open, self._lock = None, set(), threading.Lock()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        self.up()
        return self

    def __exit__(self, *failure):
        self.down()

    def fail(self, kind, times=1, after=0):
        """The next connections: "503", "reset" at once, "cut" in the middle of the answer, "hang" without one.

        after: connections that are passed on before.
        """
        with self._lock:
            self._fail = ["pass"] * after + [kind] * times

    def hang_after(self, text):
        """Once a request was passed on whose first line has this text, no later one is answered; "" ends that."""
        with self._lock:
            self._hang_after, self._hangs = text, False

    def up(self):
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def down(self):
        """Nobody listens, and who was connected is cut off."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for connection in list(self._open):
            _reset(connection)

    def _accept(self, listener):
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with self._lock:
                    kind = self._fail.pop(0) if self._fail else "pass"
                threading.Thread(target=self._serve, args=(connection, kind), daemon=True).start()

    def _serve(self, connection, kind):
        self._open.add(connection)
        try:
            with suppress(OSError):
                head = connection.recv(65536)
                self.requests.append(head.partition(b"\r\n\r\n")[0].decode(errors="replace"))
                kind = "hang" if self._is_held(self.requests[-1].partition("\r\n")[0]) else kind
                if kind == "reset":
                    _reset(connection)
                elif kind == "503":
                    self._refuse(connection)
                elif kind == "hang":
                    while connection.recv(65536):
                        pass
                else:
                    self._pass(connection, head, cut=kind == "cut")
        finally:
            self._open.discard(connection)
            connection.close()

    def _is_held(self, line):
        with self._lock:
            is_held, self._hangs = self._hangs, self._hangs or bool(self._hang_after and self._hang_after in line)
        return is_held

    @staticmethod
    def _refuse(connection):
        body = b"<Error><Code>ServiceUnavailable</Code><Message>later</Message></Error>"
        head = b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):  # what is left of the request: unread, it would reset the answer
            pass

    def _pass(self, connection, head, cut):
        with socket.create_connection(("127.0.0.1", self.target)) as server:
            server.sendall(head)
            threading.Thread(target=_pump, args=(connection, server), daemon=True).start()
            while data := server.recv(65536):
                if cut and b"\r\n\r\n" in data:
                    end = data.index(b"\r\n\r\n") + 4
                    connection.sendall(data[: end + (len(data) - end) // 2])
                    _reset(connection)
                    return
                self.received += len(data)
                connection.sendall(data)


def _pump(source, sink):
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)


def _reset(connection):
    """Close at once, as a machine that lost power looks from afar."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        connection.close()
