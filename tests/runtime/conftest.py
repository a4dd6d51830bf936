"""Makes the helpers beside it importable, here and in the processes that are started from here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
