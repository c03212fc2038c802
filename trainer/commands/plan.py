"""trainer plan: shows who would run where, and starts nothing."""

from trainer.config.schema import Launch, RunConfig
from trainer.config.typed import Mode
from trainer.faults import exit_codes
from trainer.launch import planning, progress
from trainer.launch.processes import isolation
from trainer.storage import resume

ISOLATED = "isolated: no other program can reach the network of the tasks"


def run(config: RunConfig, write_to: str | None) -> int:
    """Prints the plan; writes it where `plan.write_to` says."""
    from trainer.plan import page

    resume.check_exists(config.resume)
    with progress.note(planning.PLANNING) as note:
        config, made = planning.make(config, waits=note.runs, mode=Mode.plan)
    not_isolated = isolation.why_not(config)
    page.show(made)
    if config.launch.name is Launch.local:
        print(f"not isolated: {not_isolated}" if not_isolated else ISOLATED)
    if write_to is not None:
        page.write_json(made, write_to)
    return exit_codes.OK
