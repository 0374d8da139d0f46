"""The tiny model and its questions as verl wants them: ``python -m tests.support.verl_smoke DIR RUN``.

For ``launch/verl.sh --smoke`` and for the tests; of the engines neither may know the other, so it stands here.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from coca_mindspeed.utils.packages import name_missing_packages

if __name__ == "__main__":
    name_missing_packages()

from tokenizers import AddedToken
from transformers import AutoConfig

from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.data.export import export_records
from coca_mindspeed.data.records import write_records
from coca_mindspeed.errors import CocaError
from coca_mindspeed.local.tiny_model import tiny_tokenizer, write_tiny_model
from coca_mindspeed.verl.plan import verl_configuration
from coca_mindspeed.verl.settings import verl_settings

# verl's prompt builder for Qwen2 wants these as one token each; transformers adds the last by itself.
_WANTED = ("\n", "<|im_end|>", "<|endoftext|>")


def write_tiny_model_for_verl(directory: Path, seed: int, symbols: str = "") -> None:
    """Write an untrained tiny model that also knows ``symbols``.

    verl does not keep a model from sampling its padding, so EOS also pads.
    """
    directory.mkdir(parents=True)
    write_tiny_model(directory, seed, symbols + "".join(chr(0x2460 + i) for i in range(len(_WANTED))))  # as many rows
    tokenizer = tiny_tokenizer(symbols)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in _WANTED])
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(directory)
    # As verl sets it when it loads the model: lookups of the padding token train no row, and <pad> may be sampled.
    config = AutoConfig.from_pretrained(directory)
    config.pad_token_id = tokenizer.pad_token_id
    config.save_pretrained(directory)


def write_questions_for_verl(directory: Path, method: MethodSettings, *, train: int, evaluate: int, seed: int) -> None:
    """Write ``train.jsonl`` and ``val.jsonl``, and the records that they were made from."""
    records = arithmetic_records(train, "train", seed), arithmetic_records(evaluate, "evaluate", seed)
    for name, chosen in zip(("train", "val"), records, strict=True):
        write_records(directory / f"{name}_records.jsonl", chosen)
        export_records(
            "verl",
            directory / f"{name}_records.jsonl",
            directory / f"{name}.jsonl",
            method.system_prompt,
            overwrite=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the tiny model and questions for a smoke run on verl.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="a directory that is made, or has no model/ yet")
    parser.add_argument("run", type=Path, metavar="RUN", help="the configuration, whose method has the prompt")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as of the run")
    arguments = parser.parse_args(argv)
    try:
        method = verl_settings(verl_configuration(arguments.run, arguments.overrides)).method
        write_tiny_model_for_verl(arguments.directory / "model", seed=0)
        write_questions_for_verl(arguments.directory, method, train=200, evaluate=16, seed=0)
    except (CocaError, OSError) as error:
        print(f"verl_smoke: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
