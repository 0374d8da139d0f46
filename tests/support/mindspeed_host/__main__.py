"""``python FOLDER SCRIPT ARGUMENTS``, with this folder: run a script of a checkout with the stubs for packages of NPUs.

So runs MindSpeed-LLM's weight converter, in its checkout, which has a package ``tests`` of its own.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[3])
    from tests.support.mindspeed_host import install

    install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
