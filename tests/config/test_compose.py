"""The command line becomes a typed config, or several, and `main` gets them."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl

import trainer
from trainer.config import completion, compose, help_page, keys, sources, user_file
from trainer.config.cluster_size import ClusterSize, nearest_size, parse_size
from trainer.config.schema import OptimizerName
from trainer.config.typed import Mode
from trainer.faults.problems import ConfigError

ROOT = Path(__file__).parents[2]
USER_FILE = """
raise RuntimeError("this file must only be read")
WIDTH = 8

def tiny(input_shape, classes, depth=2, *, width=32, rate=1e-3, sizes=(1, 2), note=None, units=WIDTH): ...
def blobs(seed=0): ...
def needs(input_shape, classes, *, width): ...
def _helper(x=1): ...
class Model:
    def method(self, x=1): ...
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(overrides, **options):
    return compose.load(overrides, **options).config


def run(monkeypatch, *arguments, main=lambda config: 0, complete=compose.as_composed):
    """The exit code of `python -m trainer` with these arguments.

    Hydra logs to streams of its own, and not to those of an earlier test, which are closed.
    """
    monkeypatch.setattr(sys, "argv", ["trainer", *arguments])
    with mock.patch.object(logging.getLogger(), "handlers", []), pytest.raises(SystemExit) as raised:
        compose.run(lambda given: main(given.config), complete)
    return raised.value.code


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1w", ClusterSize(ps=0, worker=1, evaluator=0)),
        ("4w", ClusterSize(ps=0, worker=4, evaluator=0)),
        ("2ps4w", ClusterSize(ps=2, worker=4, evaluator=0)),
        ("4w1e", ClusterSize(ps=0, worker=4, evaluator=1)),
        ("8ps32w1e", ClusterSize(ps=8, worker=32, evaluator=1)),
        ("9999ps9999w", ClusterSize(ps=9999, worker=9999, evaluator=0)),
    ],
)
def test_a_size_says_how_many_tasks_each_job_has(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("2ps", "2ps1w"),
        ("0ps4w", "4w"),
        ("2ps0w", "2ps1w"),
        ("w4", "4w"),
        ("2pss4w", "2ps4w"),
        ("2ps4", "2ps4w"),
        ("02ps4w", "2ps4w"),
        ("2PS4W", "2ps4w"),
        ("4w2ps", "2ps4w"),
        ("10000w", "9999w"),
        ("", "1w"),
        ("9" * 5000 + "w", "9999w"),
    ],
)
def test_the_nearest_size_of_a_bad_one_can_be_typed(text, nearest):
    assert nearest_size(text) == nearest
    parse_size(nearest)


def test_without_overrides_the_shipped_choices_apply():
    config = load([])
    assert (config.cluster.name, config.cluster.ps, config.cluster.worker) == ("local", 0, 1)
    assert (config.model.name, config.model.options["filters"]) == ("cnn", 32)
    assert config.model.loss is None
    assert config.optimizer.name is OptimizerName.adam


def test_a_cluster_of_any_size_needs_no_file():
    cluster = load(["cluster=8ps32w1e"]).cluster
    assert (cluster.name, cluster.ps, cluster.worker, cluster.evaluator) == ("8ps32w1e", 8, 32, 1)


def test_a_cluster_file_wins_over_the_generated_size(tmp_path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "2ps4w.yaml").write_text("name: mine\nps: 1\nworker: 3\n")
    cluster = load(["cluster=2ps4w"], config_dir=str(tmp_path)).cluster
    assert (cluster.name, cluster.ps, cluster.worker) == ("mine", 1, 3)
    assert load(["cluster=2ps4w"]).cluster.name == "2ps4w"


def test_a_shipped_cluster_file_wins_too(tmp_path, monkeypatch):
    shutil.copytree(sources.conf_dir(), tmp_path / "conf")
    (tmp_path / "conf" / "cluster" / "2ps4w.yaml").write_text("name: shipped\nps: 2\nworker: 4\n")
    monkeypatch.setattr(sources, "conf_dir", lambda: tmp_path / "conf")
    assert load(["cluster=2ps4w"]).cluster.name == "shipped"


def test_an_experiment_file_sets_choices_and_values(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "first.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /cluster: 2ps4w\n  - override /model: mlp\n"
        "train: {steps: 7}\nmodel: {options: {width: 5}}\noptimizer: {learning_rate: 1e-3}\n"
    )
    config = load(["experiment=first", "train.batch_size=8"], config_dir=str(tmp_path))
    assert (config.cluster.name, config.model.name, config.model.options["width"]) == ("2ps4w", "mlp", 5)
    assert (config.train.steps, config.train.batch_size, config.optimizer.learning_rate) == (7, 8, 0.001)


LENGTHS = [  # what a file says, what is typed, and what counts: (steps, epochs); None: they contradict each other
    ("", "train.epochs=5", (300, 5)),
    ("", "train={epochs:5}", (300, 5)),
    ("", "train.steps=7 train.epochs=null", (7, None)),
    ("", "train.steps=7 train.epochs=5", None),
    ("", "train={steps:7,epochs:5}", None),
    ("", "train={steps:7} train.epochs=5", None),
    ("train: {epochs: 5}", "", (300, 5)),
    ("train: {steps: 7, epochs: 5}", "", None),
    ("train: {steps: 7}", "train.epochs=5", (7, 5)),
    ("train: {epochs: 5}", "train.steps=7", (7, None)),
    ("defaults: [/experiment/digits]\ntrain: {epochs: 5}", "", (300, 5)),
    ("train: {steps: 7, epochs: 5}", "train.epochs=6", (7, 6)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "typed", "lengths"), LENGTHS)
def test_a_run_has_steps_or_epochs_and_what_is_typed_replaces_what_a_file_says(here, file, typed, lengths):
    (here / "mine.yaml").write_text(file)
    words = [*(["experiment=mine.yaml"] if file else []), *typed.split()]
    if lengths is None:
        with pytest.raises(ConfigError) as caught:
            load(words)
        assert [one.key.rpartition(" ")[2] for one in caught.value.problems] == ["train.epochs"]
    else:
        train = load(words).train
        assert (train.steps, train.epochs) == lengths


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [path for group in ("cluster", "model", "data", "strategy", "optimizer", "device", "experiment")
     for path in sorted((sources.conf_dir() / group).glob("*.yaml"))],
    ids=lambda path: f"{path.parent.name}={path.stem}",
)  # fmt: skip
def test_every_shipped_file_composes(path):
    group, unset = path.parent.name, {"tfrecord": ["train", "evaluate"]}
    if group == "data" and path.stem in ("npz", "npy", "csv", "parquet", "images", "tfds", "hf", "criteo"):
        unset[path.stem] = ["path"]
    paths = [f"data.options.{option}=x" for option in unset.get(path.stem, [])]
    config = load([f"{group}={path.stem}", *paths])
    if group in ("model", "data"):
        assert getattr(config, group).name == path.stem


@pytest.mark.parametrize("evaluate", ["others.csv", 0.3])
def test_options_of_readers_take_what_their_comments_say(evaluate):
    options = {"evaluate": evaluate, "label": "[a,b]", "columns": "[c]", "missing": 0, "dtypes": "{c:string}"}
    given = [f"data.options.{name}={value}" for name, value in options.items()]
    config = load(["data=csv", "data.options.path=mine.csv", *given])
    assert config.data.options["evaluate"] == evaluate
    assert (config.data.options["label"], config.data.options["dtypes"]) == (["a", "b"], {"c": "string"})
    features = "data.options.features={age:{dtype:int64,shape:[]}}"
    records = load(["data=tfrecord", "data.options.train=a", "data.options.evaluate=b", features])
    assert records.data.options["features"] == {"age": {"dtype": "int64", "shape": []}}
    folder = load(["data=hf", "data.options.path=mine", f"data.options.evaluate={evaluate}"])
    assert folder.data.options["evaluate"] == evaluate


def test_mappings_take_new_names_without_a_plus():
    config = load(
        [
            "device.gpus.worker=[0,1]",
            "device.memory_fraction={worker\\:0:0.5}",
            "placement.pins={dense*:1,embed/table:0}",
            "cluster.addresses={worker:[a:1,b:2]}",
        ]
    )
    assert config.device.gpus == {"worker": [0, 1]}
    assert config.device.memory_fraction == {"worker:0": 0.5}
    assert config.placement.pins == {"dense*": 1, "embed/table": 0}
    assert config.cluster.addresses == {"worker": ["a:1", "b:2"]}


def test_functions_of_a_python_file_are_models_and_data_sets(here):
    (here / "my.py").write_text(USER_FILE)
    config = load(["user=my.py", "model=tiny", "data=blobs", "model.options.width=64", "data.options.seed=3"])
    assert config.model.name == "tiny"
    assert config.model.options == {"depth": 2, "width": 64, "rate": 0.001, "sizes": [1, 2], "note": None}
    assert (config.data.name, config.data.options) == ("blobs", {"seed": 3})


@pytest.mark.slow
def test_functions_named_model_and_data_are_chosen_by_default(here, monkeypatch):
    def chosen(*overrides, **options):
        config = load(overrides, **options)
        return config.model.name, config.data.name

    (here / "my.py").write_text("def model(spec, *, width=8): ...\ndef data(*, examples=9): ...\n")
    assert chosen("user=my.py", "model.options.width=9", "data.options.examples=8") == ("model", "data")
    assert chosen("user=my.py", "model=mlp") == ("mlp", "data")
    assert chosen("user=my.py", "data=synthetic") == ("model", "synthetic")
    for text in ("def model(spec): ...\n", "from beside import net as model\n"):
        (here / "beside.py").write_text("def net(spec): ...\n")
        (here / "half.py").write_text(text)
        assert chosen("user=half.py") == ("model", "mnist_10k")
    (here / "mine" / "experiment").mkdir(parents=True)
    (here / "mine/experiment/one.yaml").write_text("# @package _global_\nuser: my.py\n")
    text = "# @package _global_\ndefaults:\n  - override /model: mlp\nuser: my.py\n"
    (here / "mine/experiment/two.yaml").write_text(text)
    assert chosen("experiment=one", config_dir="mine") == ("model", "data")
    assert chosen("experiment=two", config_dir="mine") == ("mlp", "data")
    configs = []
    monkeypatch.setattr("sys.argv", ["trainer", "--multirun", "user=my.py", "model.options.width=3,4"])
    with pytest.raises(SystemExit, match="^0$"):
        compose.run(lambda given: configs.append(given.config) or 0, compose.as_composed)
    assert [one.model.options["width"] for one in configs] == [3, 4]


def test_a_null_default_takes_a_value_of_any_type(here):
    (here / "my.py").write_text(USER_FILE)
    assert load(["user=my.py", "model=tiny", "model.options.note=[1,a]"]).model.options["note"] == [1, "a"]


def test_the_users_yaml_file_may_name_the_users_function(here):
    (here / "my.py").write_text(USER_FILE)
    (here / "mine" / "model").mkdir(parents=True)
    (here / "mine" / "model" / "big.yaml").write_text("name: tiny\noptions: {width: 512}\n")
    config = load(["user=my.py", "model=big", "+model.options.depth=9"], config_dir="mine")
    assert (config.model.name, config.model.options) == ("tiny", {"width": 512, "depth": 9})


@pytest.mark.slow
def test_an_experiment_file_may_name_the_users_python_file(here, monkeypatch):
    for name in ("my", "other"):
        (here / f"{name}.py").write_text(USER_FILE.replace("tiny", f"{name}_tiny"))
        (here / "mine" / "experiment").mkdir(parents=True, exist_ok=True)
        text = f"# @package _global_\ndefaults:\n  - override /model: {name}_tiny\nuser: {name}.py\n"
        (here / "mine" / "experiment" / f"{name}.yaml").write_text(text)
    config = load(["experiment=my", "data=blobs", "model.options.width=64"], config_dir="mine")
    assert (config.user, config.model.name, config.data.name) == ("my.py", "my_tiny", "blobs")
    assert config.model.options["width"] == 64
    assert load(["experiment=my", "user=other.py", "model=other_tiny"], config_dir="mine").user == "other.py"
    with pytest.raises(ConfigError, match=r"^user=gone\.py: cannot be read"):
        load(["experiment=my", "user=gone.py"], config_dir="mine")
    configs = []

    def main(config):
        configs.append(config)
        return 0

    assert run(monkeypatch, "--config-dir=mine", "-m", "experiment=my,other", "data=blobs", main=main) == 0
    assert [(config.user, config.model.name) for config in configs] == [
        ("my.py", "my_tiny"),
        ("other.py", "other_tiny"),
    ]


def test_reading_a_python_file_lists_public_functions_with_literal_defaults(tmp_path):
    (tmp_path / "my.py").write_text(USER_FILE)
    assert user_file.functions(tmp_path / "my.py") == {
        "tiny": {"depth": 2, "width": 32, "rate": 0.001, "sizes": [1, 2], "note": None},
        "blobs": {"seed": 0},
        "needs": {"width": "???"},
    }


def test_loading_a_python_file_runs_it_with_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "value_of_tiny.py").write_text("VALUE = 5\n")
    (tmp_path / "my_file.py").write_text("import value_of_tiny\n\ndef tiny():\n    return value_of_tiny.VALUE\n")
    assert user_file.load(tmp_path / "my_file.py").tiny() == 5


def test_main_gets_the_config_and_its_code_is_the_exit_code(here, monkeypatch):
    runs = []

    def main(config):
        runs.append((config.cluster.name, config.train.steps))
        return 7

    assert run(monkeypatch, "cluster=2ps4w", "train.steps=5", main=main) == 7
    assert runs == [("2ps4w", 5)]
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_multirun_runs_every_combination_and_leaves_no_file(here, monkeypatch):
    runs = []

    def main(config):
        runs.append((config.optimizer.name.value, config.train.steps))
        return 0

    assert run(monkeypatch, "--multirun", "optimizer=sgd,adam", "train.steps=1,2", main=main) == 0
    assert runs == [("sgd", 1), ("sgd", 2), ("adam", 1), ("adam", 2)]
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_multirun_goes_on_after_a_failed_run_and_exits_with_its_code(here, monkeypatch):
    runs = []

    def main(config):
        runs.append(config.seed)
        return {1: 65, 2: 70}.get(config.seed, 0)

    assert run(monkeypatch, "-m", "seed=0,1,2,3", main=main) == 65
    assert runs == [0, 1, 2, 3]


@pytest.mark.slow
def test_multirun_starts_nothing_if_the_config_of_one_run_is_bad(here, monkeypatch, capsys, snapshot):
    def main(config):
        raise AssertionError("a run was started")

    assert run(monkeypatch, "-m", "train.steps=5,-1", main=main) == 2
    assert capsys.readouterr().err == snapshot


@pytest.mark.slow
def test_runs_of_a_multirun_may_not_share_a_run_directory(here, monkeypatch, capsys, snapshot):
    assert run(monkeypatch, "-m", "run=a", "seed=0,1") == 2
    assert capsys.readouterr().err == snapshot
    assert run(monkeypatch, "-m", "run=a,b") == 0


def test_cfg_prints_the_composed_config_and_runs_nothing(here, monkeypatch, capsys):
    def main(config):
        raise AssertionError("a run was started")

    assert run(monkeypatch, "--cfg", "job", "--package", "train", "train.steps=9", main=main) == 0
    assert "steps: 9" in capsys.readouterr().out


def test_overrides_may_be_on_both_sides_of_a_flag(here, monkeypatch, capsys):
    assert run(monkeypatch, "seed=3", "--cfg", "job", "train.steps=9", "--package", "train", "train.batch_size=6") == 0
    assert capsys.readouterr().out.startswith("# @package train\nsteps: 9\nbatch_size: 6\n")


def test_info_shows_that_generated_configs_come_last(here, monkeypatch, capsys):
    assert run(monkeypatch, "--info", "searchpath") == 0
    path = capsys.readouterr().out
    assert path.index("file://") < path.index("generated://")


@pytest.mark.slow
def test_help_has_examples_groups_and_keys(here, monkeypatch, capsys):
    assert run(monkeypatch, "--help") == 0
    page = capsys.readouterr().out
    for part in (
        "python -m trainer plan cluster=2ps4w",
        "cluster takes any size [<n>ps]<m>w",
        "model: cnn, ctr, mlp, oracle, resnet20",
        "train.steps=300",
        "user=my_models.py",
        "--multirun",
        "2 config",
    ):
        assert part in page
    groups = page.partition("Groups")[2].partition("cluster takes")[0]  # as long as there are files in them
    assert max(map(len, page.replace(groups, "").splitlines())) <= 120


def test_every_key_of_the_help_page_exists():
    assert [key for key in help_page.KEYS if keys.hint(key.split(".")) is None] == []


@pytest.mark.parametrize(
    ("typed", "candidates"),
    [
        ("cluster=", ["cluster=2ps4w", "cluster=4w", "cluster=local"]),
        ("mode=p", ["mode=plan", "mode=predict"]),
        ("plan clu", ["cluster.", "cluster="]),
        ("se", ["security.", "seed=", "selftest"]),
        ("strategy=a", ["strategy=all_reduce", "strategy=async", "strategy=auto"]),
        ("strategy.name=a", ["strategy.name=all_reduce", "strategy.name=async", "strategy.name=auto"]),
        ("train.on_not_finite=", [f"train.on_not_finite={name}" for name in ("rollback", "skip", "stop")]),
        ("train.jit=", ["train.jit=false", "train.jit=true"]),
        ("train.s", ["train.steps="]),
        ("train.steps=", ["train.steps=300"]),
        ("cluster=3ps5w model=mlp model.options.w", ["model.options.width="]),
        ("user=mi", ["user=mine.py"]),
        ("user=mine.py model=t", ["model=tiny"]),
        ("user=mine.py model=tiny model.options.w", ["model.options.width="]),
        ("plan ru", ["run=", "runs.", "runs/"]),
        ("resume=", ["resume=auto", "resume=never", "resume=runs/first/"]),
        ("--c", ["--cfg", "--config-dir"]),
    ],
)
def test_tab_completion_offers_what_can_be_typed(here, typed, candidates):
    (here / "runs" / "first").mkdir(parents=True)
    (here / "mine.py").write_text(USER_FILE)
    assert completion.candidates(f"trainer {typed}") == candidates


@pytest.mark.parametrize(("shell", "between"), [("bash", " "), ("zsh", " "), ("fish", "\n")])
def test_the_scripts_of_shells_ask_for_candidates(here, monkeypatch, capsys, shell, between):
    monkeypatch.setenv("COMP_LINE", "trainer mode=c")
    assert run(monkeypatch, "-sc", f"query={shell}") == 0
    assert (
        capsys.readouterr().out
        == f"{between.join(['mode=chaos', 'mode=check', 'mode=clean', 'mode=console', 'mode=continue'])}\n"
    )
    assert run(monkeypatch, "-sc", "install=bash") == 0
    assert "complete -o nospace" in capsys.readouterr().out


@pytest.mark.slow
def test_a_first_word_that_is_a_mode_is_that_mode(here, monkeypatch):
    for arguments in (["plan", "cluster=2ps4w"], ["--config-dir=.", "plan"], ["plan", "mode=plan"]):
        modes = []
        assert (
            run(
                monkeypatch,
                *arguments,
                complete=lambda typed, config, modes=modes: modes.append(typed.mode) or (config, []),
            )
            == 0
        )
        assert modes == [Mode.plan]


@pytest.mark.slow
@pytest.mark.parametrize("typed", ["plan mode=train", "trian", "Plan cluster=2ps4w", "cluster=2ps4w plan", "async"])
def test_a_first_word_that_is_no_mode_is_refused(here, monkeypatch, capsys, snapshot, typed):
    assert run(monkeypatch, *typed.split()) == 2
    assert capsys.readouterr().err == snapshot


def test_the_version_is_the_trainers_own(here, monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    installed = [f"{name} {metadata.version(of)}" for name, of in (("Keras", "keras"), ("Hydra", "hydra-core"))]
    out = capsys.readouterr().out
    assert re.fullmatch(rf"trainer {re.escape(trainer.__version__)} \(Python \S+, TensorFlow 2\.\S+, .*\)\n", out)
    assert ", ".join(installed) in out


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["plan", "cluster=16ps64w"]], ids=" ".join)
@pytest.mark.slow
def test_a_page_that_nobody_reads_to_its_end_ends_quietly(here, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "trainer", *arguments]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, "")


def test_hydras_error_setting_does_not_leak_into_the_run(here, monkeypatch):
    runs = []
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    run(monkeypatch, main=lambda config: runs.append(os.environ.get("HYDRA_FULL_ERROR")) or 0)
    assert runs == [None]


def test_the_config_of_a_single_run_is_composed_once(here, monkeypatch):
    composed = []
    original = ConfigLoaderImpl.load_configuration

    def count(*arguments, **options):
        composed.append(arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", count)
    assert run(monkeypatch, "cluster=2ps4w") == 0
    assert len(composed) == 1


@pytest.mark.slow
def test_a_file_may_ask_for_a_multirun(here, monkeypatch):
    shutil.copytree(sources.conf_dir(), here / "conf")
    sweep = "hydra: {mode: MULTIRUN, sweeper: {params: {train.steps: '1,2'}}}"
    (here / "conf" / "experiment").mkdir(exist_ok=True)
    (here / "conf" / "experiment" / "sweep.yaml").write_text(f"# @package _global_\n{sweep}\n")
    monkeypatch.setattr(sources, "conf_dir", lambda: here / "conf")
    steps = []
    assert run(monkeypatch, "experiment=sweep", main=lambda config: steps.append(config.train.steps) or 0) == 0
    assert steps == [1, 2]


def test_composing_imports_no_tensorflow():
    program = (
        "import sys; from trainer.config import compose; compose.load(['cluster=2ps4w']);"
        "print([name for name in ('tensorflow', 'keras', 'numpy') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True) == "[]\n"


def test_an_installed_package_finds_its_own_conf(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "*.gz", "*.npz")
    shutil.copytree(ROOT / "trainer", tmp_path / "trainer", ignore=ignored)
    shutil.copytree(ROOT / "conf", tmp_path / "trainer" / "conf")
    printed = "sources.conf_dir(), load(['cluster=4w']).config.cluster.worker"
    program = f"from trainer.config.compose import load, sources; print({printed})"
    out = subprocess.check_output([sys.executable, "-c", program], cwd=tmp_path, text=True)
    assert out == f"{tmp_path / 'trainer' / 'conf'} 4\n"


def test_a_config_knows_which_keys_of_the_optimizer_were_given(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /optimizer: adam\noptimizer: {ema: 0.9}\n"
    )
    typed = [[], ["optimizer=adam"], ["optimizer.learning_rate=0.001", "optimizer.schedule.name=cosine"]]
    assert [load(words).given for words in typed] == [(), ("name",), ("learning_rate", "schedule")]
    given = load(["experiment=mine", "optimizer.momentum=0"], config_dir=str(tmp_path)).given
    assert given == ("ema", "momentum", "name")
