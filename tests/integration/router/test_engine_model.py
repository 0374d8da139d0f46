"""The model that vLLM is given computes what the demo's computes."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_mindspeed.local.tiny_model import write_tiny_model
from tests.integration.router.engine_model import widen_heads


def test_wider_heads_change_nothing(tmp_path):
    write_tiny_model(tmp_path / "tiny", 0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    with torch.no_grad():  # biases of a fresh model are zeros, which would hide a mistake
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path / "biased")
    AutoTokenizer.from_pretrained(tmp_path / "tiny").save_pretrained(tmp_path / "biased")
    widen_heads(tmp_path / "biased", tmp_path / "wide", context=512)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert wide.config.head_dim == 32
    ids = torch.randint(0, model.config.vocab_size, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(wide(ids).logits, model(ids).logits, atol=2e-5, rtol=1e-4)
