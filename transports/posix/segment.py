"""Memory that several processes map: made without a name, opened through /proc, reserved first.

A segment is a ``memfd``, or where that is missing an unnamed file in /dev/shm.  Nobody ever sees a
file of it, so nothing can be left behind, however its processes end.  Another process opens it as
``/proc/<pid>/fd/<number>`` while its maker holds it open; afterwards the mappings alone keep it.

Mapping is done by libc's mmap, since Python's keeps a duplicate of the file descriptor, and closing
any descriptor of a file drops this process's locks on it (`stretto.transports.posix.control`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from functools import cache
from pathlib import Path
from typing import Any

from stretto.schedules.language import InvalidInput, PeerLost
from stretto.transports.posix.memory import directory_supply, memory_supply, require

__all__ = ["SHARED_DIRECTORY", "Mapping", "create", "open_peer", "reserve"]

SHARED_DIRECTORY = Path("/dev/shm")
_POPULATE = 0x8000
_STRIDE_BYTES = 1 << 28  # reserved at a time, so that an interrupt is served in between


class Mapping:
    """A shared file in this process's address space.

    Parameters
    ----------
    descriptor
        Of the file; not kept.
    size_bytes
        Mapped from the beginning of the file.

    Raises
    ------
    InvalidInput
        If the address space has no room for it.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        address = _libc().mmap(
            None,
            size_bytes,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_SHARED | _POPULATE,
            descriptor,
            0,
        )
        if address == ctypes.c_void_p(-1).value:
            problem = os.strerror(ctypes.get_errno())
            raise InvalidInput(f"mmap of {size_bytes} bytes of shared memory failed: {problem}.")
        self.address: int = address
        self.size_bytes = size_bytes
        self._mapped = True

    def close(self) -> None:
        """Unmap; a second call does nothing."""
        if self._mapped:
            self._mapped = False
            _libc().munmap(self.address, self.size_bytes)


def create(purpose: str, size_bytes: int, *, directory: Path = SHARED_DIRECTORY) -> int:
    """Make an unnamed shared file of zeros, if there is memory for it; return its descriptor.

    Parameters
    ----------
    purpose
        What it is for, as messages begin: ``A workspace of 4 ranks``.
    size_bytes
        Its size.
    directory
        Where it lies if ``memfd_create`` is missing.

    Raises
    ------
    InvalidInput
        If it cannot be made, or there is less memory than it needs.
    """
    descriptor = _memfd()
    supplies = memory_supply()
    try:
        if descriptor is None:
            supplies.append(directory_supply(directory))
            require(size_bytes, purpose, supplies)
            descriptor = _unnamed_file(directory)
        else:
            require(size_bytes, purpose, supplies)
        os.ftruncate(descriptor, size_bytes)
    except (OSError, InvalidInput) as error:
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{purpose}: shared memory cannot be made: {error}.") from error
    return descriptor


def open_peer(rank: int, pid: int, descriptor: int) -> int:
    """Open the file that rank `rank`, process `pid`, holds open as `descriptor`.

    Raises
    ------
    PeerLost
        If that process no longer has it.
    InvalidInput
        If this process may not open it.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise PeerLost(
            f"rank {rank} (process {pid}) ended, or closed, before {path} was opened."
        ) from error
    except OSError as error:
        raise InvalidInput(
            f"shared memory of rank {rank} cannot be opened at {path}: {error}; ranks need one "
            "user and one process namespace."
        ) from error


def reserve(descriptor: int, offset: int, size_bytes: int) -> None:
    """Back a part of a shared file by memory now, so that no later access can fail.

    Every rank reserves its own part: the pages then lie near the processor that it runs on, and
    count against its own control group.

    Raises
    ------
    InvalidInput
        If there is not enough memory after all.
    """
    end = offset + size_bytes
    for start in range(offset, end, _STRIDE_BYTES):
        part = min(_STRIDE_BYTES, end - start)
        try:
            os.posix_fallocate(descriptor, start, part)
        except OSError as error:
            raise InvalidInput(
                f"{size_bytes} bytes of shared memory could not be reserved (posix_fallocate: "
                f"{os.strerror(error.errno or 0)}); use smaller buffers, fewer slots or fewer "
                "ranks, or free memory."
            ) from error


def _memfd() -> int | None:
    make = getattr(os, "memfd_create", None)
    if make is None:
        return None
    try:
        descriptor: int = make("stretto")
    except OSError:  # ENOSYS in an old kernel, EPERM in a sandbox
        return None
    return descriptor


def _unnamed_file(directory: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError:
        # A file system without O_TMPFILE: the name lives for as long as it takes to remove it.
        path = directory / f"stretto-{secrets.token_hex(8)}"
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        path.unlink()
        return descriptor


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
