"""Data sets from the hub through `datasets`, with errors without the package or a network."""

import sys
from types import SimpleNamespace

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.data.records import read_records
from coca_mindspeed.data.registry import SOURCES
from coca_mindspeed.data.sources.formats import HubDataset, hub_rows
from coca_mindspeed.errors import DataError, MissingDependencyError
from tests.data import source_rows


class Stream(list):
    """What ``load_dataset(..., streaming=True)`` returns, as far as it is used."""

    @property
    def column_names(self):
        return list(self[0])

    def select_columns(self, columns):
        return Stream({column: row[column] for column in columns} for row in self)


@pytest.fixture
def hub(monkeypatch):
    """Replace the package; record the calls."""
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return Stream([source_rows.TRIVIAQA_HUB])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_rows_are_streamed_from_the_publishers_place(hub):
    source = SOURCES["triviaqa"]
    (row,) = hub_rows(source.hub, source.columns)
    assert hub == [(("mandarjoshi/trivia_qa", "unfiltered.nocontext"), {"split": "validation", "streaming": True})]
    assert set(row.values) == {"question", "question_id", "question_source", "answer"}
    assert row.where == "mandarjoshi/trivia_qa/unfiltered.nocontext/validation:1"


def test_prepare_by_name(hub, tmp_path, capsys):
    assert main(["data", "prepare", "triviaqa", "--hub", "--output", str(tmp_path / "out")]) == 0
    assert next(read_records(tmp_path / "out" / "test.jsonl")).answer == "Mars"
    assert main(["data", "prepare", "triviaqa", "--hub", "my/copy:conf:dev", "--output", str(tmp_path / "2")]) == 0
    assert hub[-1] == (("my/copy", "conf"), {"split": "dev", "streaming": True})
    assert main(["data", "prepare", "records", "--hub", "--output", str(tmp_path / "3")]) == 2
    assert "--hub" in capsys.readouterr().err


def test_without_a_network_or_the_package_the_error_names_the_data_set_and_the_option(monkeypatch):
    def load_dataset(*arguments, **options):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match=r"openai/gsm8k/main/test: .*ConnectionError: .*--input"):
        next(hub_rows(SOURCES["gsm8k"].hub))
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import raises ImportError
    with pytest.raises(MissingDependencyError, match="datasets"):
        next(hub_rows(SOURCES["gsm8k"].hub))


def test_the_real_package_offline(monkeypatch, tmp_path):
    pytest.importorskip("datasets", reason="the optional package 'datasets' is not installed")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="no/such-set-of-data/train: "):
        next(hub_rows(HubDataset("no/such-set-of-data", None, "train")))
