"""``stretto doctor``: what works here, and why the rest does not."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import stretto
from stretto.cli import options as opt
from stretto.cli.application import app
from stretto.cli.output import print_json, print_pairs, print_table

PLANNED = {
    "nvls": "not part of this version; it can be simulated",
}


@app.command("doctor")
def doctor_command(as_json: opt.JsonOption = False) -> None:
    """Say which transports, devices and libraries work here, and why the others do not."""
    from stretto.transports import availability

    transports = {
        name: {"usable": state.usable, "reason": state.reason}
        for name, state in availability().items()
    }
    for name, reason in PLANNED.items():
        transports.setdefault(name, {"usable": False, "reason": reason})
    facts = _facts()
    if as_json:
        print_json({"stretto": stretto.__version__, "facts": facts, "transports": transports})
        return
    print_pairs(f"stretto {stretto.__version__}", list(facts.items()))
    print_table(
        "transports",
        ["name", "usable here", "reason"],
        [
            [name, "yes" if state["usable"] else "no", str(state["reason"])]
            for name, state in transports.items()
        ],
        left=3,
    )


def _facts() -> dict[str, str]:
    from stretto.runtime.devices import describe_devices

    facts = {"python": platform.python_version(), "system": platform.platform()}
    facts |= describe_devices()
    for package, why in (
        ("torch", "needed by run, compare and calibrate: pip install 'stretto[run]'"),
        ("cuda-bindings", "needed for NVIDIA GPUs: pip install 'stretto[cuda]'"),
        ("nvidia-cutlass-dsl", "needed for fused kernels: pip install 'stretto[kernels]'"),
        ("perfetto", "needed by --trace: pip install perfetto"),
    ):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = f"not installed; {why}"
    return facts
