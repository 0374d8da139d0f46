"""The driver alone, without plan, doctor and launch: ``python -m tests.integration.mindspeed.driver CONFIG.yaml``."""

import os
import sys
from pathlib import Path

from coca_mindspeed.errors import CocaError
from coca_mindspeed.mindspeed.native import compose_config
from coca_mindspeed.mindspeed.start.driver import find_checkouts, prepare, train
from coca_mindspeed.mindspeed.start.records import read_record_file
from coca_mindspeed.upstream.launch import ending_by_signals
from coca_mindspeed.utils.console import print_failure
from coca_mindspeed.utils.text_formats import value_of


@ending_by_signals()
def main(file: str) -> int:
    try:
        home = find_checkouts(os.environ)["MINDSPEED_RL_HOME"]
        values = compose_config(Path(file), mindspeed_rl_home=home)
        named = [value_of(values, key) for key in ("megatron_training.data_path", "coca.eval_data")]
        files = {path: read_record_file(Path(path)) for path in named if path is not None}
        train(prepare(values, os.environ, files))
    except CocaError as error:
        return print_failure(error, error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
