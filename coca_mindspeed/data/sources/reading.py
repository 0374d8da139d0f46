"""Reading sources: rows from the Hugging Face hub, records from published files, evaluation sets."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.data.registry import DataSource, HubDataset, source_named
from coca_mindspeed.data.sources.fields import RowError, Ungradable
from coca_mindspeed.data.sources.formats import Row, data_files, read_rows
from coca_mindspeed.errors import DataError, MissingDependencyError


def hub_rows(dataset: HubDataset, columns: Collection[str] | None = None) -> Iterator[Row]:
    """Stream a data set's rows from the hub; the row's ``file`` is its name there.

    Raises:
        MissingDependencyError: ``datasets`` is not installed.
        DataError: the hub or the data set cannot be reached, or the stream breaks.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            "--hub needs the package 'datasets': pip install '.[datasets]', or pass downloaded files with --input"
        ) from error
    name = "/".join(filter(None, (dataset.repository, dataset.configuration, dataset.split)))
    number = 0
    try:
        stream = datasets.load_dataset(dataset.repository, dataset.configuration, split=dataset.split, streaming=True)
        if columns is not None and stream.column_names is not None:
            stream = stream.select_columns([column for column in stream.column_names if column in columns])
        for number, values in enumerate(stream, start=1):
            yield Row(name, number, values)
    # datasets, huggingface_hub, requests and fsspec each raise their own kinds when there is no network.
    except Exception as error:
        raise DataError(
            f"{name}: cannot be read from the hub beyond row {number}: {type(error).__name__}: {str(error)[:300]}; "
            "without network access, pass downloaded files with --input"
        ) from error


def read_published(source: DataSource, inputs: Sequence[Path]) -> Iterator[Record]:
    """Stream the records of published files; ungradable rows are left out.

    Raises DataError with file and row, for a row that is not in the source's form.
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
    """Stream the records of evaluation sets, each given as ``DATASET=PATH`` or as a file of prepared records.

    Raises DataError if a data set is unknown, or a file cannot be read.
    """
    sets = [_evaluation_set(name) for name in named]
    for source, path in sets:
        yield from read_records(path) if source is None else read_published(source, [path])


def _evaluation_set(name: str) -> tuple[DataSource | None, Path]:
    """Return the source (None for prepared records) and the path."""
    if "=" not in name or Path(name).exists():
        path = Path(name)
        if not path.is_file():
            raise DataError(f"{path}: no such file; expected prepared records, or DATASET=PATH")
        return None, path
    dataset, _, path_text = name.partition("=")
    source = source_named(dataset)
    data_files([Path(path_text)])
    return source, Path(path_text)
