"""Puts benchmarks/tiny_models.py, the one copy of the tiny configs, within reach of these tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
