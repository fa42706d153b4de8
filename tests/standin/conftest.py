"""Keeps tests/standin/device out of any process that has not asked for the stand-in.

NOTE [ A process of its own ]
Importing the stand-in changes torch for good: PrivateUse1 becomes npu and this_machine() an Ascend. So the device tests
are collected only where TRAINFIT_STANDIN=1 is set, and test_standin.py runs them in such a process.
"""

import os

collect_ignore = [] if os.environ.get("TRAINFIT_STANDIN") == "1" else ["device"]
