"""The console that pages are printed on: as wide as the terminal, or as given where there is none."""

from rich.console import Console

PIPE_COLUMNS = 140  # width where there is no terminal


class Output(Console):
    """A rich console that leaves a broken pipe to the command line, which ends as other programs do."""

    def __init__(self, pipe_columns: int = PIPE_COLUMNS) -> None:
        super().__init__(highlight=False)
        if not self.is_terminal:
            self.width = pipe_columns

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
