"""`python -m trainer.task RUN JOB INDEX`: one task of a prepared run, as the process of a container or a scheduler."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # while TensorFlow is imported and the graph is built
    from trainer.task import process

    process.main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
