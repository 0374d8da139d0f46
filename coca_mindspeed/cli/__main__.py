"""``python -m coca_mindspeed.cli``."""

import sys

from coca_mindspeed.cli import main
from coca_mindspeed.utils.packages import name_missing_packages

name_missing_packages()
sys.exit(main())
