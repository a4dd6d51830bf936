"""Machine profiles, and the cost models that the simulator asks."""

from stretto.sim.machine.describe import Fact, describe
from stretto.sim.machine.estimates import Estimate, Validity, worst
from stretto.sim.machine.fingerprint import host_fingerprint
from stretto.sim.machine.importers import import_aiconfigurator
from stretto.sim.machine.loading import available_profiles
from stretto.sim.machine.machine import FabricModel, HostModel, Machine, Mode
from stretto.sim.machine.schema import SCHEMA_VERSION, HostFingerprint, Profile
from stretto.sim.machine.transport import TransportModel

__all__ = [
    "SCHEMA_VERSION",
    "Estimate",
    "FabricModel",
    "Fact",
    "HostFingerprint",
    "HostModel",
    "Machine",
    "Mode",
    "Profile",
    "TransportModel",
    "Validity",
    "available_profiles",
    "describe",
    "host_fingerprint",
    "import_aiconfigurator",
    "worst",
]
