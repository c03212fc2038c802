"""`python -m trainer.task RUN JOB INDEX`: runs one task of a prepared run in a container or under a scheduler."""

import gc

from trainer.config.command_line import typed

if __name__ == "__main__":
    gc.disable()  # while TensorFlow is imported and the graph is built
    from trainer.task import process

    process.main(typed()[0], typed()[1], int(typed()[2]))
