"""Environment variables of every task's process, set before it imports TensorFlow."""

from collections.abc import Mapping, Sequence

QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "2",  # warnings of every task about the same CPU flags
    "grpc_proxy": "",  # with http_proxy set, TensorFlow's gRPC would hang
    "TF_GRPC_WORKER_CACHE_QUEUES": "4",  # threads; 64 by default
    "OPENBLAS_NUM_THREADS": "1",  # numpy makes its threads at import, and they do not survive a fork
    # Vectors of parameters come and go at each step. By default such memory goes back to the kernel, which then clears
    # every page of it again, which takes a good part of a step. So TensorFlow gets the allocator that it has for GPUs,
    # whose limit would be 64 GiB, and glibc keeps what is freed; it reads its variables at the start of a process.
    "TF_CPU_ALLOCATOR_USE_BFC": "true",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(2**24),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),  # bytes; what is smaller comes from memory that is not given back
    "MALLOC_TRIM_THRESHOLD_": str(2**30),  # bytes that may be free before some are given back
}

# A user may set these otherwise. TensorFlow itself takes the kernels of oneDNN only where a processor has instructions
# for neural networks, such as AVX-512 VNNI; with AVX2 alone they are 1.1 to 1.8 times as fast as its others.
DEFAULTS = {"TF_ENABLE_ONEDNN_OPTS": "1"}

# Python orders a set of strings by a hash that differs between processes, unless this is a number. It is
# the same for all seeds of runs: labels that are numbered in the order of a set must not change when the seed does.
HASH_SEED = "PYTHONHASHSEED"

CONTROL = "TRAINER_CONTROL"  # "host:port" of the task's status page, for a health check
# Set where a task must stop by itself if the launcher dies: the path of a Unix socket where the page is served too, for
# a launcher on another network; empty: the launcher reads it at the task's address.
LAUNCHER = "TRAINER_LAUNCHER"
# Set where a launcher reads the exit code. A task that has finished then exits with FINISHED: if it exits with 0, the
# user's code has ended it.
SUPERVISED = "TRAINER_SUPERVISED"
FINISHED = 80
REPORTS_PROGRESS = "TRAINER_REPORTS_PROGRESS"  # set where no launcher shows the progress: the chief does, in its log
LINKS = "TRAINER_LINKS"  # JSON {task: {"address": ..., "control": ...}}: where this task reaches others
MEMORY = "TRAINER_MEMORY"  # path of the memory file that the tasks of a machine share, as a task sees it

VISIBLE = "CUDA_VISIBLE_DEVICES"  # a scheduler that shares out GPUs sets it, and so may a user


def for_tasks(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of every task's process, given the environment of the command."""
    hash_seed = environ.get(HASH_SEED, "")
    return (
        QUIET
        | {name: environ.get(name, value) for name, value in DEFAULTS.items()}
        | {HASH_SEED: hash_seed if hash_seed.isdigit() else "0"}
    )


def allotted_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that a scheduler or the user allows this process, by index or UUID; empty: all."""
    listed = [text.strip() for text in environ.get(VISIBLE, "").split(",")]
    return [] if any(not (text[:1].isalnum() and text != "NoDevFiles") for text in listed) else listed


def visible_gpus(gpus: Sequence[int], environ: Mapping[str, str]) -> str:
    """Returns CUDA_VISIBLE_DEVICES for these GPUs, chosen from those that the environment allows."""
    allotted = allotted_gpus(environ)
    numbers = [allotted[gpu] if gpu < len(allotted) else str(gpu) for gpu in gpus] if allotted else map(str, gpus)
    return ",".join(numbers) or "-1"
