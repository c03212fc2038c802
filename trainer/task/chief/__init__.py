"""What worker:0 does beside training: checkpoints, summaries, evaluation, export."""
