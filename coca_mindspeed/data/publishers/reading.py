"""Records of a file in whatever form it has: prepared ones, or a publisher's."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from coca_mindspeed.data.known_sets import DataSource, source_named
from coca_mindspeed.data.publishers.fields import RowError, Ungradable
from coca_mindspeed.data.publishers.formats import data_files, read_rows
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import DataError


def read_published(source: DataSource, inputs: Sequence[Path]) -> Iterator[Record]:
    """Stream the records of a publisher's files; rows that nothing can grade are left out.

    Raises:
        DataError: with file and row, for a row that is not in the publisher's form.
    """
    number = -1
    for path in data_files(inputs):
        for row in read_rows(path, source.columns, source.header(path)):
            number += 1
            try:
                if row.error:
                    raise RowError(row.error)
                record = source.convert(row.values, number)
            except RowError as error:
                raise DataError(f"{row.where}: {error}") from error
            except Ungradable:
                continue
            if source.outside is None or source.outside(record) is None:
                yield record


def read_evaluation_sets(named: Sequence[str]) -> Iterator[Record]:
    """Stream the records of evaluation sets, each given as ``DATASET=PATH`` or as the path of prepared records.

    Raises:
        DataError: a data set is unknown, or a file cannot be read.
    """
    sets = [_evaluation_set(name) for name in named]
    for source, path in sets:
        yield from read_records(path) if source is None else read_published(source, [path])


def _evaluation_set(name: str) -> tuple[DataSource | None, Path]:
    """``(publisher's form, or None for prepared records; path)``, both of which are there."""
    if "=" not in name or Path(name).exists():
        path = Path(name)
        if not path.is_file():
            raise DataError(f"{path}: no such file; expected prepared records, or DATASET=PATH")
        return None, path
    dataset, _, path_text = name.partition("=")
    source = source_named(dataset)
    data_files([Path(path_text)])
    return source, Path(path_text)
