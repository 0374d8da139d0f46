"""Rows carry the index of their record, so every process that looks one up has to read the file that was meant."""

import pytest

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.data.records import Record, write_records
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.mindspeed.plan import make_plan
from coca_mindspeed.mindspeed.start.process import CocaSettings
from coca_mindspeed.mindspeed.start.records import load_prompts, read_run_records, record_files, with_digests
from coca_mindspeed.mindspeed.start.run_file import RUN_FILE, StageFiles, mindspeed_values, write_run_file
from coca_mindspeed.utils.files import file_sha256
from tests.mindspeed.builders import checkpoint


def write_sums(path, *answers):
    write_records(path, [Record(answer, "sums", "math", f"What is {answer}?", answer) for answer in answers])
    return path


def test_a_node_with_another_file_is_refused_before_it_judges_by_its_answers(tmp_path):
    path = write_sums(tmp_path / "train.jsonl", "1", "2")
    planned = {str(path): file_sha256(path)}
    assert [found.answer for found in read_run_records(path, planned)] == ["1", "2"]
    write_sums(path, "2", "1")  # as many records, in another order
    with pytest.raises(DataError, match=r"train\.jsonl: .*SHA-256"):
        load_prompts(path, None, CocaSettings(data_sha256=planned), 100)
    # A file that was not planned by its content is taken as it is.
    assert [found.answer for found in read_run_records(path, {})] == ["2", "1"]


def test_the_settings_carry_the_digests_of_the_files(tmp_path):
    train = write_sums(tmp_path / "train.jsonl", "1", "2")
    files = record_files(str(train), None)
    planned = with_digests(CocaSettings(), files)
    assert planned.data_sha256 == {str(train): file_sha256(train)}
    write_sums(train, "4")
    with pytest.raises(ConfigError, match=r"coca\.data_sha256: .*train\.jsonl"):
        with_digests(planned, files)
    train.unlink()  # this may be a machine that only starts the run
    assert with_digests(planned, files) == planned


def test_a_run_is_not_resumed_on_other_questions_of_the_same_name(tmp_path):
    train = write_sums(tmp_path / "train.jsonl", *map(str, range(300)))
    held_out = write_sums(tmp_path / "held_out.jsonl", "3")
    overrides = (f"data.train={train}", f"data.evaluate={held_out}", "data.rows=90000")
    run = compose_run("qwen25_7b_910b", overrides).run
    files = StageFiles(tmp_path / "run")

    def values(**options):
        return mindspeed_values(run, make_plan(run).iterations, files, **options)

    begun = values()
    assert begun["coca"]["data_sha256"] == {str(path): file_sha256(path) for path in (train, held_out)}
    files.results.mkdir(parents=True)
    written = files.results / RUN_FILE
    write_run_file(written, begun, "a run")
    checkpoint(files.checkpoints, 4, iteration="50")
    write_sums(held_out, "4")  # other held-out questions are another validation and the same run
    assert values(resume=True)["coca"]["data_sha256"][str(held_out)] == file_sha256(held_out)
    write_sums(train, *map(str, range(1, 301)))
    with pytest.raises(ConfigError, match=r"train\.jsonl"):
        values(resume=True)
    train.unlink()  # a machine without the file
    assert values(resume=True)["coca"]["data_sha256"] == {str(held_out): file_sha256(held_out)}
