"""Read the nodes of a cluster run from the environment."""

import socket

import pytest

from coca_mindspeed.errors import UsageError
from coca_mindspeed.upstream.nodes import Nodes, means_this_machine, read_nodes
from tests.tables import read_table


def variables(text: str) -> dict[str, str]:
    return dict(variable.split("=", 1) for variable in text.split())


def test_a_single_node_needs_no_variable():
    assert read_nodes({}) == Nodes(1, 0, "127.0.0.1", 6766, 600)


@pytest.mark.parametrize(("environment", "count", "rank", "address"), read_table(__file__, "nodes.tsv"))
def test_nodes(environment, count, rank, address):
    nodes = read_nodes(variables(environment))
    assert (nodes.total, nodes.rank, nodes.address) == (int(count), int(rank), address)


@pytest.mark.parametrize(("environment", "key"), read_table(__file__, "refused_nodes.tsv"))
def test_refused_variables(environment, key):
    with pytest.raises(UsageError) as refused:
        read_nodes(variables(environment))
    assert [problem.key for problem in refused.value.problems] == [key]


@pytest.mark.parametrize("name", ["NNODES", "SLURM_NNODES"])
def test_a_number_with_more_digits_than_int_reads_is_refused(name):
    with pytest.raises(UsageError) as refused:
        read_nodes({name: "9" * 5000})
    assert [problem.key for problem in refused.value.problems] == [name]


def test_a_host_whose_name_is_its_loopback_address_is_not_reached_by_others():
    def hosts(*addresses):
        return lambda *_: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    assert means_this_machine("node1", hosts("127.0.1.1"))
    assert not means_this_machine("node1", hosts("127.0.1.1", "10.0.0.1"))
    assert not means_this_machine("node1", hosts("fe80::1%eth0"))
