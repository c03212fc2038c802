"""Defines what is trained: model, data, loss, metrics, one replica step."""
