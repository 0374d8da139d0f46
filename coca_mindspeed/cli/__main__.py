"""``python -m coca_mindspeed.cli``."""

import sys

from coca_mindspeed.__main__ import main

sys.exit(main())
