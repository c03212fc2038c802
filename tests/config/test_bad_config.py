"""Every bad config is refused before anything starts, with the place, the value and a remedy."""

from __future__ import annotations

import re
import shutil
import time

import pytest
from quick_config import load
from snapshots import cases

from trainer.config import compose, sources
from trainer.faults.problems import Problem

pytestmark = pytest.mark.slow

GLOBAL = "# @package _global_\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def experiment(here, refused):
    """Writes mine/experiment/bad.yaml, which must be refused with these codes."""

    def refuse(codes, content, *overrides, complete=compose.as_composed):
        path = here / "mine" / "experiment" / "bad.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else (GLOBAL + content).encode())
        return refused(codes, load, ["experiment=bad", *overrides], complete, config_dir="mine")

    return refuse


# Overrides, one fault each, by the codes of the problems.
OVERRIDES = {
    "cluster.addresses.worker/unresolved": ["cluster.addresses.worker=['a:${nope}']"],
    "cluster/malformed": [
        "cluster=2ps",
        "cluster=2ps4q",
        "cluster=0ps4w",
        "cluster=2ps0w",
        "cluster=w4",
        "cluster=2pw",
        "cluster=2pss4w",
        "cluster=02ps4w",
        "cluster=10000w",
    ],
    "cluster/unknown-choice": ["cluster=locl"],
    "config/failed": ["hydra.foo=1", "hydra/launcher=nope"],
    "config/unknown-key": ["trian.steps=5", "lr=0.1", "clustr=4w", "gpus=2", "batch_size=64", "zzz=1", "metrics=[x]"],
    "data.options.path/no-effect": ["data.options.path=x"],
    "data.options.path/not-set": ["data=npz"],
    "data/unknown-choice": ["data=mnits"],
    "device.gpus.worker/wrong-type": ["device.gpus.worker=all"],
    "device.inter_op_threads.ps/wrong-type": ["device.inter_op_threads={ps:x}"],
    "device.layers/wrong-type": ["device.layers=/cpu:1"],
    "device.memory_fraction.worker:0/wrong-type": ["device.memory_fraction={worker\\:0:much}"],
    "device.memory_mib.ps/wrong-type": ["device.memory_mib={ps:0.5}"],
    "device.replicas/wrong-type": ["device.replicas=2"],
    "device.soft_placement.worker/wrong-type": ["device.soft_placement={worker:maybe}"],
    "device.soft_placement/wrong-type": ["device.soft_placement=maybe"],
    "experiment/unknown-choice": ["experiment=nope"],
    "metrics/former-key": ["metrics={port:0}"],
    "mode/wrong-type": ["mode=trian"],
    "model.name/conflict": ["model.name=mlp"],
    "model.name/not-set": ["~model"],
    "model.options.dropout/out-of-range": ["model.options.dropout=nan"],
    "model.options.filters/wrong-type": ["model.options.filters=abc", "model.options.filters=1.5"],
    "model.options/unknown-key": ["model.options.widht=64", "+model.options.widht=64"],
    "model.options/wrong-type": ["model.options=3"],
    "model/unknown-choice": ["model=cmm", "model.name=foo", "model=null", "model=../data/npz", "model=/etc/passwd"],
    "name/malformed": ["name=My_Run", "name=", f"name={'a' * 64}", "name='a/../b'"],
    "name/unresolved": ["name=${name}", "name=${nope:1}"],
    "optimizer.groups/malformed": ["optimizer.groups=[dense]", "optimizer.groups=[{match:3,frozen:true}]"],
    "optimizer.groups/not-set": ["optimizer.groups=[{match:[a,b]}]"],
    "optimizer.groups/out-of-range": [
        "optimizer.groups=[{match:a,learning_rate:0}]",
        "optimizer.groups=[{match:a,weight_decay:x}]",
        "optimizer.groups=[{match:a,frozen:1}]",
    ],
    "optimizer.groups/unknown-key optimizer.groups/not-set": ["optimizer.groups=[{match:a,lr:1}]"],
    "optimizer.learning_rate/out-of-range": [
        "optimizer.learning_rate=0",
        "optimizer.learning_rate=-0.1",
        "optimizer.learning_rate=nan",
        "optimizer.learning_rate=inf",
    ],
    "optimizer.learning_rate_power/out-of-range": ["optimizer.learning_rate_power=0.5"],
    "optimizer.name/wrong-type": ["optimizer.name=adm"],
    "optimizer/unknown-choice": ["optimizer=adm"],
    "optimizer/unknown-key": ["optimizer.lr=0.1", "optimizer.rate=0.1"],
    "override/duplicate": ["+model=mlp"],
    "override/malformed": [
        "train.steps=${seed",
        "train.steps=1,2",
        "optimizer.learning_rate=0,001",
        "train.steps=10,000",
        "plan",
        "2ps4w",
        "cluster",
        "20",
        "my.py",
        "train.steps",
        "=3",
        "train..steps=3",
        "run=a b;c",
        f"train.steps={'[' * 900}",
    ],
    "override/not-set": ["~train.steps"],
    "override/unsafe": ["model.options._target_=os.system", "+hydra.callbacks.x={_target_:os.system}"],
    "placement.max_part_mib/out-of-range": [
        "placement.max_part_mib=0",
        "placement.max_part_mib=-2",
        "placement.max_part_mib=inf",
        "placement.max_part_mib=nan",
        "placement.max_part_mib=atuo",
    ],
    "plan.link_gbps/former-key": ["plan.link_gbps=1"],
    "restart.max_of.ps/wrong-type": ["restart.max_of={ps:few}"],
    "restart.max_of/wrong-type": ["restart.max_of=3"],
    "run/malformed": ["run='~/x'"],
    "run/unresolved": ["run=${oc.env:NO_SUCH_VARIABLE}"],
    "run/unsafe": ["run=/srv/../etc", "run=/", "run=.", "run="],
    "seed/out-of-range": ["seed=4294967296"],
    "strategy.name/wrong-type": ["strategy.name=asnyc"],
    "strategy.quorum/wrong-type": ["strategy.quorum=few"],
    "strategy/unknown-choice": ["strategy=snyc"],
    "summary.every/former-key": ["summary.every=5"],
    "train.batch_size/out-of-range": ["train.batch_size=0", "train.batch_size=-8"],
    "train.steps/not-set": ["train.steps=???"],
    "train.steps/out-of-range": ["train.steps=0", "train.steps=-5"],
    "train.steps/unresolved": ["train.steps=${nope}", "train.steps=${train.stpes}", "train.steps=${name}"],
    "train.steps/wrong-type": [
        "train.steps=abc",
        "train.steps=1.5",
        "train.steps=1e3",
        "train.steps=true",
        "train.steps=null",
        "train.steps=[1]",
    ],
    "train/unknown-key": ["train.stpes=5", "train={stpes:5}", "+train.foo=3"],
    "train/unresolved": ["train=${evaluate}"],
    "train/wrong-type": ["train=3"],
}


@pytest.mark.parametrize(("codes", "override"), cases(OVERRIDES))
def test_an_invalid_override_is_explained_with_a_remedy_that_can_be_typed(refused, codes, override):
    for problem in refused(codes, load, [override]):
        assert all([problem.key, problem.message, problem.remedy])
        meant = re.search(r"^(?:e\.g\. |did you mean )?(?!user=)([a-z_.]+=[^ ]*?)\??$", problem.remedy)
        if meant and "VALUE" not in meant[1]:
            load([meant[1]])


@pytest.mark.parametrize("directory", ["my runs/first", "my_target_dir", "/tmp/x", "runs/2026-01-01_12.00"])
def test_ordinary_run_directories_are_fine(directory):
    assert load([f"run={directory}"]).run == directory


# What mine/experiment/bad.yaml holds, below GLOBAL where it is text.
FILES = {
    "train/unknown-key": {"unknown key": "train:\n  stpes: 3\n"},
    "train.steps/wrong-type": {"wrong type": "train:\n  steps: abc\n", "1e3": "train: {steps: 1e3}\n"},
    "train/wrong-type": {"no section": "train: 3\n"},
    "file/duplicate": {"duplicate key": "train:\n  steps: 1\n  steps: 2\n"},
    "config/unknown-key": {"number for a key": "1: 2\n"},
    "file/malformed": {"list for a key": "? [a]\n: b\n"},
    "optimizer.learning_rate/wrong-type": {"number not finished": "optimizer: {learning_rate: 1e-}\n"},
    "train.steps/unresolved": {"reference": "train: {steps: '${nope}'}\n"},
    "file/unreadable": {
        "null for a key": "~: 2\n",
        "reference without quotes": "train: {steps: ${nope}}\n",
        "reference not closed": "train: {steps: '${nope'}\n",
        "tab": "\ttrain: 3\n",
        "two colons": "a: b: c\n",
        "two documents": "seed: 1\n---\nseed: 2\n",
        "alias of nothing": "seed: *a\n",
        "large file": "a: " + "x" * 300_000,
        "control character": "name: '\x01'\n",
        "latin-1": b"name: caf\xe9\n",
        "utf-16": "seed: 3\n".encode("utf-16"),
        "byte order mark": b"\xef\xbb\xbf# @package _global_\nseed: 3\n",
        "package line": b"# @package a b\nseed: 1\n",
    },
    "file/unsafe": {
        "python tag": "name: !!python/object/apply:os.system ['touch pwned']\n",
        "python name": "name: !!python/name:os.system\n",
        "path tag": "run: !!python/object/apply:pathlib.Path [x]\n",
        "tag of one's own": "name: !mine x\n",
        "target": "model: {options: {_target_: os.system}}\n",
        "factory": "hydra: {job_logging: {handlers: {x: {(): os.system}}}}\n",
        "target for hydra": "hydra: {callbacks: {x: {_target_: os.system}}}\n",
    },
    "file/over-capacity": {"alias of itself": "a: &a [*a]\n", "deep nesting": "a: " + "[" * 800 + "]" * 800},
    "file/not-set": {"empty": b"", "comments only": b"# a comment\n"},
    "file/wrong-type": {"list": b"- a\n- b\n", "scalar": b"hello\n"},
    "cluster/malformed": {"bad choice": "defaults:\n  - override /cluster: 2pss4w\n"},
    "config/failed": {
        "defaults that are no list": "defaults: 3\n",
        "search path": "hydra: {searchpath: [file:///x]}\n",
    },
}


@pytest.mark.long(but=["bad choice", "deep nesting", "control character", "latin-1", "list"])
@pytest.mark.parametrize(("codes", "content"), cases(FILES))
def test_an_invalid_file_is_explained(experiment, codes, content, here):
    experiment(codes, content)
    assert not (here / "pwned").exists()


def test_an_alias_bomb_is_refused_before_it_grows(experiment):
    levels = "".join(f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 30))
    started = time.process_time()
    experiment("file/over-capacity", f"a0: &a0 [x]\n{levels}")
    assert time.process_time() - started < 2


@pytest.mark.parametrize(("text", "rate"), [("1e-3", 0.001), ("1e3", 1000.0), ("5E-4", 0.0005), ("'1e-3'", 0.001)])
def test_a_number_with_an_exponent_is_a_number_in_a_file(tmp_path, text, rate):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "rate.yaml").write_text(f"{GLOBAL}optimizer: {{learning_rate: {text}}}\n")
    assert load(["experiment=rate"], config_dir=str(tmp_path)).optimizer.learning_rate == rate


def test_a_few_aliases_are_fine(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "shared.yaml").write_text(f"{GLOBAL}seed: &n 9\ntrain: {{steps: *n}}\n")
    config = load(["experiment=shared"], config_dir=str(tmp_path))
    assert (config.seed, config.train.steps) == (9, 9)


# Several mistakes of a file; the other choices of a bad file are kept.
SEVERAL = {
    "train/unknown-key train.batch_size/out-of-range config/unknown-key model.options/unknown-key": {
        "unknown keys": "train:\n  stpes: 3\n  batch_size: 0\ntrian: 3\nmodel:\n  options:\n    widht: 4\n"
    },
    "train.batch_size/out-of-range name/malformed model.options.filters/wrong-type": {
        "values": "train:\n  batch_size: 0\nname: My\nmodel:\n  options:\n    filters: a\n"
    },
    "train/unknown-key model.options.width/wrong-type": {
        "other choices": "defaults: [override /model: mlp]\ntrain: {stpes: 3}\nmodel: {options: {width: a, depth: 3}}\n"
    },
}


@pytest.mark.parametrize(("codes", "content"), cases(SEVERAL))
def test_all_mistakes_of_a_file_are_reported_together_with_their_lines(experiment, codes, content):
    experiment(codes, content)


def test_the_last_file_that_gives_a_value_is_named_unless_an_override_does(experiment):
    content = "train: {batch_size: -1}\ncluster: {addresses: {ps: [a, b]}}\n"
    problem = Problem("cluster.addresses.ps[1]", "malformed", "is no address", "e.g. a:2222")
    codes = "train.batch_size/out-of-range cluster.addresses.ps/malformed"
    experiment(codes, content, "train.batch_size=-2", "model=mlp", complete=lambda _, config: (config, [problem]))


def test_a_mistake_in_a_group_file_is_reported_with_the_file_and_the_whole_key(tmp_path, refused):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: mlp\noptoins: {width: 3}\n")
    refused("model/unknown-key", load, ["model=mine"], config_dir=str(tmp_path))


def test_options_of_an_unknown_choice_are_not_checked_against_another(refused):
    refused("model/unknown-choice", load, ["model=mpl", "model.options.depth=3"])


def test_a_broken_file_that_is_not_chosen_does_no_harm(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "broken.yaml").write_text("][")
    assert load([], config_dir=str(tmp_path)).train.steps == 300


def test_a_broken_main_file_is_named(tmp_path, monkeypatch, refused):
    shutil.copytree(sources.conf_dir(), tmp_path / "conf")
    with (tmp_path / "conf" / "config.yaml").open("a") as file:
        file.write("train: {stpes: 5}\n")
    monkeypatch.setattr(sources, "conf_dir", lambda: tmp_path / "conf")
    refused("train/unknown-key", compose.load, [])
    refused("config/failed train/unknown-key", compose.load, ["cluster=4w"])


def test_a_missing_config_dir_is_named(tmp_path, refused):
    refused("flag/not-found", load, [], config_dir=f"{tmp_path}/none")


# The user's Python file, and what it holds; a file of None is missing.
PYTHON = {
    "user/malformed": {"not .py": ("my.txt", b"def tiny(): ...")},
    "user/unreadable": {
        "missing": ("my.py", None),
        "a folder": ("folder.py", "folder"),
        "latin-1": ("my.py", b"def caf\xe9(): ..."),
        "syntax": ("my.py", b"x = 1\ndef tiny(:\n"),
        "null byte": ("my.py", b"x = '\0'\n"),
    },
    "model/unknown-choice": {
        "unknown function": ("my.py", b"def tinny(): ..."),
        "class": ("my.py", b"class tiny: ..."),
    },
    "model.options.width/not-set": {"option without default": ("my.py", b"def tiny(s, c, *, width): ...")},
    "data.name/duplicate": {"name of a built-in": ("my.py", b"def tiny(): ...\ndef mnist_10k(): ...")},
}


@pytest.mark.parametrize(("codes", "file"), cases(PYTHON))
def test_an_invalid_python_file_is_explained(here, refused, codes, file):
    name, content = file
    if content == "folder":
        (here / name).mkdir()
    elif content is not None:
        (here / name).write_bytes(content)
    refused(codes, load, [f"user={name}", "model=tiny"])


# Files whose model or data would be left out in silence.
LEFT_OUT = {
    "a model that is assigned": "import keras\nmodel = keras.Sequential()\ndef data(): ...",
    "data that is assigned": "data = dict(train=(), evaluate=())",
    "a model from elsewhere": "from nets import model",
    "a class without its name": "import keras\nclass Net(keras.Model): ...\ndef data(): ...",
    "data of another name": "def model(spec): ...\ndef load_data(): ...\ndef block(x): ...",
    "nothing is used": "def net(x): ...",
    "no function": "import keras\nprint(keras)",
}


@pytest.mark.parametrize("row", LEFT_OUT)
def test_a_file_that_is_left_out_is_refused_unless_the_config_chooses(here, refused, row):
    (here / "my.py").write_text(LEFT_OUT[row])
    refused("user/no-effect", load, ["user=my.py"])
    assert load(["user=my.py", "model=mlp", "data=synthetic"]).model.name == "mlp"


def test_a_hook_of_another_name_is_refused(here, refused):
    (here / "my.py").write_text("def on_epoch_end(step, logs): ...")
    refused("user/no-effect user/no-effect", load, ["user=my.py"])


def test_a_file_of_a_loss_or_hooks_alone_is_used(here):
    for text in ("def loss(y, outputs): ...", "def on_end(): ...", "loss = lambda y, outputs: 0"):
        (here / "my.py").write_text(text)
        assert load(["user=my.py"]).model.name == "cnn"
    (here / "my.py").write_text("def own_loss(y, outputs): ...")
    assert load(["user=my.py", "model.loss=own_loss"]).model.loss == "own_loss"


def test_a_missing_python_file_does_not_make_its_functions_unknown_too(here, refused):
    overrides = ["user=my.py", "model=tiny", "train.steps=0"]
    refused("user/unreadable train.steps/out-of-range", load, overrides)


OPTIONS = {
    "width/wrong-type": ["width=abc", "width=1.5"],
    "rate/wrong-type": ["rate=fast"],
    "deep/wrong-type": ["deep=3"],
    "act/wrong-type": ["act=[relu]"],
    "sizes/wrong-type": ["sizes=3"],
}


@pytest.mark.parametrize(("codes", "option"), cases(OPTIONS))
def test_options_of_a_function_keep_the_types_of_their_defaults(here, refused, codes, option):
    (here / "my.py").write_text("def tiny(s, c, *, width=32, rate=0.1, deep=True, act='relu', sizes=(1, 2)): ...\n")
    refused(f"model.options.{codes}", load, ["user=my.py", "model=tiny", f"model.options.{option}"])


def test_a_function_has_the_options_that_it_takes(here, refused):
    (here / "my.py").write_text("def tiny(s, c, *, width=32, rate=0.1): ...\n")
    refused("model.options/unknown-key", load, ["user=my.py", "model=tiny", "model.options.depth=3"])
    assert load(["user=my.py", "model=tiny", "model.options.rate=1"]).model.options["rate"] == 1


# All at once.


def divides(_, config):
    replicas = config.cluster.worker
    if config.train.batch_size % replicas == 0:
        return config, []
    message = f"{config.train.batch_size} examples do not divide by {replicas} replicas"
    return config, [Problem("train.batch_size", "not-divisible", message, f"e.g. train.batch_size={replicas}")]


# What is typed and checked: a value that is known to be wrong is not blamed twice.
TOGETHER = {
    "cluster/malformed model/unknown-choice train/unknown-key seed/wrong-type data.options.path/not-set "
    "optimizer.learning_rate/out-of-range name/malformed train.batch_size/not-divisible": [
        "cluster=0ps4w model=cmm train.stpes=5 optimizer.learning_rate=-1 seed=abc name=My data=npz "
        "train.batch_size=255"
    ],
    "train.batch_size/not-divisible": ["cluster=4w train.batch_size=255"],
    "train.batch_size/wrong-type": ["cluster=7w train.batch_size=abc"],
    "cluster.worker/out-of-range": ["cluster.worker=0"],
}


@pytest.mark.parametrize(("codes", "typed"), cases(TOGETHER))
def test_mistakes_of_every_kind_are_reported_in_one_pass_with_those_of_checks(refused, codes, typed):
    refused(codes, load, typed.split(), divides)


def broken(typed, config):
    raise ZeroDivisionError("a fault of the check")


def test_a_check_that_fails_on_the_rest_does_not_hide_the_mistakes(refused):
    refused("cluster/malformed", load, ["cluster=0ps4w"], broken)


def test_a_check_that_fails_on_a_good_config_is_not_silenced():
    with pytest.raises(ZeroDivisionError):
        load([], broken)


# Real command lines, and the files beside them.
COMMANDS = {
    "two faults": (["cluster=2ps", "train.stpes=5"], {}),
    "flags": (["--steps", "20", "--lr=0.1", "cluster=2ps", "--jit"], {}),
    "Hydra's flags": (["--multi-run", "--foo", "--cfg", "jbo", "--config-dir"], {}),
    "limit": (["train.steps=-1"], {}),
    "multirun": (["--multirun", "train.steps=5,x"], {}),
    "cfg": (["--cfg", "job", "mode=paln"], {}),
    "config dir": (["--config-dir=none"], {}),
    "pickle": (["--experimental-rerun", "x.pickle"], {}),
    "target": (["+hydra.callbacks.x._target_=os.getcwd", "train.steps=0"], {}),
    "user file": (["user=my.py", "model=tiny", "train.steps=0"], {"my.py": "open('imported', 'w')\ndef tiny(): ...\n"}),
    "python tag": (
        ["--config-dir=mine", "experiment=bad"],
        {"mine/experiment/bad.yaml": "a: !!python/name:os.system\n"},
    ),
}


@pytest.mark.parametrize("row", COMMANDS)
def test_a_bad_command_line_prints_only_its_mistakes_exits_with_2_and_leaves_nothing(here, python, snapshot, row):
    arguments, files = COMMANDS[row]
    for name, content in files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(content)
    program = "from trainer.config import compose; compose.run(lambda given: 0, compose.as_composed)"
    done = python.run("-c", program, *arguments, cwd=here)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == snapshot
    assert {path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file()} == set(files)
