"""What can go wrong, as a tree.

TrainfitError
├── InputError (ValueError)         what the user gave cannot be used: exit code 2
│   ├── RecipeError                 a recipe, config or command line option is broken
│   ├── DeviceError                 no such device, or it lacks what was asked of it
│   ├── ModelError                  a model cannot be found, built or taken apart
│   ├── DataError                   the text is missing, unreadable or too short
│   ├── DoesNotFitError             no strategy is small enough for the budget
│   └── ResumeError                 a run folder cannot be resumed from
├── RecomputeError (RuntimeError)   a block did not recompute what its forward had saved
├── OffloadError (RuntimeError)     saved tensors could not be put elsewhere, or did not come back
├── SolverError (RuntimeError)      the MILP solver stopped with neither an optimum nor the proof that there is none
├── RankError                       one of the processes that measure() starts failed, or all took too long
└── OtherRankError                  another process of the run stopped, and said why: its exit code

Every message is one line: what, the numbers, the next move.
"""

from __future__ import annotations


class TrainfitError(Exception):
    """Everything that trainfit raises on purpose."""

    exit_code = 1


class InputError(TrainfitError, ValueError):
    """What the user gave cannot be used."""

    exit_code = 2


class RecipeError(InputError):
    """A recipe, config or option is missing, broken or has an unknown key."""


class DeviceError(InputError):
    """No such device, or the device lacks what was asked of it."""


class ModelError(InputError):
    """A model cannot be found, built or taken apart."""


class CompileError(ModelError):
    """A block cannot be compiled. what: the line without its advice, for whom compiling is only allowed."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}; {advice}")
        self.what = what


class DataError(InputError):
    """The training text is missing, unreadable or too short."""


class DoesNotFitError(InputError):
    """No strategy is small enough for the budget."""


class ResumeError(InputError):
    """A run folder cannot be resumed from."""


class RecomputeError(TrainfitError, RuntimeError):
    """A block did not recompute what its forward had saved."""


class OffloadError(TrainfitError, RuntimeError):
    """Saved tensors could not be put into host memory or a file, or did not come back from there."""


class SolverError(TrainfitError, RuntimeError):
    """The MILP solver stopped with neither an optimum nor the proof that there is none."""


class RankError(TrainfitError):
    """A process that was started here failed, or all of them took too long."""


class OtherRankError(TrainfitError):
    """Another process of the run stopped. It has said why, so this one need not say it again."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
