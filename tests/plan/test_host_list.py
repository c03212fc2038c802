"""Slurm's lists of nodes, one by one."""

from __future__ import annotations

import pytest

from trainer.faults.problems import ConfigError
from trainer.plan.slurm import expand

KEY = "SLURM_JOB_NODELIST"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("", []),
        ("node1", ["node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[7]", ["node7"]),
        ("node[1-2,07],gpu1", ["node1", "node2", "node07", "gpu1"]),
        ("rack[08-10]-gpu,login", ["rack08-gpu", "rack09-gpu", "rack10-gpu", "login"]),
        ("rack[0-1]node[1-2]", ["rack0node1", "rack0node2", "rack1node1", "rack1node2"]),
        ("r[1,3][0-1]-ib", ["r10-ib", "r11-ib", "r30-ib", "r31-ib"]),
        ("a[1-2]b[3]c[04-05],d-e.f", ["a1b3c04", "a1b3c05", "a2b3c04", "a2b3c05", "d-e.f"]),
        ("[1-2]x", ["1x", "2x"]),
        ("10.10.1.[9-11]", ["10.10.1.9", "10.10.1.10", "10.10.1.11"]),
        ("c1001a-s[11,17]", ["c1001a-s11", "c1001a-s17"]),
        ("nodeA,nodeB[001,003],nodeC", ["nodeA", "nodeB001", "nodeB003", "nodeC"]),
        ("host[001,003-004,006]", ["host001", "host003", "host004", "host006"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[2,1],n[1]", ["n2", "n1", "n1"]),  # in the order of the list, as the counts of tasks are
    ],
)
def test_a_list_is_expanded(names: str, expected: list[str]):
    assert expand(names, KEY) == expected


@pytest.mark.parametrize(
    "names",
    [
        *("node[1-3", "node1-3]", "node[]", "node[1,]", "node[3-1]", "node[1-]", "node[-3]", "node[a-c]"),
        *("node[1-2-3]", "node[1-[2-3]]", "node[[1-2]]", "a,,b", ",a", "a,", "a b", "a[1-2] ", "n[1-999999999]"),
        *("n[0-300]m[0-300]", "node[\u0661-\u0663]", "node[1-6:2]"),
    ],
)
def test_a_malformed_list_is_refused_by_the_name_of_its_variable(names: str):
    with pytest.raises(ConfigError) as caught:
        expand(names, KEY)
    assert [problem.key for problem in caught.value.problems] == [KEY]
