"""Settings for every test."""

import os
import tempfile

from hypothesis import settings

# No calibration that this machine's user has stored: what tests say of it would depend on that.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="trainfit-tests-")

# On a busy machine an example may take any time; what a test claims does not depend on the clock.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
