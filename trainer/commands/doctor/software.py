"""Judges Python and its packages. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from trainer.commands.doctor.finding import Answer, Finding, judged, ok, problem, warning
from trainer.faults.exit_codes import meaning
from trainer.plan.checks.versions import CPU_WHEELS, SUPPORTED, check_versions

GPU_WHEELS = (
    "python -m pip uninstall -y tensorflow-cpu && python -m pip install --require-hashes -r requirements/gpu.txt"
)


def package(name: str, version: str | None, at: str = "") -> Finding:
    """Judges Python or a library other than TensorFlow by the version that is installed, and says where it is."""
    if version is None:
        return problem(name, f"is not installed; supported: {SUPPORTED[name]}", CPU_WHEELS)
    return judged(name, f"{version}{at}", check_versions({name: version}))


def tensorflow(installed: Mapping[str, str], imported: Answer | None) -> list[Finding]:
    """Judges TensorFlow by its distributions' versions, and by the answer of the child process that imported it."""
    if not installed:
        message = f"is not installed; supported: {SUPPORTED['tensorflow']}"
        return [problem("tensorflow", message, f"{CPU_WHEELS}   (with GPUs: requirements/gpu.txt)")]
    named = ", ".join(f"{name} {version}" for name, version in installed.items())
    findings = [judged("tensorflow", named, check_versions(installed))]
    if len(installed) > 1:
        message = f"{named} are both installed and overwrite each other's files"
        remedy = f"python -m pip uninstall -y {' '.join(installed)} && {CPU_WHEELS}"
        findings = [problem("tensorflow", message, remedy)]
    return findings if imported is None else [*findings, _import(imported)]


def _import(imported: Answer) -> Finding:
    try_it = "python -c 'import tensorflow'"
    if imported.code is None:
        message = "importing TensorFlow timed out: the machine is busy, or its disk is slow"
        return warning("import", message, f"time {try_it}")
    facts = read_import(imported)
    if facts is None:
        if imported.code < 0:
            reason = meaning(imported.code) + (", an instruction this processor lacks" if imported.code == -4 else "")
        else:
            reason = imported.last_words()
        return problem("import", f"TensorFlow cannot be imported: {reason}", f"{try_it}; {CPU_WHEELS}")
    if facts["backend"] != "tensorflow":
        message = f"Keras uses the backend {facts['backend']}, but the trainer needs tensorflow"
        return problem("import", message, "export KERAS_BACKEND=tensorflow")
    return ok("import", f"TensorFlow and Keras in {facts['secs']:.1f} s, {'CUDA' if facts['cuda'] else 'CPU'} build")


def read_import(imported: Answer) -> dict[str, Any] | None:
    """Returns the facts that IMPORT in probe.py prints; None if the import failed."""
    try:
        facts = json.loads(imported.out.splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return facts if imported.code == 0 and isinstance(facts, dict) else None
