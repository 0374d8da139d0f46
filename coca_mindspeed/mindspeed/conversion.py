"""MindSpeed-LLM's weight converter for a run: its arguments, and checks before and after it.

``launch/convert_weights.sh`` calls it as ``python -m coca_mindspeed.mindspeed.conversion``.
"""

import argparse
import json
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coca_mindspeed.utils.packages import name_missing_packages, require

if __name__ == "__main__":
    name_missing_packages()

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import CocaError, ConfigError, Problem, raise_problems
from coca_mindspeed.mindspeed.checkpoints import checkpoint_layout, newest_iteration, select_checkpoint
from coca_mindspeed.mindspeed.checks import run_problems
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.native import compose_cluster_run
from coca_mindspeed.mindspeed.start.driver import find_checkouts
from coca_mindspeed.mindspeed.start.process import CPU_SHIM, cpu_shim
from coca_mindspeed.mindspeed.start.run_file import StageFiles
from coca_mindspeed.upstream.launch import (
    absolute_run,
    ending_by_signals,
    go_to_the_source_tree,
    python,
    run_child,
    script,
    show,
)
from coca_mindspeed.utils.console import print_failure

# MindSpeed-LLM's name for decoders with RMSNorm, rotary embeddings and a gated MLP, also in its examples for Qwen2.5.
_FAMILY = ("--model-type-hf", "llama2")
# With RMSNorm of queries and keys, which its default layer does not have.
_QK_LAYERNORM_FAMILY = (
    "--model-type-hf",
    "qwen3",
    "--spec",
    "mindspeed_llm.tasks.models.spec.qwen3_spec",
    "layer_spec",
)
#: The folder that the converter makes in --save-dir (its examples' comments say mg2hg).
NEW_WEIGHTS = "mg2hf"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_MODES = "original_modes.json"


def converter_arguments(direction: str, start: ClusterRun, output: Path, iteration: int | None = None) -> list[str]:
    """Arguments of ``python`` for ``hf2mcore`` or ``mcore2hf``; all paths are absolute.

    ``mcore2hf`` converts the checkpoint of ``iteration``, by default the newest one.
    """
    huggingface = Path(str(start.run.model.path)).absolute()
    common = ["convert_ckpt.py", "--use-mcore-models", "--model-type", "GPT"]
    common += _QK_LAYERNORM_FAMILY if start.resolved.qk_layernorm else _FAMILY
    common += ["--params-dtype", "bf16", *(["--add-qkv-bias"] if start.resolved.qkv_bias else [])]
    if direction == "hf2mcore":
        options: dict[str, object] = {
            "--load-model-type": "hf",
            "--save-model-type": "mg",
            "--target-tensor-parallel-size": start.resolved.tp,
            "--target-pipeline-parallel-size": start.resolved.pp,
            "--load-dir": huggingface,
            "--save-dir": Path(str(start.run.model.megatron_path)).absolute(),
            "--tokenizer-model": huggingface / "tokenizer.json",
        }
    else:
        options = {
            "--load-model-type": "mg",
            "--save-model-type": "hf",
            "--target-tensor-parallel-size": 1,
            "--target-pipeline-parallel-size": 1,
            "--load-dir": _selection(output, iteration),
            "--save-dir": _frame(output, iteration),
        }
    return [*common, *(str(part) for option in options.items() for part in option)]


def newest_stage(output: Path) -> Path:
    """The checkpoint folder of the last stage that has a checkpoint, or of the first stage."""
    numbers = [path.name.removeprefix("stage") for path in output.glob("stage*") if path.is_dir()]
    stages = [StageFiles(output, i).checkpoints for i in sorted(map(int, filter(str.isdecimal, numbers)))]
    found = [path for path in stages if newest_iteration(path) is not None]
    return found[-1] if found else StageFiles(output).checkpoints


def prepare(direction: str, start: ClusterRun, output: Path, iteration: int | None = None) -> None:
    """Check the inputs, and make the folders that ``mcore2hf`` reads from and writes into.

    Raises CocaError if checkouts, torch, weights or the model are missing, the model is another one than the run's, or
    the target or an earlier result exists.
    """
    find_checkouts(os.environ)
    require("torch", purpose="MindSpeed-LLM's weight converter")
    source = Path(str(start.run.model.path))
    for name in ("config.json", "tokenizer.json"):
        if not (source / name).is_file():
            raise ConfigError(f"model.path={source}: has no {name}; expected a Hugging Face directory")
    raise_problems(start.model.problems)
    if direction == "hf2mcore":
        target = Path(str(start.run.model.megatron_path))
        if target.exists():
            raise ConfigError(f"model.megatron_path={target}: already exists; remove it to convert again")
        return
    checkpoint_layout(newest_stage(output), iteration)
    if (target := _target(output, iteration)).exists():
        raise ConfigError(f"{target}: already exists; remove it to convert again")
    frame = _frame(output, iteration)
    if frame.exists():
        restore(output, iteration)
        if _holds_weights(frame / NEW_WEIGHTS):
            raise ConfigError(
                f"{frame / NEW_WEIGHTS}: holds weights of an earlier conversion; if it was complete, run "
                f"`bash launch/convert_weights.sh mcore2hf RUN --finish --output {output}"
                f"{f' --iteration {iteration}' * (iteration is not None)}`, "
                f"otherwise remove {frame}"
            )
        shutil.rmtree(frame)  # of a conversion that failed before it wrote weights
    frame.mkdir(parents=True)
    if iteration is not None:  # the converter reads the newest
        select_checkpoint(newest_stage(output), iteration, _selection(output, iteration))
    # The converter reads the model from the directory that it writes into: copy the small files and link the weights.
    # At the end it sets the mode of every file there, which follows links to the originals: save their modes.
    files = [path for path in source.iterdir() if path.is_file()]
    linked = {path.name: path.resolve() for path in files if path.suffix in _WEIGHTS}
    modes = {str(path): stat.S_IMODE(path.stat().st_mode) for path in linked.values()}
    (frame / _MODES).write_text(json.dumps(modes, indent=1), encoding="utf-8")
    for path in files:
        if path.name in linked:
            (frame / path.name).symlink_to(linked[path.name])
        else:
            shutil.copyfile(path, frame / path.name)


def restore(output: Path, iteration: int | None = None) -> None:
    """Restore the file modes of the original model, if ``prepare`` saved them."""
    try:
        modes: dict[str, int] = json.loads((_frame(output, iteration) / _MODES).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    for name, mode in modes.items():
        path = Path(name)
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)


def finish(direction: str, start: ClusterRun, output: Path, iteration: int | None = None) -> str:
    """Check the converter's result, move it to its place and return a message."""
    if direction == "hf2mcore":
        target = Path(str(start.run.model.megatron_path))
        layout, wanted = checkpoint_layout(target), start.resolved
        if (layout.tp, layout.pp) != (wanted.tp, wanted.pp):
            raise ConfigError(
                f"{target}: expected TP {wanted.tp}, PP {wanted.pp}, found TP {layout.tp}, PP {layout.pp}"
            )
        return f"{target}: Megatron weights for TP {layout.tp}, PP {layout.pp}"
    frame, target = _frame(output, iteration), _target(output, iteration)
    new = frame / NEW_WEIGHTS
    restore(output, iteration)
    if not _holds_weights(new):
        raise ConfigError(f"{new}: the converter left no weights there")
    for path in frame.iterdir():  # tokenizer and generation settings; the converter writes weights and config.json
        skipped = path.name == _MODES or "index" in path.name or (new / path.name).exists()
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and not skipped:
            shutil.copyfile(path, new / path.name)
    new.rename(target)
    shutil.rmtree(frame)
    if iteration is not None:
        shutil.rmtree(_selection(output, iteration))
    return f"{target}: a Hugging Face directory"


def _holds_weights(directory: Path) -> bool:
    return any(any(directory.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))


def _target(output: Path, iteration: int | None) -> Path:
    return (output / ("hf" if iteration is None else f"hf-{iteration}")).absolute()


def _frame(output: Path, iteration: int | None) -> Path:
    return _target(output, iteration).with_suffix(".converting")


def _selection(output: Path, iteration: int | None) -> Path:
    """The directory of checkpoints whose newest is converted."""
    return (
        newest_stage(output).absolute() if iteration is None else _target(output, iteration).with_suffix(".checkpoint")
    )


@ending_by_signals()
def convert(
    direction: str, run: RunConfig, output: Path, iteration: int | None = None, *, dry_run: bool, finish_only: bool
) -> int:
    """Convert the weights of a run, and return the converter's exit code; raises as :func:`prepare` and :func:`finish`.

    The converter changes the modes of the original model's files, to which it is given links; they are restored
    whatever ends it.
    """
    start = ClusterRun(run)
    raise_problems(run_problems(start), "the run is refused:")
    if direction == "hf2mcore" and run.model.megatron_path is None:  # as hardware=host allows
        reason = "must name the directory that the converter writes"
        raise_problems([Problem("no-weights", start.key("model.megatron_path"), None, reason)])
    # On CPUs, the shim's folder runs the converter, which imports packages that need an NPU.
    on_host = run.hardware.platform == "host"
    shim = [str(Path(cpu_shim(os.environ.get(CPU_SHIM)).__file__).parent)] if on_host else []
    what = direction, start, output, iteration
    home = os.environ.get("MINDSPEED_LLM_HOME", "$MINDSPEED_LLM_HOME")
    if not finish_only:
        if not dry_run:
            prepare(*what)
        show("cd", home)
        try:
            command = [python(), *shim, *converter_arguments(*what)]
            if code := run_child(command, dry_run=dry_run, **({} if dry_run else _in_mindspeed_llm())):
                return code
        finally:
            if direction == "mcore2hf":
                restore(output, iteration)
    target = Path(str(start.run.model.megatron_path)) if direction == "hf2mcore" else _target(output, iteration)
    show("finish", str(target))
    if not dry_run:
        print(finish(*what))
    return 0


def _in_mindspeed_llm() -> dict[str, Any]:
    """Where the converter runs, for its own configs/, and its variables; Megatron refuses TP > 1 without the last."""
    checkouts = find_checkouts(os.environ)
    paths = [str(checkouts[f"{name}_HOME"]) for name in ("MINDSPEED_LLM", "MINDSPEED", "MEGATRON")]
    search = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": search, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {"cwd": checkouts["MINDSPEED_LLM_HOME"], "env": {**os.environ, **variables}}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"bash {script() or 'launch/convert_weights.sh'}", description=__doc__)
    parser.add_argument("direction", choices=("hf2mcore", "mcore2hf"))
    parser.add_argument("run_name", metavar="RUN")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, metavar="DIR", help="directory of the run (default: runs/RUN)")
    newest = "of mcore2hf: the checkpoint of iteration N (default: the newest)"
    parser.add_argument("--iteration", type=int, metavar="N", help=newest)
    parser.add_argument("--dry-run", action="store_true", help="check the run alone, and print the commands")
    parser.add_argument("--finish", action="store_true", help="only check and move what the converter left")
    if {"-h", "--help"} & {*arguments}:  # wherever it is typed
        parser.print_help()
        return 0
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.iteration is not None and (parsed.iteration < 1 or parsed.direction == "hf2mcore"):
        parser.error("--iteration: expected the number of a checkpoint's iteration, of mcore2hf")
    try:
        name = absolute_run(parsed.run_name)
        output = None if parsed.output is None else parsed.output.absolute()
        go_to_the_source_tree()
        run = compose_cluster_run(name, parsed.overrides).run
        output = Path("runs") / Path(name).stem if output is None else output
        options = {"dry_run": parsed.dry_run, "finish_only": parsed.finish}
        return convert(parsed.direction, run, output, parsed.iteration, **options)
    except CocaError as error:
        return print_failure(error, error.exit_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
