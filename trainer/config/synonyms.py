"""Maps option names of other programs to the keys of this config."""

from collections.abc import Mapping
from typing import Any

from trainer.config.cluster_size import ClusterSize

# For each word: a key, which takes the value that was typed, or a complete setting; {} stands for the value.
MEANT = {
    "metrics": "model.metrics",
    "epoch epochs num_epochs n_epochs nb_epoch max_epochs num_train_epochs train_epochs": "train.epochs",
    "max_steps num_steps total_steps train_steps iterations num_iterations max_iter": "train.steps",
    "bs batch batchsize global_batch_size train_batch_size": "train.batch_size",
    "eval_batch_size": "evaluate.batch_size",
    "optim opt": "optimizer",
    "arch net network model_name": "model",
    "dataset data_set data_name": "data",
    "data_dir data_path dataset_path": "data.options.path",
    "dropout": "model.options.dropout",
    "out out_dir output output_dir log_dir logdir save_dir model_dir checkpoint_dir job_dir run_dir work_dir": "run",
    "ckpt ckpt_path checkpoint_path resume_from resume_from_checkpoint restore": "resume",
    "pretrained weights init_weights init_checkpoint": "model.init",
    "grad_clip clip_grad clip_grad_norm gradient_clip_val max_grad_norm global_clipnorm": "optimizer.clip_norm",
    "grad_accum accumulate_grad_batches gradient_accumulation_steps": "train.accumulate",
    "early_stopping": "evaluate.patience",
    "save_every save_freq save_steps checkpoint_every": "checkpoint.every",
    "log_every log_interval log_steps logging_steps print_freq": "history.every",
    "eval_every eval_interval eval_steps validation_freq": "evaluate.every",
    "jit_compile xla": "train.jit=true",
    "fp16": "train.precision=mixed_float16",
    "bf16": "train.precision=mixed_bfloat16",
    "random_seed random_state manual_seed": "seed",
    "v verbose": "history.lines=true",
    "q quiet silent": "> run.log",
    "gpu": "device=gpu",
    "dry_run dryrun": "trainer plan",
    "c conf config config_file cfg": "{}",
    "b": "train.batch_size",
    "e": "train.epochs",
    "o": "run",
}
KEY_OF = {word: meant for words, meant in MEANT.items() for word in words.split()}
WORKERS = ("workers", "worker", "num_workers", "n_workers", "nodes", "num_nodes", "nnodes", "world_size", "replicas")
SERVERS = ("ps", "num_ps", "parameter_servers")
PRECISIONS = ("amp", "mixed_precision", "precision", "dtype")
COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("fit", "start"), "train"),
    **dict.fromkeys(("eval", "test", "validate", "score"), "evaluate"),
    **dict.fromkeys(("infer", "inference", "forecast"), "predict"),
    **dict.fromkeys(("list", "ls"), "runs"),
    **dict.fromkeys(("ui", "web", "dashboard"), "console"),
    **dict.fromkeys(("help", "version"), ""),  # flags
}


def meant(word: str, value: Any) -> str | None:
    """Returns the key or the setting that an unknown word stands for, or None."""
    word = word.lower().replace("-", "_")
    number = int(value) if str(value).isdecimal() else 0
    if word in WORKERS:
        return f"cluster={number or 4}w"
    if word in SERVERS:
        return f"cluster={ClusterSize(number or 2, 2 * (number or 2), 0)}"
    if word in ("gpus", "num_gpus", "n_gpus") and 0 < number <= 64:
        return f"device.gpus={{worker:[{','.join(map(str, range(number)))}]}}"
    if word in PRECISIONS:
        return f"train.precision=mixed_{'bfloat16' if 'b' in str(value) else 'float16'}"
    found = KEY_OF.get(word)
    if found == "{}":
        return str(value) if str(value).endswith((".yaml", ".yml")) else "mine.yaml"
    return found
