"""Commands that are printed are read again as they were meant, whatever stands in a path."""

from __future__ import annotations

import shlex
import subprocess

import pytest
import quick_config
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from trainer.config import shell
from trainer.config.schema import RunConfig
from trainer.faults.problems import ConfigError

PLAIN = ["runs/a", "runs/a.b-c_d", "/data/x/", "a:b", "a%b", "-a"]
QUOTED = [
    *(" a", "a ", "runs/a b", "runs/'q'", 'runs/"q"', "'", '"', "''", '"a"', "a'", "'a", "a,b", "a,b=c", "a,", ","),
    *("[a]", "[a", "a]", "[]", "{a}", "{a:1}", "{}", "}", "(a)", "f(1)", "choice(1,2)", "a#b", "a$b", "$", "`ls`"),
    *("$(ls)", "a;b", "a&b", "a|b", "a>b", "a*b", "!a", "a\\b", "a\\", "a\\\\", "a\\'b", "a\\\\'b", "\\", "a\u00a0b"),
    *(
        "é/ü",
        "日本語",
        "😀",
        "👩\u200d🚀",
        "null",
        "true",
        "1",
        "1e3",
        ".5",
        "1_0",
        "007",
        "inf",
        "nan",
        "=",
        "a=b",
        "a==b",
    ),
    *("${x}", "a\\${x}", "a\\\\${x}", "${oc.env:HOME}", "a${", "$HOME", "~", "x/~", "^a", "@a", "a?b"),
]
CONTROL = {  # by its escape
    **{"a\tb": "\\t", "a\nb": "\\n", "a\x1b[31mb": "\\x1b", "\x07": "\\x07", "a\rb": "\\x0d", "a\x7fb": "\\x7f"},
    **{"a\x9bb": "\\u009b", "a\u202eb": "\\u202e", "a\u2028b": "\\u2028", "it's\t": "\\t", "a\\\x1b": "\\x1b"},
}


@pytest.mark.parametrize("path", [*PLAIN, *QUOTED])
def test_an_override_is_read_again_by_a_shell_and_by_hydra(path: str):
    (word,) = shlex.split(shell.typed("run", path))
    value = OverridesParser.create().parse_override(word).value()
    assert OmegaConf.create({"run": value}).run == path


def test_a_plain_value_is_not_quoted():
    assert [shell.typed("run", path) for path in PLAIN] == [f"run={path}" for path in PLAIN]


@pytest.mark.parametrize("path", ["a ' b", "{a},[b]", "1e3", "${x}\\"])
def test_a_config_has_the_value_that_was_typed(path: str):
    assert quick_config.load([shell.override("run", path)]).run == path


def test_control_characters_are_escapes_that_a_shell_reads():
    words = [*CONTROL, *QUOTED]
    line = shell.joined(words)
    assert shell.CONTROL.search(line) is None
    read = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], stdout=subprocess.PIPE, check=True).stdout
    assert read.decode().split("\0")[:-1] == words


@pytest.mark.parametrize("text", CONTROL)
def test_what_is_printed_has_no_control_character_but_the_ends_of_lines(text: str):
    shown = shell.printable(f"{text}\n\tmore")
    assert shown.endswith("\n\tmore")
    assert shell.CONTROL.sub("", shown.replace("\n", "").replace("\t", "")) == shown.replace("\n", "").replace("\t", "")


def test_a_byte_that_is_no_utf_8_is_an_escape():
    assert shell.printable("a\udcffb") == "a\\xffb"


@pytest.mark.parametrize(
    ("key", "text"),
    [*(("run", text) for text in CONTROL), ("user", "a\x1b.py"), ("resume", "\n"), ("report.file", "\t")],
)
def test_a_setting_with_a_control_character_is_refused(key: str, text: str):
    with pytest.raises(ConfigError) as refused:
        quick_config.load([shell.override(key, text)])
    assert key in {problem.key for problem in refused.value.problems}


def test_options_may_have_control_characters():
    config: RunConfig = quick_config.load(["data=csv", shell.override("data.options.path", "a\tb")])
    assert config.data.options["path"] == "a\tb"
