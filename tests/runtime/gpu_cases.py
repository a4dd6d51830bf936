"""What two GPUs must get right, case by case; all in one start of the ranks.

A case is called as ``case(rank)`` inside a torch.distributed program and returns what went wrong.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import library_ranks as ranks

from stretto.runtime import TensorParallel
from stretto.runtime.launcher import Rank
from stretto.schedules.language import Flag, StrettoError, Word, WorkspaceLayout
from stretto.transports.cuda.stream import CudaStream
from stretto.transports.interface import Memory

VARIANTS = ("ring", "direct", "eager", "unfused")
MILLISECOND = 1_800_000
"""Cycles, about, for ``torch.cuda._sleep``."""


def run_all(rank: Rank, names: list[str]) -> dict[str, Any]:
    """Return, by case, what went wrong; an error is wrong."""
    outcomes: dict[str, Any] = {}
    for name in names:
        try:
            outcomes[name] = CASES[name](rank)
        except StrettoError as error:
            outcomes[name] = [f"{type(error).__name__}: {error}", *error.details]
    return outcomes


def _opened(**more: Any) -> tuple[TensorParallel, list[Any]]:
    parallel = TensorParallel(timeout_s=10.0)
    operators = ranks.layers(parallel, dtype="bfloat16", **more)
    parallel.prepare(tune=False)
    return parallel, operators


def shapes_and_variants(rank: Rank) -> list[str]:
    """Every variant, tuned or not, on one workspace."""
    wrong = []
    for variant in (*VARIANTS, "auto"):
        with TensorParallel(timeout_s=10.0) as parallel:
            operators = ranks.layers(parallel, dtype="bfloat16", variant=variant)
            parallel.prepare(tune=variant == "auto")
            wrong += ranks.wrong_calls(parallel, operators, 2)
            parallel.check()
    return wrong


class Replayed:
    """A graph of some calls of several layers, with inputs that may be overwritten."""

    def __init__(self, parallel: TensorParallel, operators: list[Any], calls: int, seed: int):
        import torch

        self.parallel = parallel
        chosen = random.Random(seed)
        self.calls = [(chosen.choice(operators), chosen.choice((1, 9, 32))) for _ in range(calls)]
        self.inputs = [ranks.shard(parallel, 0, m, one.k, one.weight) for one, m in self.calls]
        stream = torch.cuda.current_stream()
        self.graph = torch.cuda.CUDAGraph()
        for x, (one, m) in zip(self.inputs, self.calls, strict=True):
            one(x, m=m)
        stream.synchronize()
        with torch.cuda.graph(self.graph, stream=stream):
            self.outputs = [
                one(x, m=m) for x, (one, m) in zip(self.inputs, self.calls, strict=True)
            ]

    def replay(self, seed: int) -> list[str]:
        """Overwrite the inputs, replay, and compare."""
        for place, (x, (one, m)) in enumerate(zip(self.inputs, self.calls, strict=True)):
            x.copy_(ranks.shard(self.parallel, seed + place, m, one.k, one.weight))
        self.graph.replay()
        return [
            f"replay {seed}, call {place}, m {m}"
            for place, (y, (one, m)) in enumerate(zip(self.outputs, self.calls, strict=True))
            if not (y == ranks.expected(seed + place, m, one.k, one.weight)).all()
        ]


def _alternate(parallel: TensorParallel, operators: list[Any], turns: int) -> list[str]:
    """Graphs of 1, 2 and 3 calls in any order, with eager calls in between."""
    import torch

    wrong: list[str] = []
    order = random.Random(7)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graphs = [Replayed(parallel, operators, calls, calls) for calls in (1, 2, 3)]
        for turn in range(turns):
            what = order.randrange(5)
            if what < 3:
                wrong += graphs[what].replay(100 * turn)
                continue
            one, m = order.choice(operators), order.choice((1, 9, 33))
            y = one(ranks.shard(parallel, turn, m, one.k, one.weight), m=m)
            if not (y == ranks.expected(turn, m, one.k, one.weight)).all():
                wrong.append(f"turn {turn}, eager, m {m}")
        stream.synchronize()
    parallel.check()
    return wrong


def graphs_alternate(rank: Rank) -> list[str]:
    """Any order of graphs and eager calls of different shapes is right."""
    wrong = []
    for variant in ("ring", "eager", "auto"):
        parallel, operators = _opened(variant=variant)
        wrong += _alternate(parallel, operators, 60)
        parallel.close()
    return wrong


def counters_wrap(rank: Rank) -> list[str]:
    """The same with use counts that pass 2^32 on the way."""
    parallel, operators = _opened(variant="ring")
    carrier = parallel.carrier_of("ring")
    workspace: Any = carrier.workspace
    executor = carrier.executor(operators[0].form("ring", 64))
    program = executor.executable.program
    slots = workspace.period
    uses = 2**32 // slots - 9
    values = {}
    for body in program.phases[0].bodies:
        for operation in body.operations:
            for sync in operation.signals():
                flag = program.flag[sync.word.flag]
                for slot in range(flag.slots):
                    last = (uses - 1) * slots + slot
                    for place in range(flag.count):
                        word = Word(flag.name, parallel.rank, slot, place)
                        values[word] = sync.value.at(last)
    workspace.set_words(values)
    workspace.set_uses(uses)
    _device_idle()
    parallel.exchange("set")
    wrong = _alternate(parallel, operators, 60)
    numbers = [int(one) & 0xFFFFFFFF for one in workspace.latest_calls()]
    if not all(number < 2**31 for number in numbers):
        wrong.append(f"no wrap was passed: {numbers}")
    parallel.close()
    return wrong


def one_rank_is_latched(rank: Rank) -> list[str]:
    """A rank's stream is held, first one's then the other's, while the others run ahead."""
    import torch

    parallel, operators = _opened(variant="ring")
    wrong = []
    for held in range(parallel.world_size):
        if rank.index == held:
            torch.cuda._sleep(200 * MILLISECOND)
        wrong += ranks.wrong_calls(parallel, operators, 1)
    parallel.close()
    return wrong


def input_is_overwritten_at_once(rank: Rank) -> list[str]:
    """The copy stream is late; the input is overwritten or freed as soon as the call returns."""
    import torch

    parallel, operators = _opened(variant="eager")
    one, m, wrong = operators[0], 64, []
    send = torch.cuda.ExternalStream(parallel.carrier_of("eager")._streams["send"].handle)
    for turn in range(6):
        x = ranks.shard(parallel, turn, m, one.k, one.weight)
        with torch.cuda.stream(send):
            torch.cuda._sleep(20 * MILLISECOND)
        y = one(x)
        if turn % 2:
            x.fill_(9)
        else:
            del x
            torch.full((m, one.k), 9.0, dtype=torch.bfloat16, device=parallel.device)
        if not (y == ranks.expected(turn, m, one.k, one.weight)).all():
            wrong.append(f"turn {turn}")
    parallel.close()
    return wrong


def a_signal_needs_no_multiprocessor(rank: Rank) -> list[str]:
    """Rank 0's GPU is full of a kernel that ends when rank 1 has seen rank 0's signal."""
    import torch

    parallel, _ = _opened(variant="ring")
    transport: Any = parallel.carrier_of("ring").transport
    workspace = transport.allocate(
        WorkspaceLayout(parallel.world_size, (("data", 1 << 20, 1),), (Flag("came"),))
    )
    streams = [CudaStream(torch.cuda.Stream().cuda_stream) for _ in range(2)]
    begin = transport.begin(workspace, [[]], stream=streams[0])
    from stretto.schedules.language import Epoch

    source = torch.full((1 << 20,), 7, dtype=torch.uint8, device=parallel.device)
    wrong: list[str] = []
    if rank.index == 0:
        size = source.numel()
        put = transport.put(
            Memory(source.data_ptr(), 1, size, size),
            Memory(workspace.address("data", rank=1, slot=0), 1, size, size),
            stream=streams[1],
        )
        signal = transport.signal(
            workspace, [Word("came", 1, 0, 0)], Epoch(1, 1), stream=streams[1]
        )
        spinner = Spinner(parallel.device)
        begin(0)
        _device_idle()
        parallel.exchange("ready")
        spinner.start()
        put(0)
        signal(0)
        end = time.monotonic() + 5
        while not rank.store.check(["spinner/seen"]):
            if time.monotonic() > end:
                wrong.append("rank 1 saw no signal while the multiprocessors were held")
                break
            time.sleep(0.01)
        if not spinner.running():
            wrong.append("the spinner had ended before")
        spinner.stop()
    else:
        wait = transport.wait(workspace, [Word("came", 1, 0, 0)], Epoch(1, 1), stream=streams[0])
        begin(0)
        _device_idle()
        parallel.exchange("ready")
        wait(0)
        torch.cuda.ExternalStream(streams[0].handle).synchronize()
        rank.store.set("spinner/seen", "1")
    _device_idle()
    parallel.check()
    parallel.exchange("over")
    parallel.close()
    return wrong


class Spinner:
    """A kernel with as many threads as the device can hold, until it is told to stop."""

    SOURCE = """
    extern "C" __global__ void spin(volatile int* page) {
      if (threadIdx.x == 0) atomicAdd((int*)page + 1, 1);
      while (page[0] == 0) {}
    }
    """

    def __init__(self, device: Any) -> None:
        import torch

        self.page = torch.zeros(16, dtype=torch.int32, pin_memory=True)
        self.stream = torch.cuda.Stream(device)
        properties = torch.cuda.get_device_properties(device)
        self.blocks = properties.multi_processor_count * 2
        self.kernel = torch.cuda._compile_kernel(self.SOURCE, "spin")

    def start(self) -> None:
        self.kernel(
            grid=(self.blocks, 1, 1),
            block=(1024, 1, 1),
            args=[self.page],
            stream=self.stream,
        )
        end = time.monotonic() + 5
        while int(self.page[1]) < self.blocks and time.monotonic() < end:
            time.sleep(0.001)

    def running(self) -> bool:
        return int(self.page[1]) == self.blocks and not self.stream.query()

    def stop(self) -> None:
        self.page[0] = 1
        self.stream.synchronize()


def a_thousand_calls_with_delays(rank: Rank) -> list[str]:
    """No barrier, random ranks late by host or device at random calls, all variants in turn."""
    import torch

    parallel, operators = _opened()
    order, own = random.Random(3), random.Random(100 + rank.index)
    expectations: dict[tuple[int, int, int], Any] = {}
    inputs: dict[tuple[int, int, int], Any] = {}
    mistakes = torch.zeros((), dtype=torch.int64, device=parallel.device)
    for _ in range(1000):
        place, m, seed = order.randrange(3), order.choice((1, 9, 33)), order.randrange(4)
        variant = order.choice(VARIANTS)
        one, key = operators[place], (place, m, seed)
        if key not in inputs:
            inputs[key] = ranks.shard(parallel, seed, m, one.k, one.weight)
            expectations[key] = ranks.expected(seed, m, one.k, one.weight)
        if own.random() < 0.04:
            torch.cuda._sleep(own.randrange(MILLISECOND))
        if own.random() < 0.02:
            time.sleep(own.random() * 2e-3)
        y = torch.empty((m, one.n), dtype=torch.bfloat16, device=parallel.device)
        parallel.enqueue(one, variant, m, inputs[key], y)
        mistakes += (y != expectations[key]).sum()
    wrong = int(mistakes)
    parallel.check()
    parallel.close()
    return [f"{wrong} elements"] if wrong else []


def streams_take_turns(rank: Rank) -> list[str]:
    """A call on another stream is refused until the workspace is moved there."""
    import torch

    parallel, operators = _opened(variant="ring")
    wrong = ranks.wrong_calls(parallel, operators, 1)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        try:
            ranks.wrong_calls(parallel, operators, 1)
            wrong.append("it was not refused")
        except StrettoError as error:
            wrong += [] if "move_to(stream)" in str(error) else [str(error)]
        parallel.move_to(other)
        wrong += ranks.wrong_calls(parallel, operators, 1)
    parallel.close()
    return wrong


def captures_are_refused_early(rank: Rank) -> list[str]:
    """Growth in a capture is refused with a sentence, and the capture can go on."""
    import torch

    parallel, operators = _opened(variant="ring")
    wrong: list[str] = []
    x = ranks.shard(parallel, 0, 64, 32, operators[0].weight)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    _device_idle()
    with torch.cuda.stream(stream):
        with torch.cuda.graph(graph, stream=stream):
            for name, call in {
                "cannot be captured": parallel.prepare,
                "takes 1 to 64": lambda: operators[0](torch.cat([x, x])),
            }.items():
                try:
                    call()
                    wrong.append(f"{name}: was not refused")
                except StrettoError as error:
                    wrong += [] if name in str(error) else [str(error)]
            y = operators[0](x)
        graph.replay()
        stream.synchronize()
    if not (y == ranks.expected(0, 64, 32, operators[0].weight)).all():
        wrong.append("the captured call is wrong")
    parallel.close()
    return wrong


def different_sizes_are_refused(rank: Rank) -> list[str]:
    """Ranks that ask for buffers of different size hear of it before anything is mapped."""
    parallel, operators = _opened(variant="ring")
    transport = parallel.carrier_of("ring").transport
    layout = WorkspaceLayout(parallel.world_size, (("data", 4096 + rank.index, 1),), ())
    wrong = []
    try:
        transport.allocate(layout)
        wrong.append("it was not refused")
    except StrettoError as error:
        wrong += [] if "different layout" in str(error) else [str(error)]
    wrong += ranks.wrong_calls(parallel, operators, 1)
    parallel.close()
    return wrong


def a_bad_address_is_named(rank: Rank) -> list[str]:
    """What the driver refuses comes out with the operation; last, since contexts may be lost."""
    parallel, operators = _opened(variant="eager")
    one = operators[0]
    executor = parallel.carrier_of("eager").executor(one.form("eager", 64))
    nowhere = Nowhere(one.weight.new_empty((32, one.k)))
    executor.executable.bind(
        executor.workspace.use_count,
        {"x": nowhere, "w": one.weight, "y": one.weight.new_empty((64, one.n))},
    )
    try:
        executor.run()
    except StrettoError as error:
        return [] if "put0" in str(error) else [str(error)]
    finally:
        parallel.exchange("over")
    return ["it was not refused"]


class Nowhere:
    """A tensor that says it is where nothing is."""

    def __init__(self, tensor: Any) -> None:
        self.narrow = tensor.narrow

    def data_ptr(self) -> int:
        return 16


def _device_idle() -> None:
    import torch

    torch.cuda.synchronize()


CASES: dict[str, Callable[[Rank], list[str]]] = {
    case.__name__: case
    for case in (
        shapes_and_variants,
        graphs_alternate,
        counters_wrap,
        one_rank_is_latched,
        input_is_overwritten_at_once,
        a_signal_needs_no_multiprocessor,
        a_thousand_calls_with_delays,
        streams_take_turns,
        captures_are_refused_early,
        different_sizes_are_refused,
        a_bad_address_is_named,
    )
}
SHARED = ("shapes_and_variants", "graphs_alternate")
"""What ranks that share GPUs check: a thinner set."""
