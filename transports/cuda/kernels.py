"""The small kernels of the CUDA transports: begin a call, wait, add, fill a mailbox.

They are compiled with NVRTC when the first transport of a process is made, and loaded before
anything can spin (lazy loading while a kernel spins can wedge a context).

They are kept below 24 registers: a GEMM of 384 threads leaves a multiprocessor about a thousand of
its 65536, and a wait that fits in there starts beside it instead of after it.

Each has one thread a word.  A wait polls with ``ld.acquire.sys``: what the signaller wrote before
its release is then visible to every kernel that follows on the stream.  It gives up when the abort
word (pinned host memory, looked at every thousand polls) is not 0, or when its time is over;
then it leaves a record and lets the stream go on, so that a context is never wedged and the host
can say what happened.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from stretto.transports.cuda.driver import bindings, called

__all__ = ["Kernel", "KernelLibrary"]

SOURCE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 load_acquire(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

/* record: 0 state, 1 label, 2 place of the word, 3 expected, 4 seen, 5 call */
__device__ __noinline__ void give_up(u32* record, u32 state, u32 label, u32 place, u32 expected,
                                     u32 seen, u32 call) {
  if (atomicCAS(record, 0u, 3u) == 0u) {
    record[1] = label; record[2] = place; record[3] = expected; record[4] = seen; record[5] = call;
    __threadfence_system();
    atomicExch_system(record, state);
  }
}

/* The next use of slot `slot`: its number, and the values that this use's signals copy.  Then wait,
   one thread a word, for what earlier calls must have left there: the credits. */
extern "C" __global__ void stretto_begin(u32* uses, u32* call, u32* sources, const u32* strides,
                                         const u32* offsets, u32 count, u32 slot, u32 slots,
                                         u32* const* words, const u32* credit_strides,
                                         const u32* credit_offsets, u32 credits,
                                         volatile u32* abort, u32* record, u32 label,
                                         u64 limit_ns) {
  u32 number = *uses * slots + slot;
  u32 index = threadIdx.x;
  if (index < count) sources[index] = number * strides[index] + offsets[index];
  __syncthreads();
  if (index == 0) {
    *call = number;
    *uses += 1;
  }
  if (index >= credits) return;
  u32 expected = number * credit_strides[index] + credit_offsets[index];
  u64 begun = 0;
  for (u32 polls = 0;; ++polls) {
    u32 seen = load_acquire(words[index]);
    if ((int)(seen - expected) >= 0) break;
    if ((polls & 1023u) == 1023u) {
      u64 now = nanoseconds();
      if (begun == 0) begun = now;
      u32 state = *abort ? 2u : (now - begun > limit_ns ? 1u : 0u);
      if (state) { give_up(record, state, label, index, expected, seen, number); return; }
    }
  }
}

/* Wait until every word has reached call * stride + offset, compared cyclically. */
extern "C" __global__ void stretto_wait(u32* const* words, u32 count, const u32* call, u32 stride,
                                        u32 offset, volatile u32* abort, u32* record, u32 label,
                                        u64 limit_ns, u32 mailbox) {
  u32 index = threadIdx.x;
  if (index >= count) return;
  u32* word = words[index];
  u32 expected = mailbox ? 1u : *call * stride + offset;
  u64 begun = 0;
  for (u32 polls = 0;; ++polls) {
    u32 seen = load_acquire(word);
    if ((int)(seen - expected) >= 0) break;
    if ((polls & 1023u) == 1023u) {
      u64 now = nanoseconds();
      if (begun == 0) begun = now;
      u32 state = *abort ? 2u : (now - begun > limit_ns ? 1u : 0u);
      if (state) { give_up(record, state, label, index, expected, seen, *call); return; }
    }
  }
  if (mailbox) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(word), "r"(0u) : "memory");
  }
}

/* Add call * stride + offset to every word. */
extern "C" __global__ void stretto_add(u32* const* words, u32 count, const u32* call, u32 stride,
                                       u32 offset) {
  u32 index = threadIdx.x;
  if (index >= count) return;
  u32 value = *call * stride + offset;
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  asm volatile("red.release.sys.global.add.u32 [%0], %1;"
               :: "l"(words[index]), "r"(value) : "memory");
}

/* Fill every mailbox, once it is empty. */
extern "C" __global__ void stretto_post(u32* const* words, u32 count, const u32* call,
                                        volatile u32* abort, u32* record, u32 label, u64 limit_ns) {
  u32 index = threadIdx.x;
  if (index >= count) return;
  u32* word = words[index];
  u64 begun = 0;
  for (u32 polls = 0;; ++polls) {
    u32 seen = load_acquire(word);
    if (seen == 0u) break;
    if ((polls & 1023u) == 1023u) {
      u64 now = nanoseconds();
      if (begun == 0) begun = now;
      u32 state = *abort ? 2u : (now - begun > limit_ns ? 1u : 0u);
      if (state) { give_up(record, state, label, index, 0u, seen, *call); return; }
    }
  }
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(word), "r"(1u) : "memory");
}

/* Set every word to call * stride + offset, from a kernel (measured against the copy). */
extern "C" __global__ void stretto_set(u32* const* words, u32 count, const u32* call, u32 stride,
                                       u32 offset) {
  u32 index = threadIdx.x;
  if (index >= count) return;
  u32 value = *call * stride + offset;
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(words[index]), "r"(value) : "memory");
}
"""

NAMES = ("stretto_begin", "stretto_wait", "stretto_add", "stretto_post", "stretto_set")


class Kernel:
    """A kernel with its arguments bound; `launch` costs one driver call.

    Parameters
    ----------
    function
        The driver's handle.
    threads
        Of its one block.
    arguments
        ctypes values, in the kernel's order; kept alive here.
    name
        For errors.
    """

    __slots__ = ("_arguments", "_driver", "_function", "_pointers", "_threads", "name")

    def __init__(self, function: Any, threads: int, arguments: tuple[Any, ...], name: str) -> None:
        self._driver = bindings()
        self._function, self._threads, self.name = function, threads, name
        self._arguments = arguments
        self._pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.addressof(argument) for argument in arguments)
        )

    def launch(self, stream: Any) -> None:
        """Enqueue it on a stream."""
        (code,) = self._driver.cuLaunchKernel(
            self._function,
            1, 1, 1, self._threads, 1, 1, 0, stream, ctypes.addressof(self._pointers), 0,
        )  # fmt: skip
        if int(code):
            called(self.name, (code,))


class KernelLibrary:
    """The kernels, compiled for this device."""

    def __init__(self, capability: tuple[int, int]) -> None:
        driver = bindings()
        image = _compiled(f"compute_{capability[0]}{capability[1]}")
        self._module = called("cuModuleLoadData", driver.cuModuleLoadData(image))
        self._functions = {
            name: called(
                f"cuModuleGetFunction({name})",
                driver.cuModuleGetFunction(self._module, name.encode()),
            )
            for name in NAMES
        }

    def bind(self, name: str, threads: int, *arguments: Any) -> Kernel:
        """Return a kernel with its arguments bound."""
        return Kernel(self._functions[name], threads, arguments, name)


@cache
def _compiled(architecture: str) -> bytes:
    """Return the PTX of the kernels."""
    from cuda.bindings import nvrtc

    program = called(
        "nvrtcCreateProgram",
        nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"stretto.cu", 0, [], []),
    )
    options = [
        f"--gpu-architecture={architecture}".encode(),
        b"--std=c++17",
        b"--maxrregcount=24",
    ]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(code):
        size = called("nvrtcGetProgramLogSize", nvrtc.nvrtcGetProgramLogSize(program))
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        called(f"nvrtcCompileProgram: {log.decode(errors='replace')}", (code,))
    size = called("nvrtcGetPTXSize", nvrtc.nvrtcGetPTXSize(program))
    image = b" " * size
    called("nvrtcGetPTX", nvrtc.nvrtcGetPTX(program, image))
    return image
