"""Every bad config is refused before anything starts, with the place, the value and a remedy."""

from __future__ import annotations

import re
import shutil
import time
from functools import cache
from pathlib import Path

import pytest
from quick_config import load

from trainer.config import compose, sources
from trainer.config.schema import Mode
from trainer.faults.problems import ConfigError, Problem

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GLOBAL = "# @package _global_\n"


def faults(*overrides, config_dir=None, check=lambda config: [], load=load):
    """The printed problems, with single spaces."""
    with pytest.raises(ConfigError) as caught:
        load(overrides, check, config_dir=config_dir)
    return " ".join(str(caught.value).split())


@cache
def problems_of(override):
    with pytest.raises(ConfigError) as caught:
        load([override])
    return caught.value.problems


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """Writes mine/experiment/bad.yaml and returns its problems."""
    monkeypatch.chdir(tmp_path)

    def faults_of(content, *overrides, check=lambda config: []):
        path = tmp_path / "mine" / "experiment" / "bad.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return faults("experiment=bad", *overrides, config_dir="mine", check=check)

    return faults_of


# Overrides, one fault each: what was typed, and what is answered.
OVERRIDES = [
    (
        "train.stpes=5",
        "train.stpes=5: unknown key train.stpes; train has steps, batch_size, ... did you mean train.steps=5?",
    ),
    ("trian.steps=5", "unknown key trian.steps did you mean train.steps=5?"),
    ("optimizer.lr=0.1", "unknown key optimizer.lr; ... did you mean optimizer.learning_rate=0.1?"),
    ("lr=0.1", "unknown key lr did you mean optimizer.learning_rate=0.1?"),
    ("optimizer.rate=0.1", "did you mean optimizer.learning_rate=0.1?"),
    ("clustr=4w", "unknown key clustr did you mean cluster=4w?"),
    ("gpus=2", "unknown key gpus type device.gpus={worker:[0,1]}"),
    ("batch_size=64", "did you mean train.batch_size=64?"),
    ("zzz=1", "unknown key zzz; the config has mode, launch, target, name, run,"),
    ("train={stpes:5}", "unknown key train.stpes"),
    ("+train.foo=3", "train.foo: unknown key train.foo; train has steps, batch_size"),
    ("train.steps=abc", "train.steps=abc: 'abc' is not a whole number e.g. train.steps=300"),
    ("train.steps=1.5", "'1.5' is not a whole number"),
    ("train.steps=1e3", "'1000.0' is not a whole number e.g. train.steps=1000"),
    ("train.steps=true", "'true' is not a whole number"),
    ("train.steps=null", "'null' is not a whole number"),
    ("train.steps=[1]", "'[1]' is not a whole number"),
    ("train=3", "train is a section with steps, batch_size, ... e.g. train.steps=300"),
    ("strategy.quorum=few", "'few' is not a whole number or null e.g. strategy.quorum=1"),
    (
        "device.soft_placement=maybe",
        "is not a mapping {name:value}, ... true or false e.g. device.soft_placement={worker:false}",
    ),
    ("device.soft_placement={worker:maybe}", "'maybe' is not true or false e.g. device.soft_placement={worker:false}"),
    ("device.inter_op_threads={ps:x}", "'x' is not a whole number e.g. device.inter_op_threads={ps:4}"),
    ("device.memory_mib={ps:0.5}", "'0.5' is not a whole number e.g. device.memory_mib={ps:8000}"),
    ("placement.max_part_mib=0", "0 is not a size in MiB; it must be auto, null or a number above 0 leave it out"),
    ("placement.max_part_mib=-2", "-2 is not a size in MiB"),
    ("placement.max_part_mib=inf", "inf is not a size in MiB"),
    ("placement.max_part_mib=nan", "nan is not a size in MiB"),
    ("placement.max_part_mib=atuo", "atuo is not a size in MiB"),
    ("device.layers=/cpu:1", "is not a mapping {name:value}, ... e.g. device.layers={dense*:/cpu:1}"),
    ("device.replicas=2", "'2' is not a list [a,b], each text e.g. device.replicas=[/cpu:0,/cpu:1]"),
    ("device.gpus.worker=all", "'all' is not a list [a,b], each a whole number e.g. device.gpus={worker:[0]}"),
    ("device.memory_fraction={worker\\:0:much}", "'much' is not a number e.g. device.memory_fraction={worker\\:0:0.5}"),
    ("train.batch_size=0", "train.batch_size: 0 is out of range; it must be at least 1"),
    ("train.batch_size=-8", "train.batch_size: -8 is out of range"),
    ("train.steps=0", "train.steps: 0 is out of range"),
    ("train.steps=-5", "train.steps: -5 is out of range"),
    ("optimizer.learning_rate=0", "optimizer.learning_rate: 0.0 is out of range; it must be above 0"),
    ("optimizer.learning_rate=-0.1", "optimizer.learning_rate: -0.1 is out of range"),
    ("optimizer.learning_rate=nan", "optimizer.learning_rate: nan is not a finite number"),
    ("optimizer.learning_rate=inf", "optimizer.learning_rate: inf is not a finite number"),
    ("model.options.dropout=nan", "model.options.dropout: nan is not a finite number e.g. model.options.dropout=0.0"),
    ("seed=4294967296", "seed: 4294967296 is out of range; it must be at least 0 and below 2147483648"),
    ("model=cmm", "model=cmm: unknown model 'cmm'; available: cnn, ctr, mlp, oracle, resnet20 e.g. model=cnn"),
    ("data=mnits", "unknown data 'mnits'; available: cifar10, clicks, criteo, csv, fashion_mnist, hf, images, mnist,"),
    (
        "optimizer=adm",
        "unknown optimizer 'adm'; available: adafactor, adagrad, adam, adamw, ftrl, lamb, lion, momentum,",
    ),
    ("strategy=snyc", "unknown strategy 'snyc'; available: all_reduce, async, auto, ... e.g. strategy=sync"),
    ("experiment=nope", "experiment=nope: unknown experiment 'nope'; available: ... e.g. experiment="),
    (
        "optimizer.name=adm",
        "'adm' is not one of sgd, adam, adamw, rmsprop, adagrad, lion, adafactor, lamb, ftrl e.g. optimizer.name=adam",
    ),
    (
        "optimizer.groups=[dense]",
        "optimizer.groups[0]: 'dense' is not a mapping with patterns of parameter paths in match",
    ),
    ("optimizer.groups=[{match:3,frozen:true}]", "is not a mapping with patterns of parameter paths in match"),
    ("optimizer.groups=[{match:a,lr:1}]", "optimizer.groups[0]: there is no lr; available: match, learning_rate,"),
    (
        "optimizer.groups=[{match:a,learning_rate:0}]",
        "learning_rate=0 is not a number above 0 e.g. learning_rate:0.0001",
    ),
    ("optimizer.groups=[{match:a,weight_decay:x}]", "weight_decay='x' is not a number of at least 0"),
    ("optimizer.groups=[{match:a,frozen:1}]", "frozen=1 is not true or false e.g. frozen:true"),
    ("optimizer.groups=[{match:[a,b]}]", "optimizer.groups[0]: group a b has no settings; allowed: learning_rate,"),
    ("optimizer.learning_rate_power=0.5", "0.5 is out of range; it must be at most 0"),
    ("strategy.name=asnyc", "strategy.name=asnyc: 'asnyc' is not one of auto, local, sync"),
    ("mode=trian", "mode=trian: 'trian' is not one of train, plan, ... e.g. mode=train"),
    ("restart.max_of=3", "'3' is not a mapping {name:value}, ... e.g. restart.max_of={worker:5}"),
    ("restart.max_of={ps:few}", "'few' is not a whole number e.g. restart.max_of={ps:5}"),
    ("model.name=foo", "model.name: unknown model 'foo'; available: cnn, ctr, mlp, oracle, resnet20"),
    ("model.name=mlp", "model.name: model=cnn has the options of cnn, not of mlp model=mlp"),
    ("model=null", "unknown model 'null'"),
    ("~model", "model.name: is not set choose a file of conf/model, e.g. model=cnn"),
    ("~train.steps", "removes a key that every config needs"),
    ("+model=mlp", "the + adds a second choice to a group model=mlp"),
    ("cluster=2ps", "'2ps' is not a cluster size: it has no workers cluster=2ps1w"),
    ("cluster=2ps4q", "'2ps4q' is not a cluster size such as ... cluster=2ps4w"),
    ("cluster=0ps4w", "'0ps4w' is not a cluster size: 0ps is wrong ... leave ps out for none ... cluster=4w"),
    ("cluster=2ps0w", "'2ps0w' is not a cluster size: 0w is wrong ... cluster=2ps1w"),
    ("cluster=w4", "'w4' is not a cluster size such as 2ps4w, ... cluster=4w"),
    ("cluster=2pw", "'2pw' is not a cluster size such as 2ps4w, 4w or 8ps32w1e cluster=2ps1w"),
    ("cluster=2pss4w", "'2pss4w' is not a cluster size such as ... cluster=2ps4w"),
    ("cluster=02ps4w", "'02ps4w' is not a cluster size: ... have no leading zeros"),
    ("cluster=10000w", "a job has at most 9999 tasks"),
    ("cluster=locl", "unknown cluster 'locl'; available: ... e.g. cluster=local"),
    ("model.options.widht=64", "unknown key model.options.widht; model.options has filters, units, dropout"),
    ("+model.options.widht=64", "unknown key model.options.widht"),
    ("data.options.path=x", "data.options.path: mnist_10k takes no options leave it out"),
    ("model.options.filters=abc", "'abc' is not a whole number, which cnn needs e.g. model.options.filters=32"),
    ("model.options.filters=1.5", "'1.5' is not a whole number, which cnn needs"),
    ("model.options=3", "'3' is not a mapping"),
    ("data=npz", "data.options.path: is not set, and data=npz needs it add data.options.path="),
    ("train.steps=???", "train.steps: is not set e.g. train.steps=300"),
    ("train.steps=${nope}", "train.steps: ${nope} refers to a key that does not exist"),
    ("train.steps=${train.stpes}", "refers to a key that does not exist; the nearest is train.steps"),
    ("train.steps=${name}", "train.steps: ${name} cannot be resolved: ... could not be converted to Integer"),
    ("train=${evaluate}", "train: ${evaluate} cannot be resolved: a reference cannot stand for a whole section"),
    ("name=${name}", "name: ${name} cannot be resolved: Recursive interpolation"),
    ("run=${oc.env:NO_SUCH_VARIABLE}", "run: ... Environment variable 'NO_SUCH_VARIABLE' not found"),
    ("name=${nope:1}", "name: ... Unsupported interpolation type nope"),
    ("train.steps=${seed", "has a reference that cannot be read"),
    (
        "cluster.addresses.worker=['a:${nope}']",
        "cluster.addresses.worker: [a:${nope}] refers to a key that does not exist",
    ),
    ("name=My_Run", "'My_Run' must be 1 to 63 characters from a-z, 0-9 and - e.g. name=my-run"),
    ("name=", "'' must be 1 to 63 characters"),
    (f"name={'a' * 64}", f"must be 1 to 63 characters from a-z, 0-9 and - e.g. name={'a' * 63}"),
    ("name='a/../b'", "'a/../b' must be 1 to 63 characters"),
    ("run=runs/../../etc", "run: 'runs/../../etc' contains '..'"),
    ("run=/", "run: '/' is not a directory for one run alone"),
    ("run=.", "run: '.' is not a directory for one run alone"),
    ("run=", "run: '' is not a directory for one run alone"),
    ("run='~/x'", "run: '~/x' starts with ~, which only a shell expands"),
    ("model=../data/npz", "unknown model '../data/npz'"),
    ("model=/etc/passwd", "unknown model '/etc/passwd'"),
    ("model.options._target_=os.system", "names code to import, but a config is plain data"),
    ("+hydra.callbacks.x={_target_:os.system}", "names code to import"),
    ("train.steps=1,2", "has several values give one, e.g. train.steps=1, or add --multirun"),
    ("optimizer.learning_rate=0,001", "give one, e.g. optimizer.learning_rate=0.001"),
    ("plan.link_gbps=1", "plan.link_gbps is no longer a key leave it out"),
    ("summary.every=5", "summary.every is no longer a key type history.every=5"),
    ("metrics={port:0}", "metrics is no longer a key type prometheus={port:0}"),
    ("metrics=[x]", "unknown key metrics type model.metrics=[x]"),
    ("train.steps=10,000", "give one, e.g. train.steps=10000"),
    ("plan", "plan: is a command, and commands come first type trainer plan ..."),
    ("2ps4w", "2ps4w: is not key=value cluster=2ps4w"),
    ("cluster", "cluster: is not key=value e.g. cluster=2ps4w"),
    ("20", "20: is not key=value see python -m trainer --help"),
    ("my.py", "my.py: is not key=value user=my.py"),
    ("train.steps", "train.steps: is not key=value e.g. train.steps=300"),
    ("=3", "=3: has no key before the ="),
    ("train..steps=3", "has a key that cannot be read: 'train..steps'"),
    ("run=a b;c", """has a value that cannot be read quote it twice: 'run="a b;c"'"""),
    (f"train.steps={'[' * 900}", "has a value that cannot be read"),
    ("hydra.foo=1", "hydra.foo=1: Key 'foo' not in 'HydraConf'"),
    ("hydra/launcher=nope", "hydra/launcher=nope: ... Could not find 'hydra/launcher/nope'"),
]


@pytest.mark.parametrize(("override", "answer"), OVERRIDES, ids=[override[:40] for override, _ in OVERRIDES])
def test_an_invalid_override_is_explained(override, answer):
    text = " ".join("\n".join(map(str, problems_of(override))).split())
    for part in answer.split(" ... "):
        assert part in text


@pytest.mark.parametrize("override", [override for override, _ in OVERRIDES], ids=lambda text: text[:40])
def test_the_remedy_of_an_answer_can_be_typed(override):
    for problem in problems_of(override):
        assert all([problem.key, problem.message, problem.remedy])
        meant = re.search(r"^(?:e\.g\. |did you mean )?(?!user=)([a-z_.]+=[^ ]*?)\??$", problem.remedy)
        if meant and "VALUE" not in meant[1]:
            load([meant[1]])


def test_one_mistake_is_one_problem():
    with pytest.raises(ConfigError, match=r"unknown key train\.stpes") as caught:
        load(["train.stpes=5"])
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("directory", ["my runs/first", "my_target_dir", "/tmp/x", "runs/2026-01-01_12.00"])
def test_ordinary_run_directories_are_fine(directory):
    assert load([f"run={directory}"]).run == directory


# Files, one fault each: what mine/experiment/bad.yaml holds, and what is answered.
FILES = [
    pytest.param(
        "train:\n  stpes: 3\n", "mine/experiment/bad.yaml:3 train.stpes: unknown key train.stpes", id="unknown key"
    ),
    pytest.param(
        "train:\n  steps: abc\n", "mine/experiment/bad.yaml:3 train.steps: 'abc' is not a whole number", id="wrong type"
    ),
    pytest.param(
        "train: 3\n", "mine/experiment/bad.yaml:2 train: train is a section with steps, batch_size", id="no section"
    ),
    pytest.param(
        "train:\n  steps: 1\n  steps: 2\n", "bad.yaml:4: duplicate key steps, first on line 3", id="duplicate key"
    ),
    pytest.param("1: 2\n", "bad.yaml:2 1: unknown key 1", id="number for a key"),
    pytest.param("? [a]\n: b\n", "bad.yaml:2: has a key that is a list or a mapping", id="list for a key"),
    pytest.param("~: 2\n", "bad.yaml: cannot be read: Incompatible key type 'NoneType'", id="null for a key"),
    pytest.param("optimizer: {learning_rate: 1e-}\n", "'1e-' is not a number", id="number not finished"),
    pytest.param(
        "train: {steps: 1e3}\n", "'1000.0' is not a whole number e.g. train.steps=1000", id="1e3 for a whole number"
    ),
    pytest.param("train: {steps: ${nope}}\n", "is not YAML", id="reference without quotes"),
    pytest.param(
        "train: {steps: '${nope}'}\n", "train.steps: ${nope} refers to a key that does not exist", id="reference"
    ),
    pytest.param("train: {steps: '${nope'}\n", "bad.yaml: cannot be read", id="reference not closed"),
    pytest.param(
        "\ttrain: 3\n", "bad.yaml:2: is not YAML: while scanning for the next token: found character", id="tab"
    ),
    pytest.param("a: b: c\n", "bad.yaml:2: is not YAML: mapping values are not allowed here", id="two colons"),
    pytest.param("seed: 1\n---\nseed: 2\n", "is not YAML: expected a single document", id="two documents"),
    pytest.param("seed: *a\n", "is not YAML: found undefined alias 'a'", id="alias of nothing"),
    pytest.param(
        "name: !!python/object/apply:os.system ['touch pwned']\n",
        "bad.yaml:2: has the tag !!python/object/apply:os.system; a config is plain data",
        id="python tag",
    ),
    pytest.param("name: !!python/name:os.system\n", "has the tag !!python/name:os.system", id="python name"),
    pytest.param(
        "run: !!python/object/apply:pathlib.Path [x]\n", "has the tag !!python/object/apply:pathlib.Path", id="path tag"
    ),
    pytest.param("name: !mine x\n", "has the tag !mine", id="tag of one's own"),
    pytest.param(
        "model: {options: {_target_: os.system}}\n", "bad.yaml:2: has a key _target_, which names code", id="target"
    ),
    pytest.param(
        "hydra: {job_logging: {handlers: {x: {(): os.system}}}}\n", "has a key (), which names code", id="factory"
    ),
    pytest.param("hydra: {callbacks: {x: {_target_: os.system}}}\n", "has a key _target_", id="target for hydra"),
    pytest.param("a: &a [*a]\n", "holds more than 50000 keys and values once its aliases", id="alias of itself"),
    pytest.param("a: " + "[" * 800 + "]" * 800, "is nested too deeply", id="deep nesting"),
    pytest.param("a: " + "x" * 300_000, "has more than 256 KiB", id="large file"),
    pytest.param("name: '\x01'\n", "is not YAML: unacceptable character #x0001", id="control character"),
    pytest.param(
        "defaults:\n  - override /cluster: 2pss4w\n", "experiment=bad: '2pss4w' is not a cluster size", id="bad choice"
    ),
    pytest.param("defaults: 3\n", "defaults must be a list (got int)", id="defaults that are no list"),
    pytest.param(
        "hydra: {searchpath: [file:///x]}\n", "Overriding hydra.searchpath is only supported", id="search path"
    ),
]


@pytest.mark.long(but=["bad choice", "deep nesting", "control character"])
@pytest.mark.parametrize(("content", "answer"), FILES)
def test_an_invalid_file_is_explained(experiment, content, answer, tmp_path):
    assert answer in experiment(GLOBAL + content)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        pytest.param("", "mine/experiment/bad.yaml: is empty write the keys it should set, or {} if", id="empty"),
        pytest.param("# a comment\n", "mine/experiment/bad.yaml: is empty", id="comments only"),
        pytest.param("- a\n- b\n", "bad.yaml:1: is a list at top level; a config file maps keys to values", id="list"),
        pytest.param("hello\n", "bad.yaml:1: is one value, not a mapping", id="scalar"),
        pytest.param(b"name: caf\xe9\n", "bad.yaml: is not UTF-8: byte 9 is 0xe9 save the file as UTF-8", id="latin-1"),
        pytest.param("seed: 3\n".encode("utf-16"), "bad.yaml: is not UTF-8: byte 0 is 0xff", id="utf-16"),
        pytest.param(
            b"\xef\xbb\xbf# @package _global_\nseed: 3\n", "starts with a byte order mark", id="byte order mark"
        ),
        pytest.param("# @package a b\nseed: 1\n", "bad.yaml: cannot be read: Too many components", id="package line"),
    ],
)
def test_a_file_that_is_not_a_mapping_in_utf8_is_explained(experiment, content, answer):
    assert answer in experiment(content)


@pytest.mark.parametrize(("text", "rate"), [("1e-3", 0.001), ("1e3", 1000.0), ("5E-4", 0.0005), ("'1e-3'", 0.001)])
def test_a_number_with_an_exponent_is_a_number_in_a_file(tmp_path, text, rate):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "rate.yaml").write_text(f"{GLOBAL}optimizer: {{learning_rate: {text}}}\n")
    assert load(["experiment=rate"], config_dir=str(tmp_path)).optimizer.learning_rate == rate


def test_an_alias_bomb_is_refused_before_it_grows(experiment):
    levels = "".join(f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 30))
    started = time.process_time()
    assert "holds more than 50000 keys and values" in experiment(f"a0: &a0 [x]\n{levels}")
    assert time.process_time() - started < 2


def test_a_few_aliases_are_fine(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "shared.yaml").write_text(f"{GLOBAL}seed: &n 9\ntrain: {{steps: *n}}\n")
    config = load(["experiment=shared"], config_dir=str(tmp_path))
    assert (config.seed, config.train.steps) == (9, 9)


def test_all_mistakes_of_a_file_are_reported_together(experiment):
    text = experiment(f"{GLOBAL}train:\n  stpes: 3\n  batch_size: 0\ntrian: 3\nmodel:\n  options:\n    widht: 4\n")
    assert "bad.yaml:3 train.stpes: unknown key train.stpes" in text
    assert "train.batch_size: 0 is out of range" in text
    assert "bad.yaml:5 trian: unknown key trian" in text
    assert "unknown key model.options.widht" in text


def test_an_invalid_value_is_reported_with_its_file_and_line(experiment):
    text = experiment(f"{GLOBAL}train:\n  batch_size: 0\nname: My\nmodel:\n  options:\n    filters: a\n")
    assert "mine/experiment/bad.yaml:3 train.batch_size: 0 is out of range" in text
    assert "mine/experiment/bad.yaml:4 name: 'My' must be 1 to 63 characters" in text
    assert "mine/experiment/bad.yaml:7 model.options.filters: 'a' is not a whole number, which cnn needs" in text


def test_the_last_file_that_gives_a_value_is_named_unless_an_override_does(experiment):
    content = f"{GLOBAL}train: {{batch_size: -1}}\ncluster: {{addresses: {{ps: [a, b]}}}}\n"
    problem = Problem("cluster.addresses.ps[1]", "malformed", "is no address", "e.g. a:2222")
    text = experiment(content, "train.batch_size=-2", "model=mlp", check=lambda config: [problem])
    assert text.startswith("train.batch_size: -2 is out of range")
    assert "mine/experiment/bad.yaml:3 cluster.addresses.ps[1]: is no address" in text


def test_a_mistake_in_a_group_file_is_reported_with_the_file_and_the_whole_key(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: mlp\noptoins: {width: 3}\n")
    text = faults("model=mine", config_dir=str(tmp_path))
    assert "mine.yaml:2 model.optoins: unknown key model.optoins" in text
    assert "did you mean model.options={width:3}?" in text


def test_the_other_choices_of_a_bad_file_are_kept(experiment):
    text = experiment(
        f"{GLOBAL}defaults: [override /model: mlp]\ntrain: {{stpes: 3}}\nmodel: {{options: {{width: a, depth: 3}}}}\n"
    )
    assert "model.options.width: 'a' is not a whole number, which mlp needs" in text
    assert "model.options.depth" not in text


def test_options_of_an_unknown_choice_are_not_checked_against_another(tmp_path):
    text = faults("model=mpl", "model.options.depth=3")
    assert text == "model=mpl: unknown model 'mpl'; available: cnn, ctr, mlp, oracle, resnet20 e.g. model=mlp"


def test_a_broken_file_that_is_not_chosen_does_no_harm(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "broken.yaml").write_text("][")
    assert load([], config_dir=str(tmp_path)).train.steps == 300


def test_a_broken_main_file_is_named(tmp_path, monkeypatch):
    shutil.copytree(sources.conf_dir(), tmp_path / "conf")
    with (tmp_path / "conf" / "config.yaml").open("a") as file:
        file.write("train: {stpes: 5}\n")
    monkeypatch.setattr(sources, "conf_dir", lambda: tmp_path / "conf")
    assert "config.yaml" in faults(load=compose.load)
    assert "unknown key train.stpes" in faults("cluster=4w", load=compose.load)


def test_a_missing_config_dir_is_named(tmp_path):
    assert f"--config-dir={tmp_path}/none: is not a directory" in faults(config_dir=f"{tmp_path}/none")


# The user's Python file.
PYTHON = [
    pytest.param(
        "my.txt", b"def tiny(): ...", "user=my.txt: is not a Python file: its name must end in .py", id="not .py"
    ),
    pytest.param("my.py", None, "user=my.py: cannot be read: No such file or directory", id="missing"),
    pytest.param("folder.py", "folder", "user=folder.py: cannot be read: Is a directory", id="a folder"),
    pytest.param("my.py", b"def caf\xe9(): ...", "user=my.py: is not UTF-8: byte 7 is 0xe9", id="latin-1"),
    pytest.param(
        "my.py", b"x = 1\ndef tiny(:\n", "user=my.py: is not valid Python: invalid syntax, line 2", id="syntax"
    ),
    pytest.param("my.py", b"x = '\0'\n", "user=my.py: is not valid Python: ", id="null byte"),
    pytest.param(
        "my.py",
        b"def tinny(): ...",
        "model=tiny: unknown model 'tiny'; available: cnn, ctr, mlp, oracle, resnet20, tinny e.g. model=tinny",
        id="unknown function",
    ),
    pytest.param("my.py", b"class tiny: ...", "unknown model 'tiny'; available: cnn, ctr, mlp, oracle,", id="class"),
    pytest.param(
        "my.py",
        b"def tiny(s, c, *, width): ...",
        "model.options.width: is not set, and model=tiny needs it",
        id="option without default",
    ),
    pytest.param(
        "my.py",
        b"def tiny(): ...\ndef mnist_10k(): ...",
        "data.name: mnist_10k is both built in and a function of my.py rename the function",
        id="name of a built-in",
    ),
]


@pytest.mark.parametrize(("name", "content", "answer"), PYTHON)
def test_an_invalid_python_file_is_explained(tmp_path, monkeypatch, name, content, answer):
    monkeypatch.chdir(tmp_path)
    if content == "folder":
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    assert answer in faults(f"user={name}", "model=tiny")


# Files whose model or data would be left out in silence.
LEFT_OUT = {
    "a model that is assigned": (
        "import keras\nmodel = keras.Sequential()\ndef data(): ...",
        "line 2 sets model, which must be a function here or in a file beside this one; model=cnn would run write def",
    ),
    "data that is assigned": ("data = dict(train=(), evaluate=())", "line 1 sets data, which must be a function"),
    "a model from elsewhere": ("from nets import model", "line 1 sets model, which must be a function"),
    "a class without its name": (
        "import keras\nclass Net(keras.Model): ...\ndef data(): ...",
        "has no function model, but Net; model=cnn would run type model=Net, or model=cnn",
    ),
    "data of another name": (
        "def model(spec): ...\ndef load_data(): ...\ndef block(x): ...",
        "has no function data, but load_data; data=mnist_10k would run type data=load_data, or data=mnist_10k",
    ),
    "a hook of another name": ("def on_epoch_end(step, logs): ...", "on_epoch_end is never called the hooks are on_"),
    "nothing is used": ("def net(x): ...", "nothing of it is used; it has net choose by name, e.g. model=net"),
    "no function": ("import keras\nprint(keras)", "nothing of it is used; it has no functions"),
}


@pytest.mark.parametrize("row", LEFT_OUT)
def test_a_file_that_is_left_out_is_refused_unless_the_config_chooses(tmp_path, monkeypatch, row):
    monkeypatch.chdir(tmp_path)
    text, answer = LEFT_OUT[row]
    (tmp_path / "my.py").write_text(text)
    assert f"user=my.py: {answer}" in faults("user=my.py")
    if "never called" not in answer:
        assert load(["user=my.py", "model=mlp", "data=synthetic"]).model.name == "mlp"


def test_a_file_of_a_loss_or_hooks_alone_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in ("def loss(y, outputs): ...", "def on_end(): ...", "loss = lambda y, outputs: 0"):
        (tmp_path / "my.py").write_text(text)
        assert load(["user=my.py"]).model.name == "cnn"
    (tmp_path / "my.py").write_text("def own_loss(y, outputs): ...")
    assert load(["user=my.py", "model.loss=own_loss"]).model.loss == "own_loss"


def test_a_missing_python_file_does_not_make_its_functions_unknown_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = faults("user=my.py", "model=tiny", "train.steps=0")
    assert "there is no model" not in text
    assert "train.steps: 0 is out of range" in text


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("model.options.width=abc", "'abc' is not a whole number, which tiny needs e.g. model.options.width=32"),
        ("model.options.width=1.5", "'1.5' is not a whole number"),
        ("model.options.rate=fast", "'fast' is not a number"),
        ("model.options.deep=3", "'3' is not true or false"),
        ("model.options.act=[relu]", "'[relu]' is not text"),
        ("model.options.sizes=3", "'3' is not a list [a,b], which tiny needs e.g. model.options.sizes=[1,2]"),
        ("model.options.depth=3", "unknown key model.options.depth; model.options has width, rate, deep, act, sizes"),
    ],
)
def test_options_of_a_function_keep_the_types_of_their_defaults(tmp_path, monkeypatch, override, answer):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text("def tiny(s, c, *, width=32, rate=0.1, deep=True, act='relu', sizes=(1, 2)): ...\n")
    assert answer in faults("user=my.py", "model=tiny", override)
    assert load(["user=my.py", "model=tiny", "model.options.rate=1"]).model.options["rate"] == 1


# All at once.


def divides(config):
    replicas = config.cluster.worker
    if config.train.batch_size % replicas == 0:
        return []
    message = f"{config.train.batch_size} examples do not divide by {replicas} replicas"
    return [Problem("train.batch_size", "not-divisible", message, f"e.g. train.batch_size={replicas}")]


def test_mistakes_of_every_kind_are_reported_in_one_pass():
    text = faults(
        "cluster=0ps4w",
        "model=cmm",
        "train.stpes=5",
        "optimizer.learning_rate=-1",
        "seed=abc",
        "name=My",
        "data=npz",
        "train.batch_size=255",
        check=divides,
    )
    for part in (
        "cluster=0ps4w: '0ps4w' is not a cluster size",
        "model=cmm: unknown model 'cmm'",
        "train.stpes=5: unknown key train.stpes",
        "seed=abc: 'abc' is not a whole number",
        "data.options.path: is not set, and data=npz needs it",
        "optimizer.learning_rate: -1.0 is out of range",
        "name: 'My' must be 1 to 63",
        "train.batch_size: 255 examples do not divide by 4 replicas",  # the 4 of 4w, the size nearest to 0ps4w
    ):
        assert part in text


def test_keys_that_disagree_are_refused():
    assert faults("cluster=4w", "train.batch_size=255", check=divides).startswith(
        "train.batch_size: 255 examples do not divide by 4 replicas"
    )


def test_a_value_known_to_be_wrong_is_not_blamed_twice():
    text = faults("cluster=7w", "train.batch_size=abc", check=divides)
    assert "train.batch_size=abc: 'abc' is not a whole number" in text
    assert "do not divide" not in text


def test_a_check_that_fails_on_a_reported_value_does_not_hide_it():
    assert faults("cluster.worker=0", check=divides).startswith("cluster.worker: 0 is out of range")


def test_a_check_that_fails_on_the_rest_does_not_hide_the_mistakes():
    def broken(config):
        raise ZeroDivisionError("a fault of the check")

    assert faults("cluster=0ps4w", check=broken).startswith("cluster=0ps4w: '0ps4w' is not a cluster size")


def test_a_check_that_fails_on_a_good_config_is_not_silenced():
    def broken(config):
        raise ZeroDivisionError("a fault of the check")

    with pytest.raises(ZeroDivisionError, match="a fault of the check"):
        load([], broken)


# Real command lines.


@pytest.fixture
def trainer(tmp_path, python):
    """Runs a program that only composes, in an empty directory; returns its result and the files it left."""
    program = tmp_path / "program.py"
    program.write_text("from trainer.config import compose\n\ncompose.run(lambda config: 0, lambda config: [])\n")
    (tmp_path / "here").mkdir()

    def run(*arguments, files=()):
        for name, content in dict(files).items():
            (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "here" / name).write_text(content)
        done = python.run(str(program), *arguments, cwd=tmp_path / "here")
        leftovers = {
            path.relative_to(tmp_path / "here").as_posix() for path in (tmp_path / "here").rglob("*") if path.is_file()
        }
        return done, leftovers - set(dict(files))

    return run


@pytest.mark.parametrize(
    ("arguments", "files", "answer"),
    [
        pytest.param(
            ["cluster=2ps", "train.stpes=5"],
            {},
            "cluster=2ps: '2ps' is not a cluster size: it has no workers\n    cluster=2ps1w\n"
            "train.stpes=5: unknown key train.stpes; "
            "train has steps, batch_size, epochs, accumulate, precision, jit, on_not_finite\n"
            "    did you mean train.steps=5?\n",
            id="two faults",
        ),
        pytest.param(
            ["--steps", "20", "--lr=0.1", "cluster=2ps", "--jit"],
            {},
            "--steps 20: is not a flag; settings are key=value\n    type train.steps=20\n"
            "--lr=0.1: is not a flag; settings are key=value\n    type optimizer.learning_rate=0.1\n"
            "--jit: is not a flag; settings are key=value\n    type train.jit=true\n"
            "cluster=2ps: '2ps' is not a cluster size: it has no workers\n    cluster=2ps1w\n",
            id="flags",
        ),
        pytest.param(
            ["--multi-run", "--foo", "--cfg", "jbo", "--config-dir"],
            {},
            "--multi-run: unknown flag; available: --help, --hydra-help, --version, --cfg, --resolve, --package, "
            "--run, --multirun, --config-path, --config-name, --config-dir, --info, and settings are key=value\n"
            "    did you mean --multirun?\n"
            "--foo: unknown flag; available: --help, --hydra-help, --version, --cfg, --resolve, --package, "
            "--run, --multirun, --config-path, --config-name, --config-dir, --info, and settings are key=value\n"
            "    see python -m trainer --help\n"
            "--cfg jbo: 'jbo' is not one of job, hydra, all\n    e.g. --cfg job\n"
            "--config-dir: needs a value\n    e.g. --config-dir VALUE\n",
            id="Hydra's flags",
        ),
        pytest.param(
            ["train.steps=-1"],
            {},
            "train.steps: -1 is out of range; it must be at least 1\n    e.g. train.steps=1\n",
            id="limit",
        ),
        pytest.param(
            ["--multirun", "train.steps=5,x"],
            {},
            "train.steps=x: 'x' is not a whole number\n    e.g. train.steps=300\n",
            id="multirun",
        ),
        pytest.param(
            ["--cfg", "job", "mode=paln"],
            {},
            f"mode=paln: 'paln' is not one of {', '.join(Mode.__members__)}\n    e.g. mode=plan\n",
            id="cfg",
        ),
        pytest.param(
            ["--config-dir=none"],
            {},
            "--config-dir=none: is not a directory\n    give a folder with the layout of conf/\n",
            id="config dir",
        ),
        pytest.param(
            ["--experimental-rerun", "x.pickle"],
            {},
            "--experimental-rerun: reads a pickle, which can run any code\n    give the overrides of that run again\n",
            id="pickle",
        ),
        pytest.param(
            ["+hydra.callbacks.x._target_=os.getcwd", "train.steps=0"],
            {},
            "+hydra.callbacks.x._target_=os.getcwd: names code to import, "
            "but a config is plain data\n"
            "    choose by name, e.g. model=cnn, or write a function in a file: user=my_models.py\n"
            "train.steps: 0 is out of range; it must be at least 1\n    e.g. train.steps=1\n",
            id="target",
        ),
        pytest.param(
            ["user=my.py", "model=tiny", "train.steps=0"],
            {"my.py": "open('imported', 'w')\ndef tiny(): ...\n"},
            "train.steps: 0 is out of range; it must be at least 1\n    e.g. train.steps=1\n",
            id="user file",
        ),
        pytest.param(
            ["--config-dir=mine", "experiment=bad"],
            {"mine/experiment/bad.yaml": "a: !!python/name:os.system\n"},
            "mine/experiment/bad.yaml:1: has the tag !!python/name:os.system; a config is plain data and runs no code\n"
            "    write a plain value without a tag\n",
            id="python tag",
        ),
    ],
)
def test_a_bad_command_line_prints_only_its_mistakes_exits_with_2_and_leaves_nothing(trainer, arguments, files, answer):
    done, leftovers = trainer(*arguments, files=files)
    assert (done.returncode, done.stderr, done.stdout, leftovers) == (2, answer, "", set())
