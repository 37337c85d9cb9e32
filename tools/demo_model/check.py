"""Exit 1 unless a codec report shows that sound comes through: a gate between two runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

report = json.loads((Path(sys.argv[1]) / "codec.json").read_text())
sys.exit(0 if report["tone.sine"][0] > float(sys.argv[2]) else 1)
