"""One process a rank: started here by torch's launcher, or joined where ``torchrun`` started them.

Every rank runs the same function with a `Rank`: its number, the world size and a store to meet the
others.  Results come back as files in a private folder, since a killed process can corrupt a queue
but not another process's file.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from stretto.schedules.language import InvalidInput, PeerLost, RunFailed, StrettoError, Unavailable
from stretto.transports.multicast import switch_multicast_off

__all__ = ["Rank", "launch", "require_torch", "torchrun_rank"]

STORE_TIMEOUT_S = 120
GRACE_PERIOD_S = 10
"""How long ranks may take to end by themselves, with their own error, once one has failed."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a run.

    Attributes
    ----------
    index, world_size
        Its number and the number of ranks.
    store
        A ``torch.distributed`` store, shared by all.
    """

    index: int
    world_size: int
    store: Any


def require_torch() -> Any:
    """Switch multicast off, import torch and return it.

    Raises
    ------
    Unavailable
        If torch is not installed; the message says how to install it.
    """
    switch_multicast_off()
    try:
        import torch
    except ImportError as error:
        raise Unavailable(
            "Real runs need PyTorch, which is not installed: pip install 'stretto[run]'. "
            "simulate, figure and machines work without it."
        ) from error
    return torch


def torchrun_rank() -> Rank | None:
    """Return this process's rank if ``torchrun`` started it, else None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    require_torch()
    import torch.distributed as dist

    store, index, world_size = next(
        iter(dist.rendezvous("env://", timeout=timedelta(seconds=STORE_TIMEOUT_S)))
    )
    return Rank(index, world_size, store)


def launch(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Run ``function(rank, *arguments)`` in `world_size` processes; return what each returned.

    Raises
    ------
    InvalidInput
        If ``torchrun`` started another number of processes.
    RunFailed
        If a rank failed: its own error where it has one, else how it died.
    """
    require_torch()
    import torch.multiprocessing as mp
    from torch.distributed import TCPStore

    if world_size < 1:
        raise InvalidInput(f"--tp is {world_size}; give at least one rank.")
    store = TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
    )
    with _ended_by_terminate(), tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        context = mp.start_processes(
            _child,
            args=(function, world_size, store.port, folder, arguments),
            nprocs=world_size,
            join=False,
            start_method="spawn",
        )
        failure: BaseException | None = None
        try:
            while not context.join(timeout=1.0, grace_period=GRACE_PERIOD_S):
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            failure = error
        finally:
            _stop(context.processes)
        outcomes = [_read(Path(folder, f"{rank}.pickle")) for rank in range(world_size)]
    errors = [outcome.error for outcome in outcomes if outcome and outcome.error]
    if errors:
        # A rank that only heard of another's failure says less than the one that failed.
        raise min(errors, key=lambda error: isinstance(error, PeerLost)) from None
    if failure is not None:
        raise RunFailed(_death(failure)) from failure
    return [outcome.value for outcome in outcomes if outcome is not None]


@contextmanager
def _ended_by_terminate() -> Iterator[None]:
    """Let SIGTERM end this process as an exit does: ranks are stopped, files removed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what signals do
        return

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True, slots=True)
class _Outcome:
    value: Any = None
    error: BaseException | None = None


def _child(
    index: int,
    function: Callable[..., Any],
    world_size: int,
    port: int,
    folder: str,
    arguments: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)
    switch_multicast_off()
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S))
    try:
        outcome = _Outcome(function(Rank(index, world_size, store), *arguments))
    except StrettoError as error:
        outcome = _Outcome(error=error)
    path = Path(folder, f"{index}.pickle")
    path.with_suffix(".part").write_bytes(pickle.dumps(outcome))
    path.with_suffix(".part").rename(path)
    if outcome.error is not None:
        sys.stderr.flush()
        os._exit(1)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _read(path: Path) -> _Outcome | None:
    try:
        outcome: _Outcome = pickle.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return outcome


def _stop(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def _death(error: Any) -> str:
    rank = getattr(error, "error_index", "?")
    name = getattr(error, "signal_name", None)
    if name:
        return f"Rank {rank} was ended by {name} before it had finished."
    text = str(error).strip().splitlines()
    return f"Rank {rank} failed: {text[-1] if text else type(error).__name__}"
