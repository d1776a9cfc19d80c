"""Runs the trainings and evaluations of benchmarks/run.py on a Ray cluster; `run.py --ray ADDRESS` alone imports it.

Each is a process of the unmodified script on some node, under an actor that holds the CPUs it may use. The head asks
that actor for what the process has written, and gets it in pieces of at most PIECE bytes, one at a time. What is only
appended to (output, TensorBoard's events) is appended to here; any other file is written beside the old one, and takes
its place when it is whole. Nothing of the repository need be on a node, only Python with the packages.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePath
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
PIECE = 4 << 20
"""bytes of the largest message"""
Piece = tuple[str, int, bytes, int]
"""name of a file, offset, content, size of the whole file"""
GUARD = """
import contextlib, os, shutil, signal, sys
if os.fork():
    os._exit(0)  # an actor that ends kills its children, and this must outlive it
training = sys.stdin.readline()
sys.stdin.read()
with contextlib.suppress(ProcessLookupError, ValueError):
    os.killpg(int(training), signal.SIGKILL)
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
"""a process beside an actor: however that one ends, its training with all that belongs to it is ended, and its files"""


def grows(name: str) -> bool:
    """Says whether a file is only appended to."""
    return name in ("log", "errors") or "events.out.tfevents" in name


def version(stat: os.stat_result) -> tuple[int, int, int]:
    """Returns the size of a file, and what else tells it from an older or newer one."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


# ----- On a node -----
class Worker:
    """An actor: one process in a folder of its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="suite-"))
        (self.folder / "runs").mkdir()
        guard = [sys.executable, "-c", GUARD, str(self.folder)]
        self.guard = subprocess.Popen(guard, stdin=subprocess.PIPE, text=True, start_new_session=True)
        self.guard.wait()

    def put(self, name: str, piece: bytes) -> None:
        """Appends to a file."""
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        with open(self.folder / name, "ab") as file:
            file.write(piece)

    def start(self, sources: dict[str, bytes], command: list[str | PurePath], threads: int) -> str:
        """Starts a command, whose paths are relative to this actor's folder; returns this machine in words."""
        for name, content in sources.items():
            self.put(f"code/{name}", content)
        words = [str(self.folder / word) if isinstance(word, PurePath) else word for word in command]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        with open(self.folder / "log", "wb") as log, open(self.folder / "errors", "wb") as errors:
            self.sent = {name: version(path.stat()) for name, path in self.files().items()}
            options = {"cwd": self.folder / "code", "env": environment, "start_new_session": True}
            files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": errors}
            self.process = subprocess.Popen([sys.executable, *words], **files, **options)
        self.guard.stdin.write(f"{self.process.pid}\n")
        self.guard.stdin.flush()
        self.pieces = self.changes()
        sys.path.append(str(self.folder / "code" / "benchmarks"))
        from run import machine, usable_cores

        return machine(usable_cores())

    def files(self) -> dict[str, Path]:
        """Returns the paths of the files to hand over by name, latest.pt first, then the other checkpoints."""
        runs = self.folder / "runs"
        paths = [path for path in runs.rglob("*") if path.is_file() and path.suffix != ".tmp"]
        paths.sort(key=lambda path: (path.suffix != ".pt", path.name != "latest.pt"))
        outputs = {name: self.folder / name for name in ("log", "errors")}
        return {path.relative_to(runs).as_posix(): path for path in paths} | outputs

    def changes(self) -> Iterator[Piece | int]:
        """Yields what is new in files while the process runs and once after its end, and last its exit status."""
        ended = False
        while not ended:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=1)
            ended = self.process.poll() is not None
            with ExitStack() as stack:
                # An open file stays as it is when a script replaces it. Checkpoints are opened first and sent last, so
                # that the events before them, and before latest.pt the best.pt it tells of, are there before they are.
                opened = {name: stack.enter_context(open(path, "rb")) for name, path in self.files().items()}
                versions = {name: version(os.fstat(file.fileno())) for name, file in opened.items()}
                for name, file in reversed(opened.items()):
                    before, now = self.sent.get(name), versions[name]
                    offset = before[0] if before and grows(name) else 0
                    file.seek(offset)
                    while before != now and offset < now[0]:
                        piece = file.read(min(PIECE, now[0] - offset))
                        yield name, offset, piece, now[0]
                        offset += len(piece)
                    self.sent[name] = now
        yield self.process.returncode

    def next(self) -> Piece | int:
        """Returns what `changes` yields next, as soon as there is something."""
        return next(self.pieces)

    def terminate(self) -> None:
        """Asks the process to end in order."""
        self.process.terminate()


# ----- On the head -----
class Process:
    """What `subprocess.Popen` is for a process of this machine, for one on the cluster."""

    def __init__(self, ray: Any, cpus: int, folder: Path, outputs: dict[str, IO[bytes]]) -> None:  # noqa: ANN401
        self.ray, self.folder, self.outputs, self.machine = ray, folder, outputs, ""
        self.pid = os.getpid()  # of the process here that keeps its files
        options = {"num_cpus": cpus, "max_concurrency": 2, "scheduling_strategy": "SPREAD"}
        self.actor = ray.remote(**options)(Worker).remote()

    def ask(self, method: str, *args: Any) -> Any:  # noqa: ANN401
        """Returns what the actor answers.

        Raises:
            ConnectionError: it died, alone or with its node.
            ValueError: it met an error.
        """
        try:
            return self.ray.get(getattr(self.actor, method).remote(*args))
        except self.ray.exceptions.RayTaskError as error:
            raise ValueError(f"on its node: {type(error.cause).__name__}: {error.cause}") from error
        except self.ray.exceptions.RayError as error:
            raise ConnectionError(f"its node died: {str(error).strip().splitlines()[-1]}") from error

    def send(self, path: Path) -> None:
        """Sends a file to the node."""
        with open(path, "rb") as file:
            while piece := file.read(PIECE):
                self.ask("put", f"runs/{path.relative_to(self.folder).as_posix()}", piece)

    def wait(self) -> int:
        """Brings what the process writes until it ends; returns the exit status, and raises what `ask` does."""
        try:
            while not isinstance(answer := self.ask("next"), int):
                self.keep(*answer)
            return answer
        finally:
            self.kill()

    def keep(self, name: str, offset: int, piece: bytes, size: int) -> None:
        """Writes a piece of a file."""
        if name in self.outputs:
            self.outputs[name].write(piece)
            self.outputs[name].flush()
            return
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path if grows(name) else path.with_name(f"{path.name}.tmp")
        with open(part, "ab" if grows(name) or offset else "wb") as file:
            file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if offset + len(piece) == size:
            part.replace(path)

    def terminate(self) -> None:
        """Asks the process to end in order."""
        self.actor.terminate.remote()

    def kill(self) -> None:
        """Ends all that is left of it on its node."""
        self.ray.kill(self.actor)


class Cluster:
    """A Ray cluster that was joined."""

    def __init__(self, ray: Any) -> None:  # noqa: ANN401
        self.ray = ray
        files = [*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("envs/**/*.*")]
        sources = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in files if path.suffix != ".pyc"}
        # So much of a repository as a script needs to note the commit.
        status, commit = subprocess.getstatusoutput(f"git -C {shlex.quote(str(ROOT))} rev-parse HEAD")
        commit = b"" if status else commit.encode()
        self.sources = ray.put(sources | {".git/HEAD": commit, ".git/objects/none": b"", ".git/refs/none": b""})

    def cpus(self) -> list[int]:
        """Returns how many CPUs each node has that lives."""
        return [int(node["Resources"].get("CPU", 0)) for node in self.ray.nodes() if node["Alive"]]

    def start(
        self, command: list[str], folder: Path, threads: int, outputs: dict[str, IO[bytes]], signals: list[int]
    ) -> Process:
        """Starts a command of this machine on a node, with the checkpoint that it names, once one has the CPUs.

        Raises:
            ConnectionError: the node died.
            ValueError: no node has so many CPUs, an error came up there, or a signal here.
        """
        process = Process(self.ray, threads, folder, outputs)
        try:
            ready = [process.actor.__ray_ready__.remote()]
            while self.ray.wait(ready, timeout=1)[1]:
                if signals or max(self.cpus(), default=0) < threads:
                    raise ValueError(f"no node of the cluster has {threads} CPUs")
            words: list[str | PurePath] = []
            for word in command[1:]:
                path = Path(word)
                base, there = (folder, "runs") if path.is_relative_to(folder) else (ROOT, "code")
                words.append(PurePath(there, path.relative_to(base)) if path.is_relative_to(base) else word)
                if folder in path.parents:
                    for file in path.iterdir() if path.is_dir() else [path]:
                        if file.suffix in (".pt", ".json"):
                            process.send(file)
            process.machine = process.ask("start", self.sources, words, threads)
        except BaseException:
            process.kill()
            raise
        return process


@contextmanager
def joined(address: str) -> Iterator[Cluster]:
    """Yields the cluster at an address. Ray runs whatever it is sent, so every message must carry the cluster's token.

    Raises:
        ConnectionError: there is none that fits, or no Ray here.
    """
    # Where something else answers, Ray gives up after 22 s.
    for name, value in (("AUTH_MODE", "token"), ("NUM_REDIS_GET_RETRIES", "1"), ("py_gcs_connect_timeout_s", "10")):
        os.environ.setdefault(f"RAY_{name}", value)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        import ray

        if ":" in address:  # Ray would wait for minutes where nobody answers
            socket.create_connection(address.rsplit(":", 1), timeout=30).close()
        ray.init(address, log_to_driver=False, logging_level="ERROR")
    except ImportError as error:
        raise ConnectionError("--ray needs Ray: pip install -r requirements-ray.txt") from error
    except Exception as error:  # Ray raises all kinds
        ray.shutdown()
        raise ConnectionError(f"--ray {address}: no cluster that fits: {' '.join(str(error).split())}") from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray has put its own
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # nodes need not have this file
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()
