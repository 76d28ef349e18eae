"""Python processes forked off one that has imported what they need: to start Python anew takes seconds of a core.

``QuickPython`` stands in for ``subprocess.Popen``, and ``run`` for ``subprocess.run``. A command, a script or a module
runs as Python itself would run it. What asks for another Python, by an option or by a variable that counts when Python
starts, is started anew; so is what is no Python, and all there is where this system has no such fork, or a GPU. A
forked process starts its own in the same way if it asks for it here.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import inspect
import io
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
_MOST_BYTES = 1 << 17  # of a message
_NAME = "HF_BATCHLLM_TEST_PYTHON"  # in the environment: how the servers of these tests are called
_INTERPRETED = "TRITON_INTERPRET"  # is read once, by the first import of Triton
_AT_START = ("PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONWARNINGS", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_SERVE = "from support_quick_python import serve; serve()"
_HERE_AT_START = {name: os.environ.get(name) for name in _AT_START}
_ASIDE = 200  # files have numbers from here on before each gets its own


@dataclass(frozen=True)
class Asked:
    """What is to be run, and where."""

    kind: str  # "-c", "-m", or nothing for a script
    what: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    numbers: tuple[int, ...]  # of the files that it is given beside input, output and errors
    unbuffered: bool
    safe_path: bool
    new_session: bool


class Server:
    """The process that others are forked off. It ends with the process that started it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}

    def start(self, asked: Asked, files: Sequence[int]) -> int:
        with self._lock:
            socket.send_fds(self._connection, [pickle.dumps(asked)], list(files))
            self._connection.settimeout(120)
            while (answer := self._answer())[0] != "started":
                pass
            return answer[1]

    def code_of(self, process_id: int) -> int | None:
        with self._lock:
            self._connection.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                while process_id not in self._codes:
                    self._answer()
            return self._codes.get(process_id)

    def _answer(self) -> tuple[Any, ...]:
        answer: tuple[Any, ...] = pickle.loads(self._connection.recv(_MOST_BYTES))
        if answer[0] == "ended":
            self._codes[answer[1]] = answer[2]
        return answer


_SERVERS: dict[tuple[int, str], Server | None] = {}  # by this process, as a fork has none, and by the name
_STARTED: list[Any] = []  # kept: one that is forgotten while it runs is warned of, and ends
_STARTING = threading.Lock()


def _server(interpreted: bool) -> Server | None:
    """None where another process has started none of this kind."""
    with _STARTING:
        given = os.environ.setdefault(_NAME, f"hf-batchllm-tests-{os.getpid()}-{time.time_ns()}")
        name = f"\0{given}-{'interpreted' if interpreted else 'plain'}"
        if (os.getpid(), name) not in _SERVERS:
            if f"-{os.getpid()}-" in given:
                _start_server(name, interpreted)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(name)
                _SERVERS[os.getpid(), name] = Server(connection)
            except ConnectionRefusedError:
                _SERVERS[os.getpid(), name] = None
        return _SERVERS[os.getpid(), name]


def _start_server(name: str, interpreted: bool) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(name)
    listener.listen(64)
    ours, theirs = socket.socketpair()
    environment = os.environ | {"PYTHONPATH": _joined(HERE, HERE.parent), "OPENBLAS_NUM_THREADS": "1"}
    environment.pop(_INTERPRETED, None)
    with theirs, listener:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVE, str(listener.fileno()), str(theirs.fileno())],
            env=environment | ({_INTERPRETED: "1"} if interpreted else {}),
            pass_fds=[listener.fileno(), theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C of tests is not for it
        )
    _STARTED.extend((process, ours))


def _joined(*folders: str | Path) -> str:
    return os.pathsep.join(map(str, folders))


# -- in the process that others are forked off --------------------------------------------------------------------


def serve() -> None:
    """One thread, so that a fork leaves no lock behind. A fork returns from here, or raises, when its work is done."""
    listener, owner = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    _import_all()
    ours = os.environ["PYTHONPATH"].split(os.pathsep)
    path = [each for each in sys.path if each not in ours]
    gc.collect()
    gc.freeze()  # nobody who collects garbage walks through this, or copies its pages
    connections: list[socket.socket] = []
    asked_by: dict[int, socket.socket] = {}  # of each process that runs
    while True:
        for ready in select.select([owner, listener, *connections], [], [], 0.02 if asked_by else None)[0]:
            if ready is owner:
                os._exit(0)
            if ready is listener:
                connections.append(listener.accept()[0])
            elif (received := _received(ready)) is None:
                connections.remove(ready)
                ready.close()
            else:
                asked, files = received
                child = os.fork()
                if not child:
                    for each in (listener, owner, *connections):
                        each.close()
                    _become(asked, files, path)
                    _run(asked)
                    return
                for file in files:
                    os.close(file)
                asked_by[child] = ready
                _say(ready, "started", child)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                _say(asked_by.pop(ended[0]), "ended", ended[0], os.waitstatus_to_exitcode(ended[1]))


def _import_all() -> None:
    """Of the library nothing is imported for kernels that are interpreted: tests put broken ones into its place."""
    importlib.import_module("support_family_models")  # PyTorch, and models of transformers
    if os.environ.get(_INTERPRETED):
        importlib.import_module("triton.language")
        return
    importlib.import_module("support_families")
    from hf_batchllm import BatchGenerator
    from hf_batchllm.pool import part_generator, worker

    assert BatchGenerator and part_generator and worker


def _received(connection: socket.socket) -> tuple[Asked, list[int]] | None:
    with contextlib.suppress(ConnectionError):
        data, files, *_ = socket.recv_fds(connection, _MOST_BYTES, 64)
        if data:
            return pickle.loads(data), files
    return None


def _say(to: socket.socket, *what: object) -> None:
    with contextlib.suppress(OSError):  # it is gone
        to.send(pickle.dumps(what))


def _become(asked: Asked, files: list[int], path: list[str]) -> None:
    """What a process has from its start: files, environment, folder, and where its modules are."""
    if asked.new_session:
        os.setsid()
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD, _ASIDE) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(aside, (0, 1, 2, *asked.numbers), strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(asked.environment)
    os.chdir(asked.folder)
    at_once = asked.unbuffered or bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        file = os.fdopen(number, "rb" if not number else "wb", closefd=False)
        given = {"line_buffering": number == 2 or file.isatty(), "write_through": number > 0 and at_once}
        stream = io.TextIOWrapper(file, errors="backslashreplace" if number == 2 else None, **given)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    first = {"-c": "", "-m": asked.folder}.get(asked.kind, os.path.dirname(os.path.abspath(asked.what)))
    sys.path[:] = [*([] if asked.safe_path else [first]), *_folders(), *path]
    sys.argv[:] = [asked.kind or asked.what, *asked.arguments]
    sys.orig_argv[:] = [sys.executable, *([asked.kind] if asked.kind else []), asked.what, *asked.arguments]


def _folders() -> list[str]:
    return [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


def _run(asked: Asked) -> None:
    try:
        if any(os.path.exists(os.path.join(folder, "sitecustomize.py")) for folder in _folders()):
            sys.modules.pop("sitecustomize", None)  # Debian's Python has one, and has imported it
            importlib.import_module("sitecustomize")
        _SERVER_ITSELF.append(sys.modules["__main__"])
        if asked.kind == "-m":
            runpy._run_module_as_main(asked.what)  # type: ignore[attr-defined]  # what ``python -m`` itself calls
            return
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        text: str | bytes = asked.what
        if not asked.kind:
            module.__file__, text = asked.what, Path(asked.what).read_bytes()
        exec(compile(text, asked.what if not asked.kind else "<string>", "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        told = error.__traceback__
        while told is not None and told.tb_frame.f_code.co_filename == __file__:
            told = told.tb_next
        sys.excepthook(type(error), error.with_traceback(told), told)
        if isinstance(error, KeyboardInterrupt):
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        raise SystemExit(1) from None


_SERVER_ITSELF: list[types.ModuleType] = []  # kept: it goes on running


# -- in the process that asks for others --------------------------------------------------------------------------


class QuickPython(subprocess.Popen[Any]):
    """As ``subprocess.Popen``, whose child is a fork of the server's where it can be one."""

    _server: Server | None = None

    def _execute_child(self, *given: Any) -> None:
        usual = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        said = inspect.signature(usual).bind(self, *given).arguments
        asked = _asked(said)
        if asked is not None:
            self._server = _server(asked.environment.get(_INTERPRETED) == "1")
        if asked is None or self._server is None:
            usual(self, *given)
            return
        own = [said[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        files = [number if file == -1 else file for number, file in enumerate(own)]
        self.pid = self._server.start(asked, [*files, *asked.numbers])
        self._child_created = True
        self._close_pipe_fds(*(said[name] for name in _PIPES))  # type: ignore[attr-defined]

    def poll(self) -> int | None:
        if self._server is None:
            return super().poll()
        if self.returncode is None:
            self.returncode = self._server.code_of(self.pid)  # type: ignore[assignment]
        return self.returncode

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:  # from ``__del__``, too
        if self._server is None:
            return super()._internal_poll(*given, **named)  # type: ignore[misc,no-any-return]
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        if self._server is None:
            return super().wait(timeout)
        until = time.monotonic() + (1e9 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        return code


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _asked(said: Mapping[str, Any]) -> Asked | None:
    """None for what is to be started anew."""
    if sys.platform != "linux" or torch.cuda.is_available():  # a driver is not to be forked
        return None
    if said["shell"] or said["preexec_fn"] or isinstance(said["args"], str | bytes):
        return None
    program, *words = map(os.fspath, said["args"])
    environment = dict(os.environ if said["env"] is None else said["env"])
    if program != sys.executable or any(environment.get(name) != value for name, value in _HERE_AT_START.items()):
        return None
    options = set()
    while words and words[0] in ("-u", "-P"):
        options.add(words.pop(0))
    kind = words.pop(0) if words and words[0] in ("-c", "-m") else ""
    if not words or (not kind and words[0].startswith("-")):
        return None
    folder = os.path.abspath(said["cwd"] or os.getcwd())
    switches = {
        "unbuffered": "-u" in options,
        "safe_path": "-P" in options,
        "new_session": bool(said.get("start_new_session")),
    }
    return Asked(kind, words[0], words[1:], environment, folder, tuple(said["pass_fds"]), **switches)


def run(command: Sequence[Any], *, check: bool = False, timeout: float | None = None, **given: Any) -> Any:
    """As ``subprocess.run``."""
    if given.pop("capture_output", False):
        given |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with QuickPython(command, **given) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
