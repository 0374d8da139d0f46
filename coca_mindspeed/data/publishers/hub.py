"""Rows of a data set by its name on the Hugging Face hub, through the optional ``datasets`` package."""

from collections.abc import Collection, Iterator

from coca_mindspeed.data.known_sets import Publication
from coca_mindspeed.data.publishers.formats import Row
from coca_mindspeed.errors import DataError, MissingDependencyError


def hub_rows(publication: Publication, columns: Collection[str] | None = None) -> Iterator[Row]:
    """Stream a data set's rows; the row's ``file`` is its name on the hub.

    Raises:
        MissingDependencyError: ``datasets`` is not installed.
        DataError: the hub or the data set cannot be reached, or the stream breaks.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            "--hub needs the package 'datasets': pip install 'coca-mindspeed[datasets]', or download the files "
            "and pass them with --input"
        ) from error
    name = "/".join(filter(None, (publication.repository, publication.configuration, publication.split)))
    number = 0
    try:
        stream = datasets.load_dataset(
            publication.repository, publication.configuration, split=publication.split, streaming=True
        )
        if columns is not None and stream.column_names is not None:
            stream = stream.select_columns([column for column in stream.column_names if column in columns])
        for number, values in enumerate(stream, start=1):
            yield Row(name, number, values)
    # datasets, huggingface_hub, requests and fsspec each raise their own kinds when there is no network.
    except Exception as error:
        raise DataError(
            f"{name}: cannot be read from the hub beyond row {number}: {type(error).__name__}: {str(error)[:300]}. "
            "Where there is no network, download the files elsewhere and pass them with --input"
        ) from error
