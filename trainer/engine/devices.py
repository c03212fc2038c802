"""Builds names of devices."""


def device_of(task: str, device: str = "cpu:0") -> str:
    """Returns a device of a task, e.g. "ps:0" -> "/job:ps/task:0/cpu:0"."""
    job, index = task.split(":")
    return f"/job:{job}/task:{index}/{device.lstrip('/')}"
