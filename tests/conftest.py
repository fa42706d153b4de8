"""Settings for every test."""

from hypothesis import settings

# On a busy machine an example may take any time; what a test claims does not depend on the clock.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
