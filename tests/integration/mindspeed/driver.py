"""The driver alone, without plan, doctor and launch: ``python -m tests.integration.mindspeed.driver CONFIG.yaml``."""

import os
import sys
from pathlib import Path

from coca_mindspeed.errors import CocaError
from coca_mindspeed.mindspeed.native import compose_config
from coca_mindspeed.mindspeed.start.driver import find_checkouts, prepare, train
from coca_mindspeed.upstream.launch import ending_by_signals
from coca_mindspeed.utils.console import print_failure


@ending_by_signals()
def main(file: str) -> int:
    try:
        home = find_checkouts(os.environ)["MINDSPEED_RL_HOME"]
        train(prepare(compose_config(Path(file), mindspeed_rl_home=home), os.environ))
    except CocaError as error:
        return print_failure(error, error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
