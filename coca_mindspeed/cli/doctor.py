"""``coca-mindspeed doctor``: is this machine ready for a run on Ascend?  Exit code 0 or 1."""

import argparse
from pathlib import Path

from rich.table import Table

from coca_mindspeed.cli.options import place
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.mindspeed.doctor.machine import Machine
from coca_mindspeed.mindspeed.doctor.machine_checks import examine_machine
from coca_mindspeed.mindspeed.start.releases import STACKS
from coca_mindspeed.utils.console import PlainConsole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_name", nargs="?", metavar="RUN", help="also look at what this run needs (weights, data)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as in coca-mindspeed check")
    parser.add_argument("--release", choices=STACKS, help="of MindSpeed-RL (default: what MINDSPEED_RL_HOME holds)")
    parser.add_argument("--output", type=place, metavar="DIR", help="where the run goes (default: runs/RUN)")
    parser.add_argument("--only-problems", action="store_true", help="leave out what is as wanted")


def run(arguments: argparse.Namespace) -> int:
    run_config = compose_run(arguments.run_name, arguments.overrides).run if arguments.run_name else None
    output = arguments.output or Path("runs") / Path(arguments.run_name or "").stem
    findings = examine_machine(Machine(), run_config, arguments.release, output)
    wrong = [finding for finding in findings if not finding.ok]
    table = Table("", "looked at", "found", "wanted", "how to fix")
    for finding in wrong if arguments.only_problems else findings:
        table.add_row("ok" if finding.ok else "NO", finding.name, finding.found, finding.wanted, finding.fix)
    if table.row_count:
        PlainConsole().print_table(table)
    print(f"{len(findings) - len(wrong)} of {len(findings)} as wanted")
    return 1 if wrong else 0
