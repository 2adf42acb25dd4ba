"""The proof on a GPU: ``python -m benchmarks.gpu`` in a checkout, which ``make gpu`` runs. Needs no installation."""

import sys
from pathlib import Path

SOURCES = str(Path(__file__).resolve().parents[2] / "src")
if SOURCES not in sys.path:
    sys.path.insert(0, SOURCES)
