"""Represents a shard as one flat vector: its layout in tensors, on the wire and in shared memory."""
