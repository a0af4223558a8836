"""Python processes that need not load torch again: they are forked from a process that has it.

`install()` has `subprocess.Popen` and `multiprocessing` ask a server for `python -m …`, `python -c …`, `python file`,
and `brim …`; all else is executed. What comes is a real child of the caller, with a process id, signals, exit code,
descriptors and environment of its own, as the server clones itself with CLONE_PARENT. Libraries are loaded in it,
brim is not. A child has a server of its own, so the processes of a service under test are forked too.

Executed for real, in a new interpreter: commands with other options than -c and -m, code that looks at `sys.modules`
or `sys.meta_path`, environments that a library reads while it is loaded, and what has BRIM_TEST_EXEC in its own.
"""

import array
import atexit
import ctypes
import gc
import importlib
import inspect
import io
import os
import pickle
import platform
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

# What brim and its tests load; not what reads the environment meanwhile (prometheus_client, nicegui, triton).
LIBRARIES = (
    "numpy", "torch", "torch._dynamo", "torch.utils.data", "torch.distributed.launcher",
    "cv2", "PIL.Image", "safetensors.torch", "sqlalchemy.dialects.sqlite", "sqlalchemy.dialects.postgresql", "psycopg",
    "alembic.command", "typer", "rich.progress", "rich.table", "pydantic", "fastapi", "uvicorn", "httpx", "orjson",
    "websockets", "multiprocessing.spawn", "multiprocessing.forkserver",
)  # fmt: skip
READ_EARLY = (
    "TRITON_INTERPRET",
    "PYTHONWARNINGS",
    "PYTHONHASHSEED",
    "PYTHONUTF8",
    "PYTHONDEVMODE",
    "GOMP_SPINCOUNT",
)
CLONE = {"x86_64": 56, "aarch64": 220}  # number of the system call
CLONE_PARENT, SETTID, CLEARTID = 0x8000, 0x01000000, 0x00200000
GET_TID_ADDRESS = 40
ROOM = 32768  # bytes for the command line that `ps` shows
LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

_server: socket.socket | None = None
_lock = threading.Lock()
_is_installed = False
_is_plain_fork = False  # of a process with a server: what that one clones would not be our child


# The caller


def is_possible() -> bool:
    """Whether forks work here; not beside an NVIDIA driver, which a library may wake while it is loaded."""
    return sys.platform == "linux" and platform.machine() in CLONE and not Path("/dev/nvidiactl").exists()


def install() -> None:
    """From now on, Python processes are forked where that is possible; the server starts with the first."""
    global _is_installed
    if _is_installed or not is_possible():
        return
    _is_installed = True
    execute, spawn = subprocess.Popen._execute_child, util.spawnv_passfds  # type: ignore[attr-defined]
    signature = inspect.signature(execute)

    def execute_or_fork(self: Any, *args: Any) -> None:
        asked = signature.bind(self, *args).arguments
        words = _words(asked)
        if words is None:
            execute(self, *args)
            return
        ends = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        session = "session" if asked["start_new_session"] else asked["process_group"]
        with self._waitpid_lock:
            self.pid = fork(words, asked["env"], asked["cwd"], ends, asked["pass_fds"], session)
            self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))

    def spawn_or_fork(path: Any, args: Any, passfds: Any) -> int:
        words = [os.fsdecode(path), *map(os.fsdecode, args[1:])]
        if not _is_python(words) or not _is_served():
            return spawn(path, args, passfds)
        return fork(words, None, None, [-1, -1, -1], passfds, -1)

    subprocess.Popen._execute_child = execute_or_fork  # type: ignore[attr-defined]
    util.spawnv_passfds = spawn_or_fork


@atexit.register
def stop() -> None:
    """Let the server end."""
    if _server is not None:
        _server.close()


def start() -> None:
    """Start the server, in the main thread: the kernel takes its children for those of this thread."""
    global _server
    if _server is None and threading.current_thread() is threading.main_thread():
        _server, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno()), "x" * ROOM]
        os.posix_spawn(
            sys.executable, command, {**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), theirs.fileno())],
        )  # fmt: skip
        theirs.close()


def fork(
    args: list[Any], env: dict[Any, Any] | None, cwd: Any, ends: list[int], pass_fds: Any, session: str | int
) -> int:
    """The process id of a new child; ends are its standard input, output and error, or -1 for ours."""
    asked = {
        "args": [os.fsdecode(word) for word in args],
        "env": {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()},
        "cwd": os.fsdecode(cwd) if cwd is not None else str(Path.cwd()),
        "fds": [0, 1, 2, *pass_fds],
        "session": session,
        "limits": {number: resource.getrlimit(number) for number in LIMITS},
        "umask": int(Path("/proc/self/status").read_text().partition("Umask:")[2].split()[0], 8),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "ignored": [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN],
    }
    sent = [number if end == -1 else end for number, end in enumerate(ends)] + list(pass_fds)
    body = pickle.dumps(asked)
    with _lock:
        start()
        assert _server is not None
        fds = array.array("i", sent)
        _server.sendmsg([len(body).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        _server.sendall(body)
        pid = int.from_bytes(_read(_server, 4), "big")
    if pid == 0:
        raise OSError("no process could be forked")
    return pid


def _words(asked: dict[str, Any]) -> list[str] | None:
    """The command line of a process that can be forked, else None; `brim` is `python -m brim`."""
    plain = not asked["shell"] and asked["preexec_fn"] is None and asked["close_fds"] and asked["umask"] == -1
    if not plain or any(asked.get(name) is not None for name in ("uid", "gid", "gids")) or not _is_served():
        return None
    env = os.environ if asked["env"] is None else asked["env"]
    if env.get("BRIM_TEST_EXEC") or any(env.get(name) != os.environ.get(name) for name in READ_EARLY):
        return None
    args = asked["args"]
    words = [os.fsdecode(word) for word in ([args] if isinstance(args, (str, bytes, os.PathLike)) else args)]
    if shutil.which(words[0], path=env.get("PATH")) == str(Path(sys.executable).with_name("brim")):
        words = [sys.executable, "-m", "brim", *words[1:]]
    return words if _is_python(words) else None


def _is_served() -> bool:
    """Whether there is a server, or one can be started."""
    return not _is_plain_fork and (_server is not None or threading.current_thread() is threading.main_thread())


def _is_python(words: list[str]) -> bool:
    if len(words) < 2 or words[0] != sys.executable:
        return False
    words = _without_u(words)
    if words[1] == "-c":
        return not any(word in words[2] for word in ("sys.modules", "meta_path"))
    return words[1] == "-m" or not words[1].startswith("-")


# The server


def serve(here: socket.socket) -> dict[str, Any] | None:
    """Clone this process for every request; returns in a child, with what it is to do, and None at the end."""
    libc, python = ctypes.PyDLL(None), ctypes.pythonapi
    tid = ctypes.c_void_p()
    libc.prctl(GET_TID_ADDRESS, ctypes.byref(tid))
    flags = CLONE_PARENT | signal.SIGCHLD | (SETTID | CLEARTID if tid.value else 0)
    last = [tid, None] if platform.machine() == "x86_64" else [None, tid]
    call = [ctypes.c_long(CLONE[platform.machine()]), ctypes.c_long(flags), None, None, *last]
    gc.collect()
    gc.freeze()
    while True:
        data, ancillary, *_ = here.recvmsg(4, socket.CMSG_SPACE(256 * 4), socket.MSG_CMSG_CLOEXEC)
        if not data:
            return None
        received = array.array("i")
        for _, _, packed in ancillary:
            received.frombytes(packed)
        asked = pickle.loads(_read(here, int.from_bytes(data, "big")))
        python.PyOS_BeforeFork()
        pid = libc.syscall(*call)
        if pid == 0:
            python.PyOS_AfterFork_Child()
            here.close()
            return {**asked, "received": list(received)}
        python.PyOS_AfterFork_Parent()
        for fd in received:
            os.close(fd)
        here.sendall(max(0, pid).to_bytes(4, "big"))


def _note_fork() -> None:
    global _is_plain_fork
    _is_plain_fork = True


os.register_at_fork(after_in_child=_note_fork)


def become(asked: dict[str, Any]) -> None:
    """Turn this clone into the process that was asked for, up to its first line of code."""
    global _is_plain_fork
    _is_plain_fork = False
    spare = [_above(fd, asked["fds"]) for fd in asked["received"]]
    for fd, number in zip(spare, asked["fds"], strict=True):
        os.dup2(fd, number)
    for fd in {*spare, *asked["received"]} - set(asked["fds"]):
        os.close(fd)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN if number in asked["ignored"] else signal.SIG_DFL)
    if signal.SIGINT not in asked["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for limit, values in asked["limits"].items():
        resource.setrlimit(limit, values)
    os.umask(asked["umask"])
    os.nice(asked["nice"] - os.getpriority(os.PRIO_PROCESS, 0))
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    _open_streams(asked["args"][1] == "-u")
    _rename(asked["args"])
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        sys.modules["torch"].set_num_threads(int(threads))


def run(words: list[str]) -> None:
    """What the interpreter does with its command line; brim and sitecustomize are imported from PYTHONPATH."""
    words = _without_u(words)
    first = "" if words[1] in ("-c", "-m") else str(Path(words[1]).absolute().parent)
    added = [str(Path(word).absolute()) for word in os.environ.get("PYTHONPATH", "").split(os.pathsep) if word]
    sys.path[:] = [first or str(Path.cwd()), *added, *BASE_PATH]
    sys.modules.pop("sitecustomize", None)
    with suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    install()
    if words[1] == "-m":
        sys.argv[:] = [words[2], *words[3:]]
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    elif words[1] == "-c":
        sys.argv[:] = ["-c", *words[3:]]
        sys.path[0] = ""
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[2], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = words[1:]
        runpy.run_path(words[1], run_name="__main__")


def end(words: list[str]) -> NoReturn:
    """Run a command line to its end, which is an interpreter's, but for taking all libraries apart."""
    code = 1
    try:
        run(words)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
    except BaseException as failure:
        trace = failure.__traceback__
        sys.excepthook(type(failure), failure, trace and trace.tb_next)
        code = -signal.SIGINT if isinstance(failure, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError as failure:
        sys.stderr.write(f"Exception ignored on flushing sys.stdout:\n{failure!r}\n")
        code = code or 120
    if code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 255)


def _with_server(asked: dict[str, Any]) -> dict[str, Any]:
    """Fork a server for what this process will start, while it has no thread yet; what comes of it returns here too."""
    global _server, _lock
    while True:
        if asked["session"] == "session":
            os.setsid()
        elif asked["session"] != -1:
            os.setpgid(0, asked["session"])
        _server, theirs = socket.socketpair()
        _lock = threading.Lock()
        if os.fork():
            theirs.close()
            return asked
        _server.close()
        for fd in asked["received"]:
            os.close(fd)
        following = serve(theirs)
        if following is None:
            os._exit(0)
        asked = following


def _above(fd: int, taken: list[int]) -> int:
    """A copy of a descriptor whose number nobody wants."""
    while fd in taken:
        fd = os.dup(fd)
    return fd


def _open_streams(is_unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = open(number, "wb", buffering=0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115
        errors = "strict" if number == 1 else "backslashreplace"
        by_line = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(raw, "utf-8", errors, line_buffering=by_line, write_through=is_unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _rename(words: list[str]) -> None:
    """Show this command line to `ps`: over the server's own, which has room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = b"\0".join(os.fsencode(word) for word in words)[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _without_u(words: list[str]) -> list[str]:
    """A command line without `-u`, which torchrun gives its ranks."""
    return [words[0], *words[2:]] if words[1] == "-u" else words


def _read(here: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (part := here.recv(count - len(data))):
            raise EOFError("the server of forks is gone")
        data += part
    return data


if __name__ == "__main__":
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    for number in SIGNALS:  # it ends with its parent; a Ctrl-C is for others
        signal.signal(number, signal.SIG_IGN)
    for library in LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(library)
    sys.modules["forks"] = sys.modules["__main__"]
    given = [word for word in os.environ.get("PYTHONPATH", "").split(os.pathsep) if word]
    BASE_PATH = [entry for entry in sys.path[1:] if entry not in given]
    task = serve(socket.socket(fileno=int(sys.argv[1])))
    if task is not None:
        task = _with_server(task)
        become(task)
        end(task["args"])
