"""Started by sandbox.py with ``python -I -S``: confines itself, then runs one program.

Standard library only; it imports nothing of the package. The one argument is JSON, see ``main``.

Strong mode: new user, process, mount, network, IPC and host name namespaces. The program sees a
read-only tree of the interpreter's files and one folder of its own in memory, no network but an unused
loopback, and no other process. The first process of its namespace is this one's child, which the
program cannot kill; when it ends, the kernel ends all that the program left running.

Weak mode, asked for by name: resource limits only; this process reaps and kills stray children. What
else the program may do is left to an audit hook in sandbox_runner.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time

NEWNS, NEWUTS, NEWIPC = 0x00020000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
"""clone(2)."""
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
"""mount(2)."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
"""prctl(2)."""
MOUNT_SETATTR, AT_RECURSIVE, AT_FDCWD, MOUNT_ATTR_RDONLY = 442, 0x8000, -100, 1
"""mount_setattr(2), Linux 5.12 and newer; the number is that of all architectures."""

NOBODY = 65534
"""What root becomes: the kernel does not limit root's processes."""

NO_SANDBOX = 120
"""Exit status where the sandbox cannot be built; the reason is on standard error."""

LIBRARY = ctypes.CDLL(None, use_errno=True)


def check(what: str, result: int) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def prctl(option: int, value: int) -> None:
    check("prctl", LIBRARY.prctl(option, value, 0, 0, 0))


def unshare(flags: int) -> None:
    check("unshare", LIBRARY.unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    result = LIBRARY.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    check(f"mount {target}", result)


class MountAttributes(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def make_read_only(path: str) -> None:
    """A mount and all those below it."""
    wanted = MountAttributes(attr_set=MOUNT_ATTR_RDONLY)
    result = LIBRARY.syscall(
        MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, ctypes.byref(wanted),
        ctypes.c_size_t(ctypes.sizeof(wanted)),
    )  # fmt: skip
    check(f"mount_setattr {path}", result)


def map_user(uid: int, gid: int) -> None:
    """The invoking user as itself; no other user exists in the new namespace."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def build_tree(root: str, visible: list[str], disk_bytes: int) -> None:
    """At ``root``: the ``visible`` folders, read-only, ``/dev/null`` and friends, and ``/work``."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in visible:
        inside = root + path
        os.makedirs(inside, exist_ok=True)
        mount(path, inside, None, MS_BIND | MS_REC)
    for device in ("null", "zero", "urandom"):
        os.makedirs(f"{root}/dev", exist_ok=True)
        with open(f"{root}/dev/{device}", "w"):
            mount(f"/dev/{device}", f"{root}/dev/{device}", None, MS_BIND)
    os.makedirs(f"{root}/work")
    make_read_only(root)
    mount(
        "tmpfs", f"{root}/work", "tmpfs", MS_NOSUID | MS_NODEV,
        f"size={disk_bytes},nr_inodes=4096,mode=1777",
    )  # fmt: skip


def confine(root: str, visible: list[str], disk_bytes: int) -> None:
    """Enters the namespaces. What a program may not do after that needs capabilities, which it loses
    when it is started; new user namespaces are refused to a process in a changed root."""
    others = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS
    if os.geteuid() == 0:
        unshare(others)
        build_tree(root, visible, disk_bytes)
        become_nobody()
        unshare(NEWUSER)  # counts this program's processes by themselves
        map_user(NOBODY, NOBODY)
    else:
        uid, gid = os.geteuid(), os.getegid()
        unshare(NEWUSER | others)
        map_user(uid, gid)
        build_tree(root, visible, disk_bytes)


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    prctl(PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root


def set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        spare = 1 if name == "RLIMIT_CPU" else 0  # SIGXCPU, which tells why, comes before SIGKILL
        resource.setrlimit(vars(resource)[name], (value, value + spare))


def start(command: list[str], environment: dict[str, str], limits: dict[str, int]) -> int:
    """The program as a child with limits, in the working folder; its process id."""
    child = os.fork()
    if child == 0:
        try:
            set_limits(limits)
            prctl(PR_SET_NO_NEW_PRIVS, 1)
            os.execve(command[0], command, environment)
        except OSError as error:
            os.write(2, f"sandbox: {error}\n".encode())
        os._exit(NO_SANDBOX)
    return child


def wait_for(child: int) -> int:
    """Reaps whatever ends, until ``child`` does; its status as a shell reports it."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def kill_strays() -> None:
    """Weak mode: kills what the program left, which falls to this process as their reaper."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        if not children:
            return
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def main() -> int:
    """Arguments: parent, strong, root, visible, disk_bytes, command, environment, limits, setup.

    ``parent`` is the process that this one must not outlive.
    """
    told = json.loads(sys.argv[1])
    started = (told["command"], told["environment"], told["limits"])
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != told["parent"]:
        return NO_SANDBOX
    if not told["strong"]:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        if os.geteuid() == 0:
            os.chown(told["root"], NOBODY, NOBODY)
            become_nobody()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user clears it
        os.chdir(told["root"])
        child = start(*started)
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
        status = wait_for(child)
        kill_strays()
        return status
    try:
        confine(told["root"], told["visible"], told["disk_bytes"])
    except OSError as error:
        print(f"sandbox: {error.strerror}", file=sys.stderr)
        return NO_SANDBOX
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    first = os.fork()
    if first:
        return wait_for(first)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chroot(told["root"])
    os.chdir("/work")
    os._exit(wait_for(start(*started)))


if __name__ == "__main__":
    sys.exit(main())
