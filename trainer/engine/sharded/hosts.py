"""The shard host of each strategy."""

from collections.abc import Mapping
from typing import Any

from trainer.engine.sharded.async_host import AsyncHost
from trainer.engine.sharded.backup_host import BackupHost
from trainer.engine.sharded.sync_host import SyncHost

HOSTS: Mapping[str, Any] = {"sync": SyncHost, "async": AsyncHost, "backup": BackupHost}  # each with options of its own
