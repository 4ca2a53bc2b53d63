"""Two calls of the Linux kernel for a fork server: they make a fork look like a real start."""

import ctypes
import os
import platform
import signal
import struct
from collections.abc import Mapping, Sequence

_PR_SET_MM, _PR_SET_MM_MAP, _PR_GET_TID_ADDRESS = 35, 14, 40
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_ARM = platform.machine() == "aarch64"
_CLONE = 220 if _ARM else 56
_MAP = "11QQIi"  # `struct prctl_mm_map`: eleven addresses, the auxiliary vector and its size, the program's file
_MEMORY = (26, 27, 45, 46, 47)  # fields of `/proc/self/stat`: ends of the code and data, start of the heap
_STACK = 28

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.sbrk.restype = ctypes.c_void_p
_shown: list[object] = []  # what the kernel reads: it must not move


def fork_sibling() -> int:
    """Fork a child of this process's parent; returns its id, and 0 in it. This process must have one thread."""
    tid = ctypes.c_void_p()  # where the C library keeps the thread's id, which differs in the child
    _checked(_libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(tid), 0, 0, 0))
    flags = _CLONE_PARENT | _CLONE_CHILD_CLEARTID | _CLONE_CHILD_SETTID | signal.SIGCHLD
    places = (0, tid) if _ARM else (tid, 0)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _libc.syscall(ctypes.c_long(_CLONE), ctypes.c_ulong(flags), None, None, *map(_pointer, places))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    return int(_checked(pid))


def show_as(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Let `/proc/PID/cmdline` and `/proc/PID/environ` show these."""
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items()) or b"\0"
    text = ctypes.create_string_buffer(words + variables, len(words + variables))
    start = ctypes.addressof(text)
    middle = start + len(words)
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    memory = [int(fields[number - 3]) for number in _MEMORY]
    addresses = (*memory, _libc.sbrk(0), int(fields[_STACK - 3]), start, middle, middle, start + len(text))
    given = struct.pack(_MAP, *addresses, 0, 0, -1)
    _checked(_libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.c_char_p(given), ctypes.c_ulong(len(given)), 0))
    _shown[:] = [text]


def _pointer(value: ctypes.c_void_p | int) -> ctypes.c_void_p:
    return value if isinstance(value, ctypes.c_void_p) else ctypes.c_void_p(value)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
