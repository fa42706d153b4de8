"""What a step needs: rehearsed on fake tensors, or measured for real. Both give a Profile."""

from trainfit.rehearsal.measure import RecordedRun, measure, measure_ranks
from trainfit.rehearsal.rehearse import rehearse
from trainfit.rehearsal.verify import VerifyReport, verify

__all__ = ["RecordedRun", "VerifyReport", "measure", "measure_ranks", "rehearse", "verify"]
