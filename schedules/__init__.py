"""The language of schedules, the schedules that are shipped, and their names."""

from __future__ import annotations

from stretto.schedules.ag_gemm import (
    AllGatherGemm,
    DirectAllGatherGemm,
    EagerAllGatherGemm,
    RingAllGatherGemm,
    UnfusedAllGatherGemm,
)
from stretto.schedules.catalogue import (
    DEFAULT_VARIANT,
    SCHEDULES,
    load_schedule,
    schedule_class,
)
from stretto.schedules.language import Capabilities, Program, Schedule, Timeline
from stretto.schedules.verifier import Verdict, check_timeline, verified, verify

__all__ = [
    "DEFAULT_VARIANT",
    "SCHEDULES",
    "AllGatherGemm",
    "Capabilities",
    "DirectAllGatherGemm",
    "EagerAllGatherGemm",
    "Program",
    "RingAllGatherGemm",
    "Schedule",
    "Timeline",
    "UnfusedAllGatherGemm",
    "Verdict",
    "check_timeline",
    "load_schedule",
    "schedule_class",
    "verified",
    "verify",
]
