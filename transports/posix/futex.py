"""32-bit words that several processes share: load, store, add, block until another one writes.

Blocking is futex(2) on the shared word itself (not ``FUTEX_PRIVATE_FLAG``: the kernel finds the
word by file and offset, so that every process may map it elsewhere).  The kernel compares the word
with the value last seen before it sleeps, under the lock that a waker takes too, hence no wake is
lost between a look and the sleep.

Adding is ``FUTEX_WAKE_OP``: the kernel performs one atomic read-modify-write on the word and wakes
the sleepers, in one call.  Python has no atomic add on shared memory of its own.

Calls that never sleep keep the interpreter's lock: giving it away for a microsecond would let
another stream of this rank hold it for a whole switch interval.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from stretto.schedules.language import InvalidInput, Unavailable

__all__ = [
    "HALF_RANGE",
    "MASK",
    "NEEDS_FENCE",
    "SharedWord",
    "fence",
    "probe",
]

MASK = 0xFFFFFFFF
HALF_RANGE = 0x80000000
LARGEST_ADDEND = HALF_RANGE - 1

_SYSCALL_NUMBERS = {
    "x86_64": 202,
    "aarch64": 98,
    "loongarch64": 98,
    "riscv64": 98,
    "ppc64le": 221,
    "s390x": 238,
}
_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
_OP_ADD, _OP_ARGUMENT_IS_SHIFT = 1, 8
_LARGEST_PLAIN_ARGUMENT = 2047  # 12 bits, signed
_ALL = 2**31 - 1

NEEDS_FENCE = platform.machine() not in {"x86_64", "AMD64"}
"""Whether this processor may let a later store, or an earlier load, pass other accesses."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class SharedWord:
    """One aligned 32-bit word at an address in shared memory.

    Attributes
    ----------
    address
        Where it is in this process.
    cell
        ``cell.value`` loads or stores it, each by one 4-byte instruction (see the memory model in
        `stretto.transports.shared_memory`).
    wake
        Wakes every process that blocks on the word; to be called after each store.
    """

    __slots__ = ("address", "cell", "wake")

    def __init__(self, address: int) -> None:
        if address % 4:
            raise InvalidInput(f"A flag word needs an address divisible by 4, not {address:#x}.")
        self.address = address
        self.cell = ctypes.c_uint32.from_address(address)
        self.wake: Callable[[], int] = _bound(_WAKE, address)

    def block(self, seen: int, limit_s: float) -> None:
        """Sleep while the word holds `seen`, until a wake, a signal handler or the limit."""
        whole = int(limit_s)
        limit = _Timespec(whole, int((limit_s - whole) * 1e9))
        _sleeping_syscall()(
            ctypes.c_long(_number()),
            ctypes.c_void_p(self.address),
            ctypes.c_int(_WAIT),
            ctypes.c_uint32(seen),
            ctypes.byref(limit),
            ctypes.c_void_p(None),
            ctypes.c_uint32(0),
        )

    def adder(self, addend: int) -> tuple[Callable[[], int], ...]:
        """Return calls that together add `addend` (modulo 2^32) atomically and wake.

        An addend below 2048, or a power of two, is one atomic step.  Another one takes several;
        what a reader may see in between is never more than the whole.

        Raises
        ------
        InvalidInput
            If the addend is negative or not below 2^31, which no cyclic comparison can follow.
        """
        if not 0 <= addend <= LARGEST_ADDEND:
            raise InvalidInput(f"A counter adds 0 to {LARGEST_ADDEND}, not {addend}.")
        low = addend & _LARGEST_PLAIN_ARGUMENT
        shifts = [bit for bit in range(11, 31) if addend >> bit & 1]
        parts = [(_OP_ADD, low)] if low or not shifts else []
        parts += [(_OP_ADD | _OP_ARGUMENT_IS_SHIFT, shift) for shift in shifts]
        return tuple(
            _bound(_WAKE_OP, self.address, operation << 28 | argument << 12)
            for operation, argument in parts
        )


def fence() -> None:
    """Order all earlier accesses of this thread before all later ones.

    The kernel's atomic operation of ``FUTEX_WAKE_OP`` is fully ordered, as every value-returning
    read-modify-write of Linux is: ``lock xadd`` on x86, an exclusive pair followed by ``dmb ish``
    on arm64.  The word that it adds 0 to is this process's own.
    """
    _fence_call()()


def probe() -> str | None:
    """Say why words cannot be shared by futex here, or None if they can."""
    if sys.platform != "linux":
        return "it needs Linux (futex), and this is " + sys.platform
    if platform.machine() not in _SYSCALL_NUMBERS or sys.maxsize < 2**32:
        return f"the number of the futex system call is not known for {platform.machine()}"
    word = ctypes.c_uint32(MASK)
    shared = SharedWord(ctypes.addressof(word))
    for add in shared.adder(2):
        add()
    if word.value != 1 or shared.wake() != 0:
        return "the futex system call does not work (is it forbidden by a seccomp filter?)"
    return None


def _bound(operation: int, address: int, encoded: int = 0) -> Callable[[], int]:
    """Return the system call with all its arguments converted once."""
    return partial(
        _prompt_syscall(),
        ctypes.c_long(_number()),
        ctypes.c_void_p(address),
        ctypes.c_int(operation),
        ctypes.c_uint32(_ALL),
        ctypes.c_void_p(None),
        ctypes.c_void_p(address),
        ctypes.c_uint32(encoded),
    )


@cache
def _number() -> int:
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if number is None:
        raise Unavailable(f"futex is not known for processors of type {platform.machine()}.")
    return number


@cache
def _prompt_syscall() -> Any:
    """Return libc's syscall, called with the interpreter's lock held."""
    function = ctypes.PyDLL(None).syscall
    function.restype = ctypes.c_long
    return function


@cache
def _sleeping_syscall() -> Any:
    """Return libc's syscall, called without the interpreter's lock."""
    function = ctypes.CDLL(None).syscall
    function.restype = ctypes.c_long
    return function


@cache
def _fence_call() -> Callable[[], int]:
    word = ctypes.c_uint32(0)
    (add,) = SharedWord(ctypes.addressof(word)).adder(0)

    def call(_word: ctypes.c_uint32 = word) -> int:
        return add()

    return call
