"""One transport of a `TensorParallel`: its workspace, its streams, and executors by shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from stretto.runtime.executors.cpu import CpuExecutor
from stretto.runtime.gemm import GemmProvider
from stretto.runtime.hang_report import with_flag_state
from stretto.runtime.lowering import lower
from stretto.runtime.parallel.replays import Replays
from stretto.schedules import schedule_class
from stretto.schedules.language import Program, WorkspaceLayout
from stretto.schedules.verifier import verified
from stretto.transports.interface import Transport, Workspace

__all__ = ["Carrier", "Form"]

_GPU_EXECUTORS, _CPU_EXECUTORS = 128, 4
"""How many are kept; one of a CPU has threads."""


class Form(NamedTuple):
    """What an executor is made for; weights of one form share it."""

    variant: str
    m: int
    n: int
    k: int
    dtype: str


class Carrier:
    """Makes and keeps what a transport needs to run Programs of any form.

    Parameters
    ----------
    transport
        Open.
    gemm
        Provider of all its GEMMs.
    verify
        Prove every class of shapes safe before its first use.
    """

    def __init__(self, transport: Transport, gemm: GemmProvider, *, verify: bool) -> None:
        self.transport, self.gemm, self.verify = transport, gemm, verify
        self.workspace: Workspace | None = None
        self._retired: list[Workspace] = []
        self._streams: dict[str, Any] = {}
        self._executors: OrderedDict[Form, Any] = OrderedDict()
        self._replays = Replays()
        # A library wants a collective captured by all ranks or by none, and each rank decides by
        # its own addresses.
        self._replayable = transport.device is not None and not (
            type(transport).offered().collectives
        )

    def enqueue(self, form: Form, tensors: Mapping[str, Any]) -> None:
        """Enqueue a call on the current stream, or run it to its end on a CPU.

        Parameters
        ----------
        form
            Of the call.
        tensors
            The caller's, by buffer, which have the form's shapes.
        """
        executor = self.executor(form)
        with with_flag_state(executor.executable, self.workspace):
            self.transport.raise_if_noted()
            if not self._replayable or executor.capturing():
                self._run(executor, tensors)
            else:
                self._replay(form, executor, tensors)

    def _run(self, executor: Any, tensors: Mapping[str, Any]) -> None:
        use = self._use(executor)
        executor.executable.bind(use, tensors)
        try:
            executor.run()
            if self.transport.device is None:
                executor.synchronize()
                executor.forget_spans()
        finally:
            executor.executable.release(use)

    def _replay(self, form: Form, executor: Any, tensors: Mapping[str, Any]) -> None:
        """Replay a call that has come often; enqueue it otherwise."""
        use = self._use(executor)
        slot = use % executor.period
        key = (form, slot, *(tensor.data_ptr() for tensor in tensors.values()))
        graph = self._replays.find(key)
        if graph is None and not self._replays.due(key):
            self._run(executor, tensors)
            return
        try:
            if graph is None:
                graph = self._replays.capture(key, partial(self._run, executor, tensors))
            graph.replay()
        except Exception as error:
            executor.count(use - 1)  # a capture that fails has made no call
            named = executor.named(error, "a replay", use)
            executor.give_up(named)
            raise named from error
        executor.count(use)

    def _use(self, executor: Any) -> int:
        """Return the number of the next call."""
        return executor.uses if self.workspace is None else self.workspace.use_count

    def program(self, form: Form) -> Program:
        """Build, and prove, the Program of a form."""
        program = schedule_class("ag-gemm", form.variant)(
            world_size=self.transport.world_size,
            m=form.m,
            n=form.n,
            k=form.k,
            dtype=form.dtype,  # type: ignore[arg-type]
            capabilities=type(self.transport).offered(),
        ).build()
        if self.verify:
            verified(program)
        return program

    def fit(self, forms: Sequence[Form]) -> None:
        """Make a workspace that fits all forms, if the present one does not; collective.

        The old one stays for graphs that were captured with it.
        """
        if not forms:
            return
        layout = WorkspaceLayout.of(*(self.program(form) for form in forms))
        if not (layout.buffers or layout.flags):
            return
        if self.workspace is not None and self.workspace.layout.holds(layout):
            return
        self.forget()
        made = self.transport.allocate(layout)
        if self.workspace is not None:
            self._retired.append(self.workspace)
        self.workspace = made

    def executor(self, form: Form) -> Any:
        """Return the executor of a form, made now if there is none.

        Raises
        ------
        RunFailed
            If it would have to be made in a graph's capture and needs memory for that.
        """
        found = self._executors.get(form)
        if found is not None:
            self._executors.move_to_end(form)
            return found
        program = self.program(form)
        limit = _CPU_EXECUTORS if self.transport.device is None else _GPU_EXECUTORS
        if len(self._executors) >= limit:
            self._executors.popitem(last=False)[1].close()
        made = self._made(program)
        self._executors[form] = made
        return made

    def check(self) -> None:
        """Raise what has failed, with the flags of the Program that was used last."""
        if not self._executors:
            self.transport.raise_if_failed()
            return
        latest = next(reversed(self._executors.values()))
        with with_flag_state(latest.executable, self.workspace):
            self.transport.raise_if_failed()

    def forget(self) -> None:
        """Close all executors, once the device has done what they enqueued."""
        if self._executors and self.transport.device is not None:
            import torch

            torch.cuda.synchronize(self.transport.device)
        for executor in self._executors.values():
            executor.close()
        self._executors.clear()
        self._replays.clear()

    def close(self) -> None:
        """Give everything back, whatever has failed."""
        try:
            self.forget()
        finally:
            for workspace in (self.workspace, *self._retired):
                if workspace is not None:
                    workspace.close()
            self.transport.close()

    def _made(self, program: Program) -> Any:
        if self.transport.device is None:
            executable = lower(
                program,
                transport=self.transport,
                workspace=self.workspace,
                tensors=None,
                gemm=self.gemm,
            )
            import torch

            return CpuExecutor(
                executable,
                transport=self.transport,
                workspace=self.workspace,
                threads=torch.get_num_threads(),
            )
        from stretto.runtime.gpu import prepare

        return prepare(
            program,
            self.transport,
            None,
            self.workspace,
            gemm=self.gemm,
            streams=self._streams,
        )
