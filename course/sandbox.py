"""Where a submission runs: another process, and as far as the system allows another user, without
network, without the files of this machine, and with limits.

`Sandbox` is what the grader has. It starts one process that imports the libraries, this file run as
a program, which forks a new process for each problem: torch is imported once. Three levels, the
first that the system allows:

  namespaces   Linux: own user, files, processes and network (root, or user namespaces)
  user         POSIX, as root: a user of its own; network calls are refused on Linux
  limits       else: limits on time, memory, processes and files alone
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None

COURSE = Path(__file__).parent
MEMORY = 4 * 2**30  # bytes of data a process may have; none of ours needs a fifth of it
FILE_SIZE = 64 * 2**20  # bytes a file that it writes may have; a saved model of ours has 3 MB
DISK = 256 * 2**20  # bytes of all its files, at the first level
PROCESSES = 24  # processes and threads
LEVELS = ("namespaces", "user", "limits")
SEES = {
    "namespaces": "another user, no network, no files but Python's and the submission's",
    "user": "another user, who reads what all may read",
    "limits": "the same user: only time, memory and processes are limited",
}
"""What a submission is at each level."""


class Ended(Exception):
    """The process of a submission has ended: one line that says how."""


# --- The grader's side ---


class Sandbox:
    """Starts processes for submissions. `level` is known after the first one."""

    def __init__(self, highest: str = LEVELS[0]) -> None:
        self.level, self.highest = "", highest
        self.lock = threading.Lock()
        self.zygote = None

    def start(self, folder: Path, time_limit: float) -> Confined:
        """A process that serves the harness (child.py) on the files in `folder`/code."""
        (folder / "tmp").mkdir(exist_ok=True)
        request = {"folder": str(folder), "cpu": int(time_limit) + 5, "highest": self.highest}
        process = Confined(*self._fork(request), time_limit)
        self.level = process.level
        return process

    def _fork(self, request: dict) -> tuple[socket.socket, socket.socket, object]:
        pairs = [socket.socketpair() for _ in range(2)]
        errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by Confined
        with self.lock:
            if self.zygote is None:
                self._start_zygote()
            fds = [theirs.fileno() for _, theirs in pairs] + [errors.fileno()]
            socket.send_fds(self.zygote[1], [json.dumps(request).encode()], fds)
        for _, theirs in pairs:
            theirs.close()
        return pairs[0][0], pairs[1][0], errors

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair()
        # Not the course, nor what tests have put there.
        paths = [p for p in sys.path if {"site-packages", "dist-packages"} & {*Path(p).parts}]
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(paths),
            "LANG": "C.UTF-8", "HOME": "/sandbox/tmp", "TMPDIR": "/sandbox/tmp", "USER": "student",
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())],
            pass_fds=[theirs.fileno()], env=environment, cwd="/", stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self.zygote = process, ours

    def close(self) -> None:
        """End all of it."""
        if self.zygote is not None:
            process, control = self.zygote
            control.close()
            process.wait()
            self.zygote = None


class Confined:
    """A process of a submission: a file to write requests to, and one to read answers from."""

    def __init__(
        self, data: socket.socket, control: socket.socket, errors: object, time_limit: float
    ) -> None:
        self.data, self.control, self.errors = data, control, errors
        self.file, self.said = data.makefile("rwb"), control.makefile("r")
        self.time_limit, self.late = time_limit, False
        self.timer = threading.Timer(time_limit, self._too_late)
        self.timer.daemon = True
        self.timer.start()
        self.level = json.loads(self.said.readline() or '{"level": "none"}')["level"]

    def _too_late(self) -> None:
        self.late = True
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)

    def how_it_ended(self) -> str:
        """In a line; ends it if it hasn't."""
        self._kill()
        code = json.loads(self.said.readline() or '{"code": null}')["code"]
        if self.late:
            return f"not done after {self.time_limit:g} seconds, look for a loop that doesn't end"
        last = self.last_words()
        return f"the process ended with code {code}" + (f": {last}" if last else "")

    def last_words(self) -> str:
        """The last line that it wrote to stderr."""
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, size - 2**22))
        lines = self.errors.read().decode("utf-8", "replace").strip().split("\n")
        # That of a library of torch, which misses /proc.
        lines = [line for line in lines if not line.startswith("Error in cpuinfo")]
        return lines[-1] if lines else ""

    def close(self) -> None:
        """End it, and all that it has started."""
        self.timer.cancel()
        self._kill()
        with contextlib.suppress(OSError):
            self.said.read()  # until the keeper has ended
        for part in (self.file, self.said, self.data, self.control, self.errors):
            with contextlib.suppress(OSError):
                part.close()


@contextlib.contextmanager
def folder_for(files: dict[str, bytes]) -> Iterator[Path]:
    """A temporary folder with the files in its folder `code`, readable by all who get there."""
    with tempfile.TemporaryDirectory(prefix="graded", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o711)
        (folder / "code").mkdir()
        for path, data in files.items():
            (folder / "code" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "code" / path).write_bytes(data)
        yield folder


# --- The process that forks, and the keepers ---


def main() -> None:
    """Import what submissions need, then fork a keeper for each request until none can come."""
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # until all is imported
    import child  # and with it torch

    child.warm_up(COURSE.resolve().parent / "tiny")
    # Else each process would look through all that is imported whenever it collects garbage.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # at every 700 it takes a tenth of the time of a small run
    gc.enable()
    sys.path.remove(str(COURSE.resolve()))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for number in itertools.count():
        request, fds, _, _ = socket.recv_fds(control, 2**16, 3)
        if not request:
            return
        if os.fork() == 0:
            control.close()
            try:
                # The limit on processes counts those of a user: no two graders may share one.
                uid = 61184 + (64 * os.getppid() + number) % 4000
                keep(child.serve, json.loads(request), fds, uid)
            except BaseException:
                traceback.print_exc()
                os._exit(70)
            os._exit(0)
        for fd in fds:
            os.close(fd)


def keep(serve: object, request: dict, fds: list[int], uid: int) -> None:
    """Start the process of a submission, wait for its end or the grader's, and clean up."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, control, errors = fds
    os.setsid()
    level = namespaces_or_less(request, uid)
    pid = os.fork()
    if pid == 0:
        os.close(control)
        os.setsid()
        confine(level, request, uid, data, errors)
        serve(data, request["code"])
        os._exit(0)
    os.close(data)
    os.write(control, json.dumps({"level": level}).encode() + b"\n")
    ours = socket.socket(fileno=control)
    ours.settimeout(0.02)
    status, ended = 0, False
    while not ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        ended = found == pid
        with contextlib.suppress(TimeoutError):
            if not ended and not ours.recv(1):
                os.kill(pid, signal.SIGKILL)  # at the first level all its processes end with it
                _, status = os.waitpid(pid, 0)
                ended = True
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if level == "user":
        end_all_of(uid)
    with contextlib.suppress(OSError):
        code = os.waitstatus_to_exitcode(status)
        ours.sendall(json.dumps({"code": code}).encode() + b"\n")


def end_all_of(uid: int) -> None:
    """End all processes of a user."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            os.setuid(uid)
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(pid, 0)


# --- Linux: namespaces ---

NEW_FILES, NEW_NETWORK, NEW_PROCESSES, NEW_USER = 0x20000, 0x40000000, 0x20000000, 0x10000000
NEW_IPC, NEW_NAME = 0x08000000, 0x04000000
READ_ONLY, NO_SETUID, NO_DEVICES, REMOUNT, BIND, DEEP, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18


def namespaces_or_less(request: dict, uid: int) -> str:
    """Enter new namespaces for the next process; the level reached."""
    levels = LEVELS[LEVELS.index(request["highest"]) :]
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    if "namespaces" in levels and sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        new = NEW_FILES | NEW_NETWORK | NEW_PROCESSES | NEW_IPC | NEW_NAME
        if outer_uid == 0 and libc.unshare(new) == 0:
            return "namespaces"
        if libc.unshare(new | NEW_USER) == 0:
            with contextlib.suppress(OSError):
                Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/uid_map").write_text(f"{uid} {outer_uid} 1")
                Path("/proc/self/gid_map").write_text(f"{uid} {outer_gid} 1")
                return "namespaces"
    if "user" in levels and outer_uid == 0 and readable_by_all(request["folder"], sys.base_prefix):
        return "user"
    return "limits"


def readable_by_all(*paths: str) -> bool:
    """Whether any user gets to these folders."""
    found = [q for p in paths for q in (Path(p).resolve(), *Path(p).resolve().parents)]
    return all(path.stat().st_mode & 1 for path in found)


def confine(level: str, request: dict, uid: int, data: int, errors: int) -> None:
    """In the new process: its files, its user, its limits."""
    folder = Path(request["folder"])
    request["code"], temporary = str(folder / "code"), str(folder / "tmp")
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    if libc:
        libc.prctl(1, signal.SIGKILL)  # end with the keeper
    if level == "namespaces":
        own_files(libc, folder, uid)
        request["code"], temporary = "/sandbox/code", "/sandbox/tmp"
    elif level == "user":
        os.chown(temporary, uid, uid)
    os.environ |= dict.fromkeys(("TMPDIR", "HOME"), temporary)
    tempfile.tempdir = None
    if resource is not None:
        limit("CPU", request["cpu"])
        limit("DATA", MEMORY)
        limit("FSIZE", FILE_SIZE)
        limit("NPROC", PROCESSES)
        limit("NOFILE", 256)
        limit("CORE", 0)
    if level != "limits" and os.geteuid() == 0:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    if libc:
        libc.prctl(38, 1, 0, 0, 0)  # no new privileges
        drop_capabilities(libc)
        if level != "namespaces":
            refuse_network(libc)
    os.umask(0o077)
    os.chdir(temporary)
    nothing = os.open(os.devnull, os.O_RDWR)
    for old, new in ((nothing, 0), (nothing, 1), (errors, 2)):
        os.dup2(old, new)
    keep_open = {0, 1, 2, data}
    os.closerange(3, data)
    os.closerange(max(keep_open) + 1, 4096)


def limit(name: str, size: int) -> None:
    """Set a limit for good, where the system has it and allows it."""
    kind = getattr(resource, f"RLIMIT_{name}", None)
    if kind is not None:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (size, size))


def own_files(libc: ctypes.CDLL, folder: Path, uid: int) -> None:
    """A new root: the system's programs and Python's to read, the submission's code, and a
    temporary folder in memory. There is no /proc, and nothing of the course.
    """

    def mount(source: object, target: object, kind: str | None, flags: int, options="") -> None:
        arguments = [str(x).encode() if x is not None else None for x in (source, target, kind)]
        if libc.mount(*arguments, flags, options.encode()) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"mount {target}: {os.strerror(number)}")

    mount("none", "/", None, DEEP | PRIVATE)
    root = folder / "tmp"
    mount("tmpfs", root, "tmpfs", NO_SETUID | NO_DEVICES, "size=1m,mode=755")
    course = COURSE.resolve().parent
    wanted = {Path(p) for p in ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin")}
    wanted |= {Path("/etc/ld.so.cache"), Path("/etc/alternatives"), Path("/etc/localtime")}
    wanted |= {Path("/dev/null"), Path("/dev/zero"), Path("/dev/urandom"), Path("/dev/random")}
    wanted |= {Path(p) for p in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    wanted |= {Path(p).resolve() for p in (*wanted, *sys.path) if Path(p).exists()}
    wanted = {p for p in wanted if p.exists() and p != course}
    inside = {p for p in wanted if p.is_relative_to(course)}
    for path in sorted(wanted - inside):
        if not any(p in path.parents for p in wanted - inside):
            bind(mount, path, Path(f"{root}{path}"))
    for private in (course, folder):
        if Path(f"{root}{private}").is_dir():
            mount("tmpfs", f"{root}{private}", "tmpfs", NO_SETUID | NO_DEVICES, "size=1m,mode=755")
    for path in sorted(inside):
        bind(mount, path, Path(f"{root}{path}"))
    (root / "sandbox/code").mkdir(parents=True)
    bind(mount, folder / "code", root / "sandbox/code")
    (root / "sandbox/tmp").mkdir()
    options = f"size={DISK},nr_inodes=4096,mode=700,uid={uid},gid={uid}"
    mount("tmpfs", root / "sandbox/tmp", "tmpfs", NO_SETUID | NO_DEVICES, options)
    if not (root / "tmp").exists():
        (root / "tmp").symlink_to("sandbox/tmp")
    os.chdir(root)
    if libc.pivot_root(b".", b".") != 0:
        raise OSError(ctypes.get_errno(), "pivot_root")
    libc.umount2(b".", 2)  # the old root
    os.chdir("/")
    mount(None, "/", None, REMOUNT | BIND | READ_ONLY | NO_SETUID | NO_DEVICES)


def bind(mount: object, path: Path, target: Path) -> None:
    """Show `path` at `target`, to be read only; a link stays one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        if not target.is_symlink():
            target.symlink_to(os.readlink(path))
        return
    if path.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    mount(path, target, None, BIND | DEEP)
    kept = os.statvfs(path).f_flag & (NO_SETUID | NO_DEVICES | 8 | 1024 | 2048)
    if not str(path).startswith("/dev/"):
        mount(None, target, None, REMOUNT | BIND | READ_ONLY | NO_SETUID | kept)


def drop_capabilities(libc: ctypes.CDLL) -> None:
    """What a process that made namespaces could still do."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    libc.capset(header, (ctypes.c_uint32 * 6)())


CALLS = {  # of each kind of processor: its number, socket, ptrace, process_vm_readv
    "x86_64": (0xC000003E, 41, 101, 310),
    "aarch64": (0xC00000B7, 198, 117, 270),
}
IO_URING = 425  # can open sockets as well
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # the latter: "operation not permitted"


def refuse_network(libc: ctypes.CDLL) -> None:
    """From now on sockets fail, but those within this machine, and so does looking into other
    processes: a seccomp filter, which needs no rights.
    """
    if platform.machine() not in CALLS:
        return
    processor, socket_call, *others = CALLS[platform.machine()]
    # (what to do, where to go if so, where if not, a number): the last two lines are the ends.
    lines = [(LOAD, 0, 0, 4), (EQUAL, 0, 8, processor), (LOAD, 0, 0, 0)]
    lines += [(AT_LEAST, 7, 0, 1 << 30)]  # calls of 32 bits
    lines += [(EQUAL, 6 - i, 0, n) for i, n in enumerate((*others, IO_URING))]
    lines += [(EQUAL, 0, 2, socket_call), (LOAD, 0, 0, 16)]
    lines += [(EQUAL, 0, 1, socket.AF_UNIX), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    code = b"".join(struct.pack("<HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("<HxxxxxxQ", len(lines), ctypes.addressof(buffer))
    libc.prctl(22, 2, ctypes.create_string_buffer(program), 0, 0)


if __name__ == "__main__":
    main()
