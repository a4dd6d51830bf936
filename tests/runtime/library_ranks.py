"""What ranks do in the tests of the library call; importable, since every rank is a new process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from stretto.runtime import TensorParallel
from stretto.runtime.launcher import Rank
from stretto.schedules.language import StrettoError

ROWS = (1, 2, 9, 33, 64, 9)


def inside(rank: Rank, device: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function(rank, *arguments)`` in a torch.distributed program of all ranks."""
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank.index % torch.cuda.device_count())
        alone = torch.cuda.device_count() >= rank.world_size
        backend = "nccl" if alone else "gloo"  # NCCL refuses ranks that share a GPU
    store = dist.PrefixStore("program", rank.store)
    dist.init_process_group(backend, store=store, rank=rank.index, world_size=rank.world_size)
    try:
        with torch.no_grad():
            return function(rank, *arguments)
    finally:
        dist.destroy_process_group()


def numbers(seed: int, *shape: int, dtype: str = "float32", device: Any = "cpu") -> Any:
    """Return small whole numbers, whose products every dtype adds exactly."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(-2, 3, shape, generator=generator).to(getattr(torch, dtype))
    return made.to(device)


def expected(seed: int, m: int, k: int, weight: Any) -> Any:
    """Return what all ranks must get, in the weight's dtype."""
    full = numbers(seed, m, k).to(weight.device)
    return (full @ weight.float().t()).to(weight.dtype)


def shard(parallel: TensorParallel, seed: int, m: int, k: int, like: Any) -> Any:
    """Return this rank's rows."""
    rows = parallel.rows(m)
    return numbers(seed, m, k)[rows.start : rows.stop].to(like.dtype).to(like.device)


def layers(parallel: TensorParallel, dtype: str = "float32", **more: Any) -> list[Any]:
    """Return operators of several layers and shapes."""
    shapes = ((48, 32, 64), (24, 32, 64), (16, 96, 33))
    return [
        parallel.all_gather_gemm(
            numbers(100 * parallel.rank + place, n, k, dtype=dtype, device=parallel.device),
            max_m=max_m,
            **more,
        )
        for place, (n, k, max_m) in enumerate(shapes)
    ]


def wrong_calls(parallel: TensorParallel, operators: list[Any], rounds: int) -> list[str]:
    """Call all layers with all numbers of rows and return what came out wrong."""
    wrong = []
    for call in range(rounds):
        for m in ROWS:
            for place, one in enumerate(operators):
                if m > one.max_m:
                    continue
                seed = 1000 * call + 10 * m + place
                y = one(shard(parallel, seed, m, one.k, one.weight), m=m)
                if not (y == expected(seed, m, one.k, one.weight)).all():
                    wrong.append(f"call {call}, m {m}, layer {place}, {one.choice(m).variant}")
    return wrong


def many_shapes(rank: Rank, variant: str, tune: bool) -> list[str]:
    """Several layers and shapes take turns on one workspace."""
    with TensorParallel() as parallel:
        operators = layers(parallel, variant=variant)
        parallel.prepare(tune=tune)
        return wrong_calls(parallel, operators, 3)


def grown(rank: Rank) -> list[str]:
    """A layer is added later, for which the workspace must grow."""
    with TensorParallel() as parallel:
        operators = layers(parallel, variant="ring")
        parallel.prepare()
        wrong = wrong_calls(parallel, operators, 1)
        weight = numbers(rank.index, 8, 256, device=parallel.device)
        late = parallel.all_gather_gemm(weight, max_m=128, variant="ring")
        try:
            late(shard(parallel, 0, 128, 256, weight))
        except StrettoError as error:
            wrong += [] if "prepare()" in str(error) else [str(error)]
        parallel.prepare()
        return wrong + wrong_calls(parallel, [*operators, late], 1)


def part_of_the_world(rank: Rank) -> tuple[Any, ...]:
    """A group of one of the ranks: no symmetric memory, but still an answer."""
    import torch.distributed as dist

    groups = [dist.new_group([one]) for one in range(rank.world_size)]
    with TensorParallel(groups[rank.index]) as parallel:
        (operator, *_) = layers(parallel)
        parallel.prepare()
        return (*operator.choice(64), parallel.refusal, wrong_calls(parallel, [operator], 1))


def refusals(rank: Rank) -> dict[str, str]:
    """What is refused, and with which sentence."""
    import torch

    said: dict[str, str] = {}

    def refused(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            said[name] = "was not refused"
        except StrettoError as error:
            said[name] = f"{type(error).__name__}: {error}"

    with TensorParallel() as parallel:
        (operator, *_) = layers(parallel)
        x = shard(parallel, 0, 64, operator.k, operator.weight)
        refused("before prepare", lambda: operator(x))
        parallel.prepare(tune=False)
        refused("above max_m", lambda: operator(torch.cat([x, x])))
        refused("no rows", lambda: operator(x[:0]))
        refused("wrong k", lambda: operator(x[:, :-1]))
        refused("wrong rows", lambda: operator(x, m=63 + 62 * rank.world_size))
        refused("wrong dtype", lambda: operator(x.double()))
        refused("wrong out", lambda: operator(x, out=x.new_empty((1, 1))))
        refused("weight", lambda: parallel.all_gather_gemm(x[0], max_m=8))
        refused("strided", lambda: parallel.all_gather_gemm(x.t(), max_m=8))
        refused("variant", lambda: parallel.all_gather_gemm(operator.weight, max_m=8, variant="no"))
        refused("mode", lambda: parallel.prepare(mode="fast"))
        with torch.enable_grad():
            refused("gradient", lambda: operator(x.clone().requires_grad_()))
        with parallel._lock:
            refused("second thread", lambda: operator(x))
        refused("no matrix", lambda: operator(x[0, 0]))
        mine = numbers(0, 5 - rank.index, operator.k)  # 9 rows on two ranks, and nobody says so
        refused("m left out", lambda: operator(mine))
        refused("tune of one rank", lambda: parallel.prepare(tune=rank.index == 0))
        if rank.index:
            parallel.all_gather_gemm(operator.weight, max_m=8)
        refused("different operators", parallel.prepare)
        refused("many rows", lambda: parallel.all_gather_gemm(operator.weight, max_m=10**13))
        refused("choice", lambda: operator.choice(0))
        parallel.prepare()  # what was refused is forgotten
        with torch.inference_mode():
            right = (operator(x, m=64) == expected(0, 64, operator.k, operator.weight)).all()
        said["inference mode"] = f"right: {bool(right)}"
    refused("closed", lambda: operator(x))
    parallel.close()
    refused("timeout", lambda: TensorParallel(timeout_s=0))
    refused("device", lambda: TensorParallel(device="meta"))
    refused("unknown transport", lambda: TensorParallel(transport="pigeon"))
    refused("transport without put", lambda: TensorParallel(transport="rccl"))
    return said


def failure_while_preparing(rank: Rank) -> str:
    """One rank runs out of memory in prepare(); all must hear of it at once."""
    with TensorParallel() as parallel:
        operators = layers(parallel)
        if rank.index == 1:
            operators[0].weight = None  # what comes of it is not our own error
        start = time.monotonic()
        try:
            parallel.prepare()
        except (StrettoError, AttributeError) as error:
            return f"{type(error).__name__} {time.monotonic() - start < 5} {error}"
    return "nothing happened"


def rows_differ_and_so_does_the_variant(rank: Rank) -> str:
    """Ranks that differ in m take variants of different transports; they must hear of it."""
    with TensorParallel() as parallel:
        (operator, *_) = layers(parallel)
        parallel.prepare(tune=False)
        parallel._picked[operator, 4] = "ring"
        parallel._picked[operator, 6] = "unfused"
        start = time.monotonic()
        try:
            operator(numbers(0, 2 + rank.index, operator.k))
        except StrettoError as error:
            return f"{time.monotonic() - start < 5} {error}"
    return "nothing happened"


def tables_grow(rank: Rank) -> list[int]:
    """A later, smaller operator of the same shape must not take a larger one's measurements."""
    with TensorParallel() as parallel:
        weight = numbers(0, 8, 16)
        large = parallel.all_gather_gemm(weight, max_m=256)
        parallel.prepare()
        parallel.all_gather_gemm(weight, max_m=64)
        parallel.prepare()
        return [int(large.choice(m).reason.split()[1]) for m in (64, 128, 256)]


def not_contiguous(rank: Rank) -> bool:
    """A strided input is as good as a copy of it."""
    with TensorParallel() as parallel:
        (operator, *_) = layers(parallel, variant="ring")
        parallel.prepare(tune=False)
        x = shard(parallel, 5, 64, operator.k, operator.weight)
        strided = x.t().contiguous().t()
        right: bool = (operator(strided) == expected(5, 64, operator.k, operator.weight)).all()
        return bool(right) and not strided.is_contiguous()


def heard_after_s(error: StrettoError) -> float:
    """Return how long a rank took to hear of a killed one, as `killed_peer` noted it."""
    return float(error.details[-1].removeprefix("heard after ").removesuffix(" s"))


def killed_peer(rank: Rank) -> str:
    """The last rank is killed between two calls; the others must hear of it at the next one."""
    parallel = TensorParallel(timeout_s=8.0)
    (operator, *_) = layers(parallel, variant="ring")
    parallel.prepare(tune=False)
    x = shard(parallel, 0, 64, operator.k, operator.weight)
    operator(x)
    if rank.index == rank.world_size - 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(30)
    start = time.monotonic()  # the kill comes 0.2 s after
    try:
        for _ in range(10_000):
            operator(x)
            parallel.check()
            time.sleep(0.01)
    except StrettoError as error:
        error.details += (f"heard after {time.monotonic() - start:.1f} s",)
        raise
    return "nothing happened"
