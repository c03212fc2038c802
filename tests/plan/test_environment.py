"""Environment variables of tasks."""

from trainer.plan.environment import HASH_SEED, QUIET, for_tasks

CHOICE = "TF_ENABLE_ONEDNN_OPTS"


def test_tasks_use_onednn_unless_the_user_says_otherwise():
    assert for_tasks({}) == QUIET | {CHOICE: "1", HASH_SEED: "0"}
    assert for_tasks({CHOICE: "0", "HOME": "/"}) == QUIET | {CHOICE: "0", HASH_SEED: "0"}


def test_sets_have_one_order_in_all_tasks():
    assert [for_tasks({HASH_SEED: value})[HASH_SEED] for value in ("", "random", "0", "7")] == ["0", "0", "0", "7"]


def test_what_would_hang_or_slow_a_task_is_not_the_user_s_to_choose():
    assert for_tasks(dict.fromkeys(QUIET, "mine")) == for_tasks({})
