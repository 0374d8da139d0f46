"""``python -m coca_router``."""

import sys

from coca_mindspeed.utils.packages import name_missing_packages
from coca_router.cli import PROGRAM, main

name_missing_packages(PROGRAM)
sys.exit(main())
