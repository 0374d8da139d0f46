"""``coca-mindspeed doctor``: is this machine ready for a run on Ascend, or on verl?  Exit code 0 or 1."""

import argparse
import json
from pathlib import Path

from coca_mindspeed.cli.options import place
from coca_mindspeed.config.compose import find_verl_run
from coca_mindspeed.errors import UsageError
from coca_mindspeed.mindspeed.doctor import examine_machine, releases
from coca_mindspeed.mindspeed.native import compose_cluster_run
from coca_mindspeed.upstream.machine import Machine, show_findings
from coca_mindspeed.verl.doctor import examine_verl_machine, stack_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_name", nargs="?", metavar="RUN", help="also examine this run's weights and data")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as in coca-mindspeed check")
    parser.add_argument("--release", choices=releases(), help="release of MindSpeed-RL (default: of MINDSPEED_RL_HOME)")
    stack = f"software of verl to compare with: {', '.join(stack_names())}; auto: the nearest (default of runs on verl)"
    parser.add_argument("--verl", choices=("auto", *stack_names()), metavar="STACK", help=stack)
    parser.add_argument("--output", type=place, metavar="DIR", help="output directory of the run (default: runs/RUN)")
    parser.add_argument("--only-problems", action="store_true", help="print problems only")
    parser.add_argument("--json", action="store_true", help="print a JSON array of items")


def run(arguments: argparse.Namespace) -> int:
    name = arguments.run_name
    file, output = find_verl_run(name) if name else None, arguments.output or Path("runs") / Path(name or "").stem
    if file is not None or arguments.verl:
        if arguments.release or (name and file is None):
            raise UsageError("--verl is for runs on verl, and --release for those on MindSpeed-RL")
        stack = None if arguments.verl == "auto" else arguments.verl
        findings = examine_verl_machine(Machine(), (file, arguments.overrides) if file else None, stack, output)
    else:
        config = compose_cluster_run(name, arguments.overrides).run if name else None
        findings = examine_machine(Machine(), config, arguments.release, output)
    if not arguments.json:
        return int(not show_findings(findings, only_problems=arguments.only_problems))
    items = [
        {"ok": finding.ok, **finding.problem._asdict()}
        for finding in sorted(findings, key=lambda finding: finding.ok)
        if not (finding.ok and arguments.only_problems)
    ]
    print(json.dumps(items, ensure_ascii=False, indent=1, default=str))
    return int(not all(finding.ok for finding in findings))
