"""What MindSpeed-LLM's converter is called with, for a run: TP, PP, paths and shapes from its YAML.

``prepare`` checks everything that can be checked beforehand and prints the converter's arguments, one on a line;
``finish`` checks what it left.  ``launch/convert_weights.sh`` calls the converter in between.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from coca_mindspeed.algorithm.rewards import training_method
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.facts import Facts, read_facts
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import CocaError, ConfigError
from coca_mindspeed.mindspeed.driver import homes
from coca_mindspeed.mindspeed.megatron_checkpoint import checkpoint_layout, newest_iteration
from coca_mindspeed.mindspeed.run_file import StageFiles

# MindSpeed-LLM's name for decoders with RMSNorm, rotary embeddings and a gated MLP; its own examples use it for both
# Llama 3 and Qwen2.5, whose biases --add-qkv-bias adds.
_FAMILY = "llama2"
_NEW_WEIGHTS = "mg2hg"  # the folder that the converter makes in --save-dir


def converter_arguments(direction: str, run: RunConfig, facts: Facts, output: Path) -> list[str]:
    """Arguments of ``python`` for ``hf2mcore`` or ``mcore2hf``; all paths are absolute."""
    huggingface = Path(str(run.model.path)).absolute()
    common = ["convert_ckpt.py", "--use-mcore-models", "--model-type", "GPT", "--model-type-hf", _FAMILY]
    common += ["--params-dtype", "bf16", *(["--add-qkv-bias"] if facts.qkv_bias else [])]
    if direction == "hf2mcore":
        return [
            *common,
            *("--load-model-type", "hf", "--save-model-type", "mg"),
            *("--target-tensor-parallel-size", str(facts.tp), "--target-pipeline-parallel-size", str(facts.pp)),
            *("--load-dir", str(huggingface), "--save-dir", str(Path(str(run.model.megatron_path)).absolute())),
            *("--tokenizer-model", str(huggingface / "tokenizer.json")),
        ]
    return [
        *common,
        *("--load-model-type", "mg", "--save-model-type", "hf"),
        *("--target-tensor-parallel-size", "1", "--target-pipeline-parallel-size", "1"),
        *("--load-dir", str(newest_stage(run, output).absolute()), "--save-dir", str(_frame(output))),
    ]


def newest_stage(run: RunConfig, output: Path) -> Path:
    """Checkpoints of the last stage that has any; of the first where none has."""
    stages = [StageFiles(output, i).checkpoints for i in range(len(training_method(run.method.name).stages))]
    return next((path for path in reversed(stages) if newest_iteration(path) is not None), stages[0])


def prepare(direction: str, run: RunConfig, facts: Facts, output: Path) -> None:
    """Refuse what would go wrong, and make the folder that ``mcore2hf`` writes into.

    Raises:
        CocaError: checkouts, weights or the model are missing, or the target is there already.
    """
    homes(os.environ)
    source = Path(str(run.model.path))
    for name in ("config.json", "tokenizer.json"):
        if not (source / name).is_file():
            raise ConfigError(f"model.path={source}: has no {name}; expected a Hugging Face directory")
    if direction == "hf2mcore":
        target = Path(str(run.model.megatron_path))
        if target.exists():
            raise ConfigError(f"model.megatron_path={target}: is there already; remove it to convert anew")
        return
    checkpoint_layout(newest_stage(run, output))
    if (output / "hf").exists():
        raise ConfigError(f"{output / 'hf'}: is there already; remove it to convert anew")
    # The converter reads the model's own directory and writes into it: give it links, and leave the original alone.
    frame = _frame(output)
    if frame.exists():
        shutil.rmtree(frame)  # of a conversion that failed; it holds links and half of new weights
    frame.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file():
            (frame / path.name).symlink_to(path.resolve())


def finish(direction: str, run: RunConfig, facts: Facts, output: Path) -> str:
    """Check what the converter left and put it in its place; a sentence that says where.

    Raises:
        ConfigError: it left no weights, or others than asked for.
    """
    if direction == "hf2mcore":
        target = Path(str(run.model.megatron_path))
        layout = checkpoint_layout(target)
        if (layout.tp, layout.pp) != (facts.tp, facts.pp):
            raise ConfigError(f"{target}: expected TP {facts.tp}, PP {facts.pp}, found TP {layout.tp}, PP {layout.pp}")
        return f"{target}: Megatron weights for TP {layout.tp}, PP {layout.pp}"
    frame = _frame(output)
    new = frame / _NEW_WEIGHTS
    if not any(new.glob("*.safetensors")) and not any(new.glob("*.bin")):
        raise ConfigError(f"{new}: the converter left no weights there")
    for path in frame.iterdir():  # tokenizer and generation settings; the converter writes weights and config.json
        if path.is_symlink() and path.suffix in (".json", ".txt", ".model", ".jinja") and "index" not in path.name:
            target = new / path.name
            if not target.exists():
                shutil.copyfile(path, target)
    new.rename(output / "hf")
    shutil.rmtree(frame)
    return f"{output / 'hf'}: a Hugging Face directory"


def _frame(output: Path) -> Path:
    return (output / "hf.converting").absolute()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m coca_mindspeed.mindspeed.conversion", description=__doc__)
    parser.add_argument("phase", choices=("prepare", "finish"))
    parser.add_argument("direction", choices=("hf2mcore", "mcore2hf"))
    parser.add_argument("run_name", metavar="RUN")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true", help="print the arguments and check nothing")
    parsed = parser.parse_args(arguments)
    try:
        run = compose_run(parsed.run_name, parsed.overrides).run
        facts = read_facts(run)
        if parsed.phase == "prepare":
            if not parsed.dry_run:
                prepare(parsed.direction, run, facts, parsed.output)
            print("\n".join(converter_arguments(parsed.direction, run, facts, parsed.output)))
        else:
            print(finish(parsed.direction, run, facts, parsed.output))
    except CocaError as error:
        print(f"coca-mindspeed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
