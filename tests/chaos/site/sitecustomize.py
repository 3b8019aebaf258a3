"""Python imports this as it starts, in every process of a fleet: what a job's own processes do is up to `stand_in`."""

import os
import sys

if "TUNEYARD_ATTEMPT" in os.environ:
    from tests.chaos import stand_in

    stand_in.take_over(sys.orig_argv)
