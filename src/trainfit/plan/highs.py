"""HiGHS as scipy has it: an optimum, or the proof that there is none."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from trainfit.errors import SolverError

_OPTIMAL, _INFEASIBLE = 0, 2  # milp's status

Floats = npt.NDArray[np.float64]


def minimum(
    cost: Floats,
    integrality: Floats,
    bounds: Bounds,
    constraints: LinearConstraint | Sequence[LinearConstraint],
    *,
    gap: float = 0.0,
) -> Floats | None:
    """The columns with the least cost; None where nothing fits. Raises SolverError where HiGHS stops without either.

    gap: of the cost, by which what is found may be above the least.
    """
    with _quiet_stdout():
        result = milp(
            cost,
            integrality=integrality,
            bounds=bounds,
            constraints=constraints,
            options={"mip_rel_gap": gap},
        )
    if result.status not in (_OPTIMAL, _INFEASIBLE):
        raise SolverError(f"HiGHS stopped with status {result.status}, no optimum: {result.message}")
    return None if result.status == _INFEASIBLE else np.asarray(result.x, dtype=np.float64)


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """HiGHS 1.12 prints to the process's stdout where it repairs a solution, whatever `disp` says; JSON goes there."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
