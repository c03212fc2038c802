"""Programs that use an exported model and know nothing of this project."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

# Loads a SavedModel, and a LiteRT model if there is one, in a process that knows nothing of this project.
CLIENT = """
import json, os, sys
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
import numpy as np, tensorflow as tf
folder, file, answer = sys.argv[1:]
assert "trainer" not in sys.modules
inputs = dict(np.load(file))
served = tf.saved_model.load(folder + "/saved_model/1").signatures["serving_default"]
text = {name for name, value in inputs.items() if value.dtype.kind == "U"}
given = {name: tf.constant(value.astype(object) if name in text else value) for name, value in inputs.items()}
results = {"saved_model": served(**given)}
if os.path.exists(folder + "/model.tflite"):
    interpreter = tf.lite.Interpreter(folder + "/model.tflite")
    results["litert"] = interpreter.get_signature_runner("serving_default")(**inputs)
print(json.dumps({kind: {name: np.asarray(one).astype(str if np.asarray(one).dtype.kind in "OS" else float).tolist()
                         for name, one in found.items()} for kind, found in results.items()}), file=open(answer, "w"))
"""


def served(scratch: Path, folder: Path, **inputs: Any) -> dict[str, dict[str, Any]]:
    """What another process gets for these inputs from each format that is in a folder, by name of the output."""
    np.savez(scratch / "inputs.npz", **inputs)
    files = [str(folder), str(scratch / "inputs.npz"), str(scratch / "answer")]
    ended = subprocess.run([sys.executable, "-I", "-c", CLIENT, *files], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads((scratch / "answer").read_text())
