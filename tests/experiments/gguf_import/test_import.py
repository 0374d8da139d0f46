"""A model that is written as GGUF and converted back has the same logits and the same tokenizer."""

import json
import os
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.errors import DataError
from coca_mindspeed.local.load import load_policy
from experiments.__main__ import main
from experiments.gguf_import.convert import import_gguf
from experiments.gguf_import.tokenizer import build_tokenizer
from tests.experiments.gguf_import import files_for_tests as files

PIECES = [
    "0.85", "1234 + 5678", "<confidence> 0.5 </confidence>\n\n", "don't WE'LL", "  two  spaces ", "\r\n\t\n", "émigré",
    "e\u0301", "数学题", "Ⅷ½²٣", "🙂🙃", "\u00a0", "<|im_end|>", "<|im_start|>user\n", "<tool_call>", "[PAD411]",
    "x>\n>",
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=6).map("".join)


@pytest.mark.parametrize(
    ("architecture", "pre", "tied", "heads", "groups"),
    [("llama", "smollm", True, 9, 3), ("llama", "llama-bpe", False, 4, 2), ("qwen2", "qwen2", True, 4, 2),
     ("qwen2", "qwen2", False, 4, 4)],
)  # fmt: skip
def test_logits(tmp_path, architecture, pre, tied, heads, groups):
    tokenizer = files.TOKENIZERS[pre]()
    model = files.random_model(architecture, len(tokenizer) + 11, tied=tied, heads=heads, groups=groups)
    file = files.write_gguf(tmp_path / "model.gguf", model, tokenizer, pre)
    result = import_gguf(file, tmp_path / "hf")
    again, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(loading.values())
    assert again.config.tie_word_embeddings == tied
    assert result.parameters == sum(p.numel() for p in model.parameters())
    ids = torch.randint(len(tokenizer), (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, found = model(ids).logits, again(ids).logits
    assert wanted.std() > 0.5
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    policy = load_policy(tmp_path / "hf", ModelConfig(), torch.device("cpu"))
    assert policy.eos_ids == (tokenizer.eos_token_id,)


@pytest.mark.parametrize("pre", files.TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_token_ids(pre, text):
    original, imported = _tokenizers(pre)
    ids = original.encode(text, add_special_tokens=False)
    assert imported.encode(text, add_special_tokens=False) == ids
    assert imported.decode(ids) == original.decode(ids)


_BUILT: dict[str, tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]] = {}


def _tokenizers(pre):
    if pre not in _BUILT:
        original = files.TOKENIZERS[pre]()
        metadata = files.tokenizer_metadata(original, len(original) + 11, pre)
        _BUILT[pre] = original, build_tokenizer(metadata, "file")
    return _BUILT[pre]


def test_pre_tokenizers_differ():
    """Otherwise equal ids would not show that each family has its own pre-tokenizer."""
    text = "don't 1234 !\n\nx"
    cut = {pre: tuple(piece for piece, _ in _cuts(pre, text)) for pre in files.TOKENIZERS}
    assert len(set(cut.values())) == 3
    assert "1234" not in "".join(f"|{piece}|" for piece in cut["smollm"] + cut["qwen2"])
    assert "123" in cut["llama-bpe"]


def _cuts(pre, text):
    return _tokenizers(pre)[1].backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)


def test_special_tokens(tmp_path):
    tokenizer = files.qwen2_like()
    model = files.random_model("qwen2", len(tokenizer) + 5, tied=True)
    import_gguf(files.write_gguf(tmp_path / "m.gguf", model, tokenizer, "qwen2"), tmp_path / "hf")
    again = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert again.is_fast
    assert len(again) == len(tokenizer)
    special = {token.content for token in again.added_tokens_decoder.values() if token.special}
    assert special == set(files.CONTROL)
    assert "<tool_call>" in again.get_added_vocab()
    assert again.decode(again.encode("a<|im_end|>b"), skip_special_tokens=True) == "ab"
    assert again.pad_token == "<|endoftext|>"


@pytest.mark.parametrize("named", ["<|endoftext|>", None])
def test_eos_is_the_end_of_turn_of_the_chat_template(tmp_path, named):
    """Files often name the token that ends a document, which chat models do not sample."""
    tokenizer = files.smollm_like()
    index = None if named is None else tokenizer.convert_tokens_to_ids(named)
    file = files.smollm_file(tmp_path / "m.gguf", tokenizer__ggml__eos_token_id=index)
    assert import_gguf(file, tmp_path / "hf").end_of_turn == "<|im_end|>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hf" / name).read_text())["eos_token_id"] == end


def test_a_file_without_a_chat_template(tmp_path, capsys):
    file = files.smollm_file(tmp_path / "m.gguf", tokenizer__chat_template=None)
    assert main(["gguf_import", str(file), str(tmp_path / "hf")]) == 0
    assert "chat template" in capsys.readouterr().out


def test_bos(tmp_path):
    tokenizer = files.llama3_like()
    metadata = files.tokenizer_metadata(tokenizer, len(tokenizer), "llama-bpe")
    bos = tokenizer.bos_token_id
    silent = {key: value for key, value in metadata.items() if key != "tokenizer.ggml.add_bos_token"}
    plain = tokenizer.encode("x", add_special_tokens=False)
    assert build_tokenizer(metadata, tmp_path).encode("x") == plain
    assert build_tokenizer(silent, tmp_path).encode("x") == [bos, *plain]


@pytest.fixture
def good(tmp_path):
    return files.smollm_file(tmp_path / "good.gguf")


def test_an_existing_output(tmp_path, good, capsys):
    output = tmp_path / "hf"
    output.mkdir()
    (output / "thesis.txt").write_text("mine")
    assert main(["gguf_import", str(good), str(output)]) == 1
    assert str(output) in capsys.readouterr().err
    assert main(["gguf_import", str(good), str(output), "--overwrite"]) == 1
    assert [path.name for path in output.iterdir()] == ["thesis.txt"]
    shutil.rmtree(output)
    assert main(["gguf_import", str(good), str(output)]) == 0
    (output / "stale").touch()
    assert main(["gguf_import", str(good), str(output), "--overwrite"]) == 0
    assert not (output / "stale").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.gguf", "hf"]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, good, monkeypatch):
    from experiments.gguf_import import convert

    load = convert._load

    def replaced(file):
        model = load(file)
        os.utime(file, ns=(1, 1))
        return model

    monkeypatch.setattr(convert, "_load", replaced)
    with pytest.raises(DataError, match="changed while it was read"):
        import_gguf(good, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["good.gguf"]
