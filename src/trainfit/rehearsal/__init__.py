"""What a step needs: rehearsed on fake tensors, or measured for real. Both give a Profile."""

from trainfit.rehearsal.measure import RecordedRun, measure
from trainfit.rehearsal.rehearse import rehearse

__all__ = ["RecordedRun", "measure", "rehearse"]
