"""``python -m coca_mindspeed.cli``."""

import sys

from coca_mindspeed.cli import main

sys.exit(main())
