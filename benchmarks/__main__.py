"""``python -m benchmarks --output DIR``: every benchmark of this folder, a table and a JSON file."""

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import algorithm_at_paper_size, sampler_against_generate, update_with_shared_prompts
from benchmarks.machine import machine, packages
from coca_mindspeed.utils.json_files import write_json

BENCHMARKS = {
    "algorithm at the paper's size": algorithm_at_paper_size.run,
    "sampler against generate": sampler_against_generate.run,
    "update with shared prompts": update_with_shared_prompts.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="default: runs/bench")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds of each candidate (default: 10)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {name: run(arguments.rounds) for name, run in BENCHMARKS.items()}
    table = Table(title=f"median of {arguments.rounds} rounds, {arguments.threads} CPU thread(s)")
    for column in ("benchmark", "what", "value"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for name, values in results.items():
        for what, value in values.items():
            table.add_row(name, what, f"{value:,.4g}")
    Console().print(table)
    found = {"machine": machine(), "packages": packages("torch", "transformers", "verl"), "results": results}
    write_json(arguments.output / "bench.json", found)
    Console().print(f"{arguments.output / 'bench.json'}")


if __name__ == "__main__":
    main()
