"""``coca-mindspeed check`` of a run on verl: its plan, and everything that the plugin would refuse."""

import argparse
from pathlib import Path

from rich.table import Table

from coca_mindspeed.errors import ConfigError, UsageError
from coca_mindspeed.utils.console import PlainConsole, print_text
from coca_mindspeed.verl.configuration import RunLayout, run_layout, verl_configuration
from coca_mindspeed.verl.required_keys import refusals
from coca_mindspeed.verl.settings import verl_settings

#: Options of the command that speak of MindSpeed-RL's files.
_OF_THE_PORT = ("write", "output", "resume", "for_script")


def check_verl(file: Path, arguments: argparse.Namespace) -> int:
    """Print the plan, or say why the run cannot start; needs neither verl nor an accelerator."""
    for option in _OF_THE_PORT:
        if getattr(arguments, option):
            raise UsageError(f"--{option.replace('_', '-')} is for runs on MindSpeed-RL; {file.name} is one on verl")
    config = verl_configuration(file, arguments.overrides)
    settings = verl_settings(config)
    if problems := refusals(config, settings):
        raise ConfigError(f"{file.name} cannot run:\n" + "\n".join(f"  {problem}" for problem in problems))
    layout = run_layout(config, settings)
    if not arguments.quiet:
        _print(layout, file.stem)
    if layout.problems:
        raise ConfigError(f"{file.name} cannot run:\n" + "\n".join(f"  {problem}" for problem in layout.problems))
    return 0


def _print(layout: RunLayout, name: str) -> None:
    console = PlainConsole()
    table = Table("", "", title=f"plan of {name} on verl", show_header=False, title_justify="left")
    for label, value in layout.rows:
        table.add_row(label, value)
    console.print_table(table)
    if not layout.training:
        return
    memory = Table("estimated memory of one device", "GiB", "formula", title_justify="left")
    for phase, parts in (("training", layout.training), ("rollout", layout.rollout)):
        for part in parts:
            memory.add_row(f"{phase}: {part.name}", f"{part.gib:.1f}", part.formula)
        together = sum(part.gib for part in parts)
        memory.add_row(f"{phase}, together", f"{together:.1f}", f"of {layout.limit_gib:.1f}", style="bold")
        memory.add_section()
    console.print_table(memory)
    print_text("estimates from shapes, measured nowhere; verl lets training and rollout take turns on a device")
