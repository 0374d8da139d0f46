"""Hostile, truncated and unsupported files are refused in little time and memory and leave no output."""

import json
import resource
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.errors import DataError
from experiments.gguf_import.convert import import_gguf
from experiments.gguf_import.header import read_header
from experiments.gguf_import.tokenizer import build_tokenizer
from tests.experiments.gguf_import import files_for_tests as files
from tests.processor import allowed
from tests.tables import read_table

HUGE = 2**60
STRING, ARRAY, UINT8 = 8, 9, 0


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return files.smollm_file(tmp_path_factory.mktemp("good") / "good.gguf")


def entry(key, kind, value):
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def header(tensors, entries, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + rest


TENSOR = struct.pack("<Q", 1) + b"w"
HOSTILE = {
    "entries": (header(0, HUGE), "number of metadata entries"),
    "tensors": (header(HUGE, 0), "number of tensors"),
    "a key's length": (header(0, 1, struct.pack("<Q", HUGE) + b"x" * 20), "takes 1152921504606846976 bytes"),
    "a string's length": (header(0, 1, entry("k", STRING, struct.pack("<Q", HUGE))), "takes 1152921504606846976"),
    "strings": (header(0, 1, entry("k", ARRAY, struct.pack("<IQ", STRING, HUGE))), "length of metadata 'k'"),
    "bytes": (header(0, 1, entry("k", ARRAY, struct.pack("<IQ", UINT8, HUGE))), "length of metadata 'k'"),
    "an array of arrays": (header(0, 1, entry("k", ARRAY, struct.pack("<IQ", ARRAY, HUGE))), "array of type 9"),
    "an unknown type": (header(0, 1, entry("k", 99, b"12345678")), "type 99"),
    "a key that is not UTF-8": (header(0, 1, struct.pack("<Q", 2) + b"\xff\xfe" + bytes(20)), "not UTF-8"),
    "a key twice": (header(0, 2, entry("k", UINT8, b"1") * 2), "defined twice"),
    "dimensions": (header(1, 0, TENSOR + struct.pack("<I", 2**31) + bytes(40)), "2147483648 dimensions"),
    "a tensor's shape": (header(1, 0, TENSOR + struct.pack("<IQIQ", 1, HUGE, 0, 0)), "truncated"),
    "an overflowing shape": (header(1, 0, TENSOR + struct.pack("<IQQIQ", 2, 2**32, 2**32, 0, 0)), "truncated"),
    "an empty shape": (header(1, 0, TENSOR + struct.pack("<IQIQ", 1, 0, 0, 0)), "has shape"),
    "a quantisation": (header(1, 0, TENSOR + struct.pack("<IQIQ", 1, 4, 4000, 0)), "type 4000"),
    "an offset": (header(1, 0, TENSOR + struct.pack("<IQIQ", 1, 4, 0, HUGE)), "truncated"),
    "an alignment": (header(0, 1, entry("general.alignment", 4, struct.pack("<I", 0))), "power of two"),
    "another magic": (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
    "an empty file": (b"", "not a GGUF file"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "the first version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(tmp_path, name):
    content, message = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        import_gguf(path, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["hostile.gguf"]


@pytest.mark.timing
def test_a_hostile_file_takes_no_memory(tmp_path):
    for i, (content, _) in enumerate(HOSTILE.values()):
        (tmp_path / f"{i}.gguf").write_bytes(content)
    code = (
        "import sys, pathlib, resource\n"
        "from coca_mindspeed.errors import DataError\n"
        "from experiments.gguf_import.header import read_header\n"
        "before = resource.getrusage(resource.RUSAGE_SELF)\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):\n"
        "    try: read_header(path)\n"
        "    except DataError: pass\n"
        "    else: assert 0, path\n"
        "after = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(after.ru_maxrss - before.ru_maxrss, after.ru_utime - before.ru_utime)\n"
    )

    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (120, 120))

    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True, preexec_fn=limit
    )
    kib, seconds = map(float, done.stdout.split())
    assert kib < 8 * 1024
    assert seconds < allowed(2)


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_anywhere_is_refused(good, tmp_path_factory, share):
    content = good.read_bytes()
    path = tmp_path_factory.mktemp("cut") / "cut.gguf"
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=r"truncated|not a GGUF file"):
        read_header(path)


@pytest.mark.parametrize(("changed", "message"), read_table(__file__, "unsupported_files.tsv"))
def test_unsupported_files_are_refused(tmp_path, changed, message):
    path = files.smollm_file(tmp_path / "m.gguf", **json.loads(changed))
    with pytest.raises(DataError, match=message):
        import_gguf(path, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_an_unknown_tensor_is_refused(tmp_path, monkeypatch):
    """Transformers ignores them; Llama 3.1 has its scaled frequencies in one."""
    plain = files.tensors
    for name, message in (("rope_freqs.weight", "scaled rotary"), ("blk.0.attn_q.bias", "more than its architecture")):
        monkeypatch.setattr(files, "tensors", lambda m, name=name: plain(m) | {name: plain(m)["output_norm.weight"]})
        path = files.smollm_file(tmp_path / "m.gguf")
        with pytest.raises(DataError, match=message):
            import_gguf(path, tmp_path / "hf")


def test_a_token_twice_is_refused(tmp_path):
    tokenizer = files.smollm_like()
    metadata = files.tokenizer_metadata(tokenizer, len(tokenizer), "smollm")
    tokens = [*metadata["tokenizer.ggml.tokens"][:-1], "a"]
    with pytest.raises(DataError, match="has 'a' twice"):
        build_tokenizer({**metadata, "tokenizer.ggml.tokens": tokens}, tmp_path)


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            import_gguf(path, tmp_path / "hf")
