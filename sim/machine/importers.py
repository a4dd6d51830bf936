"""Profiles from data sets of others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, cast

import numpy as np

from stretto.schedules.language import (
    ALL_COLLECTIVES,
    Capabilities,
    DType,
    InvalidInput,
    Unavailable,
)
from stretto.sim.machine.fitting import GemmPoints, fit_gemm_profile
from stretto.sim.machine.machine import Machine
from stretto.sim.machine.schema import (
    Compute,
    Count,
    Curve,
    Fabric,
    GemmProfile,
    Host,
    Interference,
    ModeCosts,
    Origin,
    Profile,
    Provenance,
    Quantity,
    TransportProfile,
)

__all__ = ["import_aiconfigurator", "nccl_curves"]

_PROJECT = "aiconfigurator data set (https://github.com/ai-dynamo/aiconfigurator, Apache-2.0)"
_DTYPES: dict[str, DType] = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8"}
_PEAKS: dict[str, DType] = {"bfloat16_tc_flops": "bf16", "fp8_tc_flops": "fp8"}
_SM_COUNTS = {80: 108, 90: 132, 100: 148, 103: 148}
_FEWEST = 50  # GEMMs of a dtype, below which there is nothing to fit
_NCCL_DTYPE, _ELEMENT_BYTES = "half", 2  # message sizes are elements, other dtypes are there too
_PUT_BYTES = (4096, 1 << 20, 1 << 28)
_CONSTANTS = "no such figure in the data set; common on NVIDIA GPUs"


@dataclass(frozen=True)
class _Files:
    """Where the data set keeps what is needed of one system."""

    system: str
    description: Path
    gemm: Path
    nccl: Path

    @property
    def versions(self) -> dict[str, str]:
        """Which software was measured."""
        framework = self.gemm.parent.parent.name
        return {framework: self.gemm.parent.name, "nccl": self.nccl.parent.name}


def import_aiconfigurator(
    folder: Path,
    *,
    name: str,
    system: str | None = None,
    framework: str = "vllm",
    m_values: int | None = None,
) -> Machine:
    """Make a machine from a folder of the aiconfigurator data set.

    GEMM times and NCCL collectives are the data set's.  What it does not hold (host costs, a
    copy engine's push, interference) is assumed, and says so.

    Parameters
    ----------
    folder
        Holds ``systems/`` (or is it): ``SYSTEM.yaml``, ``data/SYSTEM/gemm/FRAMEWORK/VERSION/`` and
        ``data/SYSTEM/comm/nccl/VERSION/``.  The newest versions are taken.
    name
        Of the machine.
    system
        Which of the systems; may be left out where there is one.
    framework
        Whose GEMMs.
    m_values
        Keep that many values of m in the tables; all if None.

    Raises
    ------
    InvalidInput
        If the folder is not laid out like that, or a file lacks a column or holds no usable rows.
    Unavailable
        If pyarrow is not installed.
    """
    files = _find(folder, system=system, framework=framework)
    facts = _facts(files.description)
    compute = _compute(files, facts, m_values=m_values)
    fabric = _fabric(files, facts, hbm=compute.hbm_gb_per_s)
    profile = Profile(
        schema_version=1,
        name=name,
        description=f"{files.system}, imported from the {_PROJECT}",
        kind="gpu",
        domain_size=_domain_size(files, facts),
        compute=compute,
        host=_host(),
        fabric=fabric,
        transports={
            "nccl": _nccl(files),
            "copy_engine": _copy_engine(fabric.egress_gb_per_s.value),
        },
        provenance=Provenance(date=date.today().isoformat(), versions=files.versions),
    )
    return Machine.from_profile(profile)


def nccl_curves(
    rows: Sequence[tuple[str, int, int, float]], *, origin: Origin, source: str
) -> dict[str, dict[int, Curve]]:
    """Return curves by kind and world size.

    Parameters
    ----------
    rows
        Kind, world size, bytes of the full tensor, microseconds; other kinds are left out.
    """
    found: dict[str, dict[int, dict[int, float]]] = {}
    for kind, world_size, size_bytes, us in rows:
        if kind in ALL_COLLECTIVES and world_size >= 2:
            found.setdefault(kind, {}).setdefault(world_size, {})[size_bytes] = us
    return {
        kind: {
            world_size: Curve(
                origin=origin,
                source=source,
                points=tuple((size, float(f"{us:.5g}")) for size, us in sorted(points.items())),
            )
            for world_size, points in sorted(by_size.items())
            if len(points) > 1
        }
        for kind, by_size in sorted(found.items())
    }


def _find(folder: Path, *, system: str | None, framework: str) -> _Files:
    top = folder / "systems" if (folder / "systems").is_dir() else folder
    known = sorted(path.stem for path in top.glob("*.yaml"))
    if not known:
        raise InvalidInput(
            f"{folder} is no aiconfigurator folder: there is no systems/SYSTEM.yaml in it; "
            "give the folder that holds systems/."
        )
    if system is None and len(known) > 1:
        raise InvalidInput(f"{folder} has several systems; choose one of {', '.join(known)}.")
    chosen = known[0] if system is None else system
    if chosen not in known:
        raise InvalidInput(f"{folder} has no system {chosen!r}; choose one of {', '.join(known)}.")
    data = top / "data" / chosen
    return _Files(
        chosen,
        top / f"{chosen}.yaml",
        _newest(data / "gemm" / framework, "gemm_perf.parquet"),
        _newest(data / "comm" / "nccl", "nccl_perf.parquet"),
    )


def _newest(folder: Path, file: str) -> Path:
    found = sorted(folder.glob(f"*/{file}"), key=lambda path: _version(path.parent.name))
    if not found:
        raise InvalidInput(
            f"There is no {folder}/VERSION/{file}; the import needs it, so copy it from the "
            "data set."
        )
    return found[-1]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _facts(path: Path) -> dict[str, str]:
    """Read ``section.key: value`` lines of the simple YAML that the data set uses."""
    facts: dict[str, str] = {}
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.match(r"^(\s*)([\w-]+):\s*([^#]*?)\s*(?:#.*)?$", line)
        if match is None:
            continue
        indent, key, value = match.groups()
        if not indent:
            section = key
        elif len(indent) <= 2 and value:
            facts[f"{section}.{key}"] = value.strip("'\"")
    return facts


def _number(files: _Files, facts: Mapping[str, str], key: str) -> float:
    try:
        return float(facts[key])
    except (KeyError, ValueError) as error:
        raise InvalidInput(
            f"{files.description} gives no number for {key}; the import needs one there."
        ) from error


def _published(files: _Files, value: float) -> Quantity:
    source = f"{_PROJECT}, systems/{files.description.name}"
    return Quantity(value=value, origin="published", source=source)


def _assumed(value: float, source: str = _CONSTANTS) -> Quantity:
    return Quantity(value=value, origin="assumed", source=source)


def _domain_size(files: _Files, facts: Mapping[str, str]) -> Count:
    key = (
        "node.num_gpus_per_rack" if "node.num_gpus_per_rack" in facts else "node.num_gpus_per_node"
    )
    published = _published(files, 0.0)
    return Count(value=int(_number(files, facts, key)), origin="published", source=published.source)


def _compute(files: _Files, facts: Mapping[str, str], *, m_values: int | None) -> Compute:
    memory = _number(files, facts, "gpu.mem_bw") / 1e9
    scale = _number(files, facts, "gpu.mem_bw_empirical_scaling_factor")
    floor_us = _number(files, facts, "gpu.mem_empirical_constant_latency") * 1e6
    sm_version = int(_number(files, facts, "gpu.sm_version"))
    if sm_version not in _SM_COUNTS:
        raise InvalidInput(
            f"{files.description} has gpu.sm_version {sm_version}, of which the importer knows no "
            f"number of SMs; it knows {', '.join(map(str, _SM_COUNTS))}."
        )
    peaks = {
        dtype: _published(files, float(facts[f"gpu.{key}"]) / 1e12)
        for key, dtype in _PEAKS.items()
        if f"gpu.{key}" in facts
    }
    sm_count = Count(
        value=_SM_COUNTS[sm_version],
        origin="assumed",
        source=f"of GPUs with compute capability {sm_version / 10}",
    )
    gemm: dict[DType, GemmProfile] = {}
    for dtype, points in _gemm_points(files.gemm).items():
        peak = peaks.get(dtype) or peaks.get("bf16")
        if peak is None or len(points.us) < _FEWEST:
            continue
        versions = " ".join(files.gemm.parts[-3:-1])
        gemm[dtype] = fit_gemm_profile(
            points,
            dtype=dtype,
            peak_tflops=peak.value,
            sm_count=sm_count.value,
            hbm_gb_per_s=memory * scale,
            source=f"{_PROJECT}, GEMM times of {files.system} with {versions}",
            m_values=m_values,
        )
    if not gemm:
        raise InvalidInput(
            f"{files.gemm} has no dtype of {', '.join(_DTYPES)} with {_FEWEST} GEMMs and a peak "
            f"rate in {files.description}; take a fuller copy of the data set."
        )
    return Compute(
        peak_tflops=peaks,
        sm_count=sm_count,
        hbm_gb_per_s=_published(files, memory * scale),
        moved_floor_us=_published(files, floor_us),
        gemm=gemm,
    )


def _gemm_points(path: Path) -> dict[DType, GemmPoints]:
    """Return the GEMMs by dtype; where one shape was measured twice, the faster one."""
    columns = _read(path, ("gemm_dtype", "m", "n", "k", "latency"))
    best: dict[DType, dict[tuple[int, int, int], float]] = {}
    for label, m, n, k, ms in zip(*columns, strict=True):
        if label in _DTYPES and min(m, n, k) > 0 and ms > 0:
            times = best.setdefault(_DTYPES[label], {})
            times[m, n, k] = min(ms * 1e3, times.get((m, n, k), float("inf")))
    return {dtype: _as_points(times) for dtype, times in best.items()}


def _as_points(times: Mapping[tuple[int, int, int], float]) -> GemmPoints:
    m, n, k = np.array(list(times), dtype=np.int64).T
    return GemmPoints(m, n, k, np.array(list(times.values()), dtype=np.float64))


def _fabric(files: _Files, facts: Mapping[str, str], *, hbm: Quantity) -> Fabric:
    rate = _published(files, _number(files, facts, "node.intra_node_bw") / 1e9)
    return Fabric(topology="switch", egress_gb_per_s=rate, ingress_gb_per_s=rate, hbm_gb_per_s=hbm)


def _host() -> Host:
    return Host(
        enqueue_us=ModeCosts(eager=_assumed(2.0), graph=_assumed(0.6)),
        call_us=ModeCosts(eager=_assumed(10.0), graph=_assumed(8.0)),
    )


def _nccl(files: _Files) -> TransportProfile:
    columns = _read(files.nccl, ("nccl_dtype", "op_name", "num_gpus", "message_size", "latency"))
    rows = [
        (kind, world_size, elements * _ELEMENT_BYTES, ms * 1e3)
        for label, kind, world_size, elements, ms in zip(*columns, strict=True)
        if label == _NCCL_DTYPE
    ]
    source = f"{_PROJECT}, collectives of {files.system} with nccl {files.nccl.parent.name}"
    curves = nccl_curves(rows, origin="published", source=source)
    if not curves:
        raise InvalidInput(
            f"{files.nccl} has no {_NCCL_DTYPE} times of {', '.join(ALL_COLLECTIVES)}; "
            "take a fuller copy of the data set."
        )
    return TransportProfile(
        capabilities=Capabilities(
            "nccl",
            verbs=("collective",),
            collectives=tuple(kind for kind in ALL_COLLECTIVES if kind in curves),
            verbs_on_sm=("collective",),
            verbs_that_block=("collective",),
        ),
        collectives=cast("Any", curves),
        interference=Interference(
            gemm_slowdown_beside_put=_assumed(0.0, "it has no put"),
            gemm_slowdown_beside_collective=_assumed(0.3),
            sms_held=Count(value=16, origin="assumed", source=_CONSTANTS),
        ),
    )


def _copy_engine(link_gb_per_s: float) -> TransportProfile:
    latency_us, share = 2.6, 0.85
    source = (
        f"{latency_us} us (measured on H200) plus bytes at {share:.0%} of the link's nominal rate"
    )
    return TransportProfile(
        capabilities=Capabilities(
            "copy_engine",
            verbs=("put", "signal", "wait"),
            signal_orders_puts=True,
            verbs_on_sm=("wait",),
            verbs_that_block=("wait",),
            kernel_access=("load", "store"),
        ),
        put=Curve(
            origin="assumed",
            source=source,
            points=tuple(
                (size, round(latency_us + size / (share * link_gb_per_s) / 1e3, 3))
                for size in _PUT_BYTES
            ),
        ),
        copy_queues=Count(value=1, origin="assumed", source=_CONSTANTS),
        signal_us=_assumed(2.7),
        wait_us=_assumed(4.2),
        interference=Interference(
            gemm_slowdown_beside_put=_assumed(0.18, "measured on H200"),
            gemm_slowdown_beside_collective=_assumed(0.0, "it has no collective"),
            sms_held=Count(value=0, origin="assumed", source="copies hold no SM"),
        ),
    )


def _read(path: Path, names: Sequence[str]) -> list[list[Any]]:
    """Return columns of a parquet file as Python values."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise Unavailable(
            "Importing needs pyarrow, which is not installed; pip install pyarrow."
        ) from error
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise InvalidInput(
            f"{path} cannot be read as parquet ({str(error).splitlines()[0]}); copy it again."
        ) from error
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise InvalidInput(
            f"{path} has no column {', '.join(missing)}; the importer knows the layout of "
            "aiconfigurator with gemm_perf.parquet and nccl_perf.parquet."
        )
    return [table.column(name).to_pylist() for name in names]
