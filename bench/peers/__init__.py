"""Other ways to train, each a script as users would write it: `python -m bench.peers.NAME`.

A script that is started without `--task` starts itself once for each task of its cluster. All build the same model and
read the same data as our runs, with tf.data, and count their steps in a file.
"""
