"""`TensorParallel`: what the overlapped layers of one process group share."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from stretto.runtime.gemm import MeasuredGemm, TorchGemm
from stretto.runtime.launcher import require_torch
from stretto.runtime.parallel.carrier import Carrier
from stretto.runtime.parallel.operators import AllGatherGemm, Choice, block_of
from stretto.runtime.parallel.tuning import (
    DispatchTable,
    load_gemms,
    nearest,
    tune_gemms,
    tune_variants,
)
from stretto.runtime.session import host_id
from stretto.schedules import SCHEDULES
from stretto.schedules.language import (
    InvalidInput,
    RunFailed,
    StrettoError,
    Unavailable,
    UnknownName,
)
from stretto.transports import load_transport
from stretto.transports.interface import Transport

__all__ = ["TensorParallel"]

UNFUSED, OVERLAPPED = "unfused", "ring"
"""The baseline, and what is taken where nothing was measured."""
SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch's own switch for several ranks on one GPU."""

_made: Counter[tuple[int, ...]] = Counter()
"""How many were made for a group: each has its own part of the store, by the group's ranks and its
number; the ranks of a group make them in one order."""


class TensorParallel:
    """One workspace of symmetric memory for all overlapped layers of a process group.

    Making one, `prepare` and `close` are collective: every rank of the group does them, in the same
    order.  Operators that a layer calls come from `all_gather_gemm`; make all of them, then
    `prepare` once.  Operators made later need another `prepare`, which enlarges the workspace.

    One stream at a time: calls follow each other on one CUDA stream (`move_to` changes it), and a
    captured graph must be replayed in that order too, which nobody checks.

    Where overlapping is not possible, `refusal` says why, and every operator runs ``unfused``: the
    library's all-gather, then a GEMM.

    Parameters
    ----------
    group
        Of torch.distributed; by default the whole world.
    transport
        For overlapped schedules; by default ``copy_engine`` on GPUs, ``shared_memory`` on CPUs.
    device
        This rank's; by default its current CUDA device, or the CPU where there is none.
    timeout_s
        How long a wait inside a call may take before it is an error.
    join_timeout_s
        How long ranks wait for each other in collective steps: kernels may be compiled there.
    verify
        Prove every class of shapes safe before its first use (milliseconds, once).

    Raises
    ------
    InvalidInput
        If torch.distributed is not initialised.
    Unavailable
        If neither an overlapped schedule nor the library's collectives can be used here.
    """

    def __init__(
        self,
        group: Any | None = None,
        *,
        transport: str | None = None,
        device: Any | None = None,
        timeout_s: float = 30.0,
        join_timeout_s: float = 120.0,
        verify: bool = True,
    ) -> None:
        torch = require_torch()
        import torch.distributed as dist

        if timeout_s <= 0 or join_timeout_s <= 0:
            raise InvalidInput("A timeout is a number of seconds above 0.")
        if not dist.is_initialized():
            raise InvalidInput("Call torch.distributed.init_process_group() first.")
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise InvalidInput("This process is not in the group.")
        self.device = _device(torch, device)
        on_gpu = self.device.type != "cpu"
        if on_gpu:
            torch.cuda.set_device(self.device)
        self.transport = transport or ("copy_engine" if on_gpu else "shared_memory")
        _require_put(self.transport)
        providers = [TorchGemm()]
        if on_gpu:
            providers += [TorchGemm("cublas"), TorchGemm("cublaslt")]
        self.gemm = MeasuredGemm(providers)
        self.refusal: str | None = None
        self.fallback_refusal: str | None = None
        members = tuple(dist.get_process_group_ranks(self.group))
        _made[members] += 1
        # Rank 0's number: a rank that had to try twice has another.
        self._prefix = f"stretto/{'-'.join(map(str, members))}/{self.exchange(_made[members])[0]}"
        self._times = {"timeout_s": timeout_s, "join_timeout_s": join_timeout_s}
        self._verify = verify
        self._agreed_rows: set[int] = set()
        self._operators: list[AllGatherGemm] = []
        self._tables: dict[tuple[int, int, str], DispatchTable] = {}
        self._picked: dict[tuple[AllGatherGemm, int], str] = {}
        self._lock = threading.Lock()
        self._stream: int | None = None
        self._carriers: dict[str, Carrier] = {}
        self._open()

    # ---- set-up ------------------------------------------------------------------------------

    def all_gather_gemm(self, weight: Any, *, max_m: int, variant: str = "auto") -> AllGatherGemm:
        """Return an operator for this weight, to be called with up to `max_m` rows.

        Parameters
        ----------
        weight
            [n, k], this rank's own; every rank gives one of the same shape.
        max_m
            Most global rows of a call.
        variant
            A variant of ``ag-gemm``; ``auto`` takes the fastest for the rows of each call, as
            measured by `prepare`.
        """
        self._check_open()
        if variant != "auto" and variant not in SCHEDULES["ag-gemm"]:
            raise UnknownName("variant of ag-gemm", variant, ["auto", *SCHEDULES["ag-gemm"]])
        operator = AllGatherGemm(self, weight, max_m=max_m, variant=variant)
        self._operators.append(operator)
        return operator

    def prepare(self, *, tune: bool = True, mode: str = "graph") -> None:
        """Allocate, compile, measure and warm everything that the operators need; collective.

        Nothing waits for a signal until every rank has loaded its kernels, so that a slow
        compilation on one rank is no time-out on another.

        Parameters
        ----------
        tune
            Measure which GEMM and which variant is fastest, by rows; without it every call that
            may choose is a ``ring``.
        mode
            Whether calls will mostly be replayed in graphs or made anew (``eager``), which
            decides for few rows.

        Raises
        ------
        InvalidInput
            If the ranks' operators differ, there is not enough memory, or a graph is being
            captured.
        """
        if self._capturing():
            raise InvalidInput("prepare() cannot be captured in a graph; call it before.")
        self._check_open()
        new = [one for one in self._operators if not one.prepared]
        asked = [(one.n, one.k, one.max_m, one.dtype, one.variant) for one in new]
        try:
            self._agree("operators, or tune and mode of prepare()", (asked, tune, mode))
        except InvalidInput:
            self._operators = [one for one in self._operators if one.prepared]
            raise
        if mode not in ("graph", "eager"):
            raise InvalidInput(f"mode is {mode!r}; give 'graph' or 'eager'.")
        if not new:
            return
        try:
            self._prepare(new, tune=tune, mode=mode)
        except BaseException:
            for one in new:  # they cannot be used, and later ones may do without them
                self._operators.remove(one)
            raise

    def _prepare(self, new: list[AllGatherGemm], *, tune: bool, mode: str) -> None:
        for name, carrier in self._carriers.items():
            carrier.fit(
                [
                    one.form(variant, one.max_m)
                    for one in self._operators
                    for variant in self._variants(one, name)
                ]
            )
        self._together("loading GEMMs", lambda: load_gemms(self, new))
        if tune:
            self._together("measuring GEMMs", lambda: tune_gemms(self, new))
        self._warm(new)
        if tune:
            for key, table in tune_variants(self, new, mode=mode).items():
                self._tables.setdefault(key, {}).update(table)
            self._picked.clear()
        for one in new:
            one.prepared = True
        self.exchange("prepared")

    def rows(self, m: int, rank: int | None = None) -> range:
        """Return which of `m` global rows a rank has; this one by default."""
        return block_of(m, self.rank if rank is None else rank, self.world_size)

    # ---- calls -------------------------------------------------------------------------------

    def choice(self, operator: AllGatherGemm, m: int) -> Choice:
        """Return how a call is done, and why."""
        self._check_open()
        if not 1 <= m <= operator.max_m:
            raise InvalidInput(f"There is no call of {m} rows; it takes 1 to {operator.max_m}.")
        variant = self._variant(operator, m)
        carrier = self._transport_of(variant)
        if self.refusal is not None and operator.variant != UNFUSED:
            return Choice(variant, carrier, f"Overlapping is not possible: {self.refusal}")
        if self.fallback_refusal is not None and operator.variant == UNFUSED:
            return Choice(variant, carrier, f"No unfused: {self.fallback_refusal}")
        if operator.variant != "auto":
            return Choice(variant, carrier, "The operator's own variant.")
        table = self._tables.get((operator.n, operator.k, operator.dtype))
        if not table:
            return Choice(variant, carrier, "Nothing was measured.")
        measured = nearest(table, m)
        said = ", ".join(f"{name} {us:.0f} us" for name, us in table[measured][1].items())
        return Choice(variant, carrier, f"At {measured} rows: {said}.")

    def _variant(self, operator: AllGatherGemm, m: int) -> str:
        found = self._picked.get((operator, m))
        if found is None:
            found = self._picked[operator, m] = self._pick(operator, m)
        return found

    def _pick(self, operator: AllGatherGemm, m: int) -> str:
        if self.refusal is not None:
            return UNFUSED
        if operator.variant == UNFUSED and self.fallback_refusal is not None:
            return OVERLAPPED
        if operator.variant != "auto":
            return operator.variant
        table = self._tables.get((operator.n, operator.k, operator.dtype))
        return table[nearest(table, m)][0] if table else OVERLAPPED

    def run(self, operator: AllGatherGemm, m: int, x: Any, out: Any) -> None:
        """Enqueue one call; what operators do when they are called."""
        self._check_open()
        if not operator.prepared:
            raise InvalidInput("Call TensorParallel.prepare() on every rank before the first call.")
        with self._alone():
            self._take_stream()
            self._agree_on_rows(m)
            self.enqueue(operator, self._variant(operator, m), m, x, out)

    def _agree_on_rows(self, m: int) -> None:
        """Hold the number of rows against the other ranks', the first time that it is used here.

        Ranks that differ would push rows to where nobody looks for them.
        """
        if m in self._agreed_rows:
            return
        first = next(iter(self._carriers.values()))  # one for all: the variant depends on m
        for rank, said in enumerate(first.transport.exchange({"m": m})):
            if said != {"m": m}:
                raise InvalidInput(
                    f"Rank {self.rank} calls with {m} rows in all, rank {rank} with {said['m']}; "
                    "pass the same m on all ranks."
                )
        self._agreed_rows.add(m)

    def enqueue(self, operator: AllGatherGemm, variant: str, m: int, x: Any, out: Any) -> None:
        """Enqueue a call by this variant."""
        tensors = {"x": x, "w": operator.weight, "y": out}
        self.carrier_of(variant).enqueue(operator.form(variant, m), tensors)

    def move_to(self, stream: Any) -> None:
        """Let the next calls come on another CUDA stream, after all that were made so far."""
        import torch

        with self._alone():
            if self._stream is not None:
                stream.wait_stream(torch.cuda.ExternalStream(self._stream))
            self._stream = stream.cuda_stream

    def check(self) -> None:
        """Raise if a call or a rank has failed, now; graphs that are replayed cannot say it.

        Raises
        ------
        RunFailed
            The first failure (`WaitTimeout`, `PeerLost`).
        """
        self._check_open()
        for carrier in self._carriers.values():
            carrier.check()

    def close(self) -> None:
        """Give everything back, once the device is done with it; a second call does nothing."""
        carriers, self._carriers = self._carriers, {}
        failed: Exception | None = None
        for carrier in carriers.values():
            try:
                carrier.close()
            except Exception as error:  # noqa: BLE001 (the others are closed first)
                failed = error
        if failed is not None:
            raise failed

    def __enter__(self) -> TensorParallel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- helpers -----------------------------------------------------------------------------

    def exchange(self, value: Any) -> list[Any]:
        """Return what every rank said, by rank."""
        import torch.distributed as dist

        said: list[Any] = [None] * self.world_size
        dist.all_gather_object(said, value, group=self.group)
        return said

    def carrier_of(self, variant: str) -> Carrier:
        """Return what runs a variant."""
        return self._carriers[self._transport_of(variant)]

    def variants_of(self, operator: AllGatherGemm) -> list[str]:
        """Return the variants that calls of an operator may use here."""
        return [one for name in self._carriers for one in self._variants(operator, name)]

    def _open(self) -> None:
        """Make both transports, each only if every rank can."""
        import torch.distributed as dist

        store = dist.distributed_c10d._get_default_store()
        whole = self.world_size == dist.get_world_size()
        places = self.exchange((host_id(), str(self.device)))
        own = None
        if not whole:
            own = "the group is a part of the world, and symmetric memory needs all of it."
        elif len({host for host, _ in places}) > 1:
            own = "the ranks are on different hosts."
        elif self.device.type != "cpu" and len(set(places)) < len(places) and not _may_share():
            own = (
                f"two ranks use {self.device}; call torch.cuda.set_device(local_rank) before, or "
                f"set {SHARE}=1 to let ranks share a GPU."
            )

        self.refusal = self._try(self.transport, store, own)
        self.fallback_refusal = self._try("rccl", store, None)
        if not self._carriers:
            raise Unavailable(
                f"Transport {self.transport!r}: {self.refusal} Transport 'rccl': "
                f"{self.fallback_refusal}"
            )

    def _try(self, name: str, store: Any, reason: str | None) -> str | None:
        """Keep a transport if all ranks have it; else return the first rank's reason.

        Ranks say first whether they can, so that none waits for one that cannot.
        """
        refused = self._first(reason or _lacking(name))
        if refused is not None:
            return refused
        made: Transport | None = None
        reason = None
        try:
            made = self._made(name, store)
        except (StrettoError, RuntimeError, ImportError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
        refused = self._first(reason)
        if refused is None and made is not None:
            self._carriers[name] = Carrier(made, self.gemm, verify=self._verify)
        elif made is not None:
            made.close()
        return refused

    def _first(self, reason: str | None) -> str | None:
        """Return the first reason that any rank has, with its rank; None if none has one."""
        reasons = self.exchange(reason)
        found = ((rank, one) for rank, one in enumerate(reasons) if one is not None)
        return next((f"rank {rank}: {one}" for rank, one in found), None)

    def _made(self, name: str, store: Any) -> Transport:
        cls: Any = load_transport(name)
        more: dict[str, Any] = {}
        if self.device.type != "cpu":
            more["device"] = self.device.index
        elif name == "rccl":
            more["device"] = "cpu"
        made: Transport = cls(
            self.rank,
            self.world_size,
            store,
            key_prefix=f"{self._prefix}/{name}",
            **self._times,
            **more,
        )
        return made

    def _together(self, what: str, step: Callable[[], None]) -> None:
        """Do something of this rank's own, and raise on all ranks if it fails on one."""
        problem: Exception | None = None
        try:
            step()
        except Exception as error:  # noqa: BLE001 (told to all, and raised)
            problem = error
        said = None if problem is None else f"{what} failed: {problem}"
        refused = self._first(said)
        if problem is not None:
            raise problem
        if refused is not None:
            raise RunFailed(refused)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse a second thread."""
        if not self._lock.acquire(blocking=False):
            raise InvalidInput("Another thread is in a call on this workspace; take turns.")
        try:
            yield
        finally:
            self._lock.release()

    def _check_open(self) -> None:
        if not self._carriers:
            raise RunFailed("This TensorParallel has been closed; make another.")

    def _agree(self, what: str, value: Any) -> None:
        for rank, other in enumerate(self.exchange(value)):
            if other != value:
                raise InvalidInput(
                    f"Ranks {self.rank} and {rank} have different {what}: {value} and {other}."
                )

    def _variants(self, operator: AllGatherGemm, transport: str) -> list[str]:
        """Return the variants of an operator that this transport carries."""
        others = [one for one in SCHEDULES["ag-gemm"] if one != UNFUSED]
        unfused = operator.variant == UNFUSED
        if transport == "rccl":
            return [UNFUSED] if unfused or operator.variant == "auto" or self.refusal else []
        if operator.variant == "auto":
            return others
        if unfused:
            return [OVERLAPPED] if self.fallback_refusal else []
        return [operator.variant]

    def _transport_of(self, variant: str) -> str:
        return "rccl" if variant == UNFUSED else self.transport

    def _warm(self, operators: list[AllGatherGemm]) -> None:
        """Run every form of most rows once, and of uneven ones, so that all is loaded and made."""
        done = set()
        for one in operators:
            for variant in self.variants_of(one):
                for m in dict.fromkeys((one.max_m, max(1, one.max_m - 1))):
                    form = one.form(variant, m)
                    if form in done:
                        continue
                    done.add(form)
                    x = one.weight.new_zeros((len(self.rows(m)), one.k))
                    self.enqueue(one, variant, m, x, one.weight.new_empty((m, one.n)))
                    self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cpu":
            return
        import torch

        torch.cuda.current_stream(self.device).synchronize()
        self.check()

    def _capturing(self) -> bool:
        if self.device.type == "cpu":
            return False
        import torch

        return torch.cuda.is_current_stream_capturing()

    def _take_stream(self) -> None:
        """Refuse a call on another stream than the last one's; captured calls are exempt."""
        if self.device.type == "cpu":
            return
        import torch

        if torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(self.device).cuda_stream
        if self._stream is None:
            self._stream = current
        elif self._stream != current:
            raise InvalidInput(
                "The workspace is in use on another stream, and one stream at a time may use it; "
                "call move_to(stream) to change over, or make a TensorParallel for each stream."
            )


def _require_put(name: str) -> None:
    """Refuse a transport that no overlapped schedule can use."""
    try:
        offered = load_transport(name).offered()
    except Unavailable:
        return  # said as a refusal, on all ranks
    lacking = offered.lacks("put", None)
    if lacking is not None:
        raise InvalidInput(f"{lacking}; leave transport out, or name one that pushes.")


def _lacking(name: str) -> str | None:
    """Return why this process cannot use a transport, None if it can."""
    try:
        state = load_transport(name).available()
    except Unavailable as error:
        return str(error)
    return None if state.usable else state.reason


def _has_cuda(torch: Any) -> bool:
    return bool(torch.cuda.is_available())


def _may_share() -> bool:
    return os.environ.get(SHARE) == "1"


def _device(torch: Any, asked: Any | None) -> Any:
    """Return this rank's device."""
    if asked is not None:
        found = torch.device(asked)
        if found.type not in ("cpu", "cuda") or (found.type == "cuda" and not _has_cuda(torch)):
            raise InvalidInput(f"There is no device {asked!r} here; give 'cpu' or a CUDA device.")
        if found.type == "cuda" and found.index is None:
            found = torch.device("cuda", torch.cuda.current_device())
        return found
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
