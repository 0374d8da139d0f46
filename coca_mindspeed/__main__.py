"""The command ``coca-mindspeed``, and ``python -m coca_mindspeed``."""

import sys

from coca_mindspeed.utils.interrupts import quiet_imports


def main() -> int:
    """Run the command line."""
    with quiet_imports("coca-mindspeed"):
        from coca_mindspeed.cli import main as run_command_line
        from coca_mindspeed.utils.packages import name_missing_packages

        name_missing_packages()
        return run_command_line()


if __name__ == "__main__":
    sys.exit(main())
