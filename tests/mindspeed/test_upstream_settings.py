"""The comparison of configurations in docs/port.md is true."""

from tests.upstream_settings import NOT_SET, ours, rows


def test_our_side_of_the_comparison_with_upstreams_yaml():
    own = ours()
    for key, (_, value) in rows().items():
        assert own.get(key, NOT_SET) == value, key
