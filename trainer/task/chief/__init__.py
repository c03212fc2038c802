"""The duties of worker:0 besides training: checkpoints, summaries, evaluation, export."""
