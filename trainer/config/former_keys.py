"""Former keys: configs of earlier versions are still read, and the command line names the key that replaced one."""

import copy
from collections.abc import Mapping
from typing import Any

FORMER: Mapping[str, str | None] = {  # by old key: the new one; none: nothing has its place
    **{f"summary.{name}": f"history.{name}" for name in ("every", "histogram_every", "lines", "journal")},
    **{f"metrics.{name}": f"prometheus.{name}" for name in ("port", "host", "discovery")},
    "plan.json": "plan.write_to",
    "plan.example_ms": None,
    "plan.link_gbps": None,
}


def successor(key: str, value: Any) -> str | None:
    """Returns the key or section that replaced a former one; empty if nothing did, None if the key is not a former one.

    Args:
        value: of the key; a mapping, if it is a section.
    """
    if key in FORMER:
        return FORMER[key] or ""
    new = [FORMER.get(f"{key}.{name}") for name in value] if isinstance(value, Mapping) else []
    return new[0].rpartition(".")[0] if new and new[0] and all(new) else None


def replaced(config: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns a stored config with its former keys replaced by those of this version, and its `RunConfig.given`."""
    config = copy.deepcopy(config)
    for old, new in FORMER.items():
        section, _, name = old.rpartition(".")
        if isinstance(values := config.get(section), dict) and name in values:
            value = values.pop(name)
            if not values:
                del config[section]
            if new is not None:
                section, _, name = new.rpartition(".")
                config.setdefault(section, {})[name] = value
    optimizer = config.get("optimizer")
    before = optimizer.pop("given", ()) if isinstance(optimizer, dict) else ()  # where earlier versions had it
    return config, tuple(config.pop("given", before))
