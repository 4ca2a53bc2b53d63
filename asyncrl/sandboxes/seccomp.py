"""The system calls that programs in a sandbox may not make, as a filter for the kernel (seccomp)."""

from __future__ import annotations

import platform
import struct
from functools import cache

_REFUSED: dict[str, tuple[int, int]] = {  # numbers on x86_64 and aarch64
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "sched_setaffinity": (203, 122),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
}
_ONLY_X86 = (172, 173)  # iopl, ioperm
_IOCTL = {"x86_64": 16, "aarch64": 29}
_SOCKETS = {"x86_64": (41, 53), "aarch64": (198, 199)}  # socket, socketpair
_LIMITS = {"x86_64": 302, "aarch64": 261}  # prlimit64, of another process too
_CLONE, _CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
_NEW_USERS = 0x10000000  # flag of clone; the flags of clone3 are out of reach, and programs do without that call
_FAMILIES = (1, 2, 10, 16)  # Unix, IPv4, IPv6, netlink; others, such as vsock, know no network namespaces
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: type into a terminal
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000  # a second numbering of x86_64
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of the filter
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # offsets in what it reads
_ALLOW, _EPERM, _ENOSYS, _EAFNOSUPPORT, _KILL = 0x7FFF0000, 0x50001, 0x50026, 0x50061, 0x80000000
_ABSENT = ("io_uring_setup", "io_uring_enter", "io_uring_register")  # programs do without, where these are absent


def has_filter() -> bool:
    """Return whether there is a filter for this machine."""
    return platform.machine() in _ARCHITECTURES


@cache
def filter_program() -> bytes:
    """Return the filter as instructions of classic BPF, 8 bytes each, as `bwrap --seccomp` takes it."""
    machine = platform.machine()
    column = [*_ARCHITECTURES].index(machine)
    absent = {_CLONE3, *(_REFUSED[name][column] for name in _ABSENT)}
    refused = {numbers[column] for numbers in _REFUSED.values()} - absent
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ENOSYS)]
        refused.update(_ONLY_X86)
    for number, answer in sorted({**dict.fromkeys(refused, _EPERM), **dict.fromkeys(absent, _ENOSYS)}.items()):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]
    for number in _SOCKETS[machine]:
        lines += [(_EQUAL, 0, 2 * len(_FAMILIES) + 2, number), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
        for family in _FAMILIES:
            lines += [(_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW)]
        lines.append((_RETURN, 0, 0, _EAFNOSUPPORT))
    for number, test in ((_LIMITS[machine], (_EQUAL, 1, 0, 0)), (_CLONE[machine], (_ANY_BIT, 0, 1, _NEW_USERS))):
        lines += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _FIRST_ARGUMENT), test]
        lines += [(_RETURN, 0, 0, _EPERM), (_LOAD, 0, 0, _NUMBER)]
    lines += [(_EQUAL, 0, 2 * len(_TERMINAL_INPUT) + 1, _IOCTL[machine]), (_LOAD, 0, 0, _SECOND_ARGUMENT)]
    for request in _TERMINAL_INPUT:
        lines += [(_EQUAL, 0, 1, request), (_RETURN, 0, 0, _EPERM)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in lines)
