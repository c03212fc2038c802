#!/bin/sh
# Installs locked libraries into a new environment, as an image needs them: install.sh NAME DIRECTORY, with NAME.txt.
# What lies in /opt/trainer can be imported from it.
# Wheels that lie in a folder of that name (`make wheels`) are taken in place of the package index.
set -eu
cd "$(dirname "$0")"
name=$1 environment=$2
python3 -m venv "$environment"
set -- --no-cache-dir --disable-pip-version-check --require-hashes -r "$name.txt"
if [ -d "$name" ]; then set -- "$@" --no-index --find-links "$name"; fi
"$environment/bin/pip" install "$@"
# What nobody runs: TensorFlow's headers (300 to 430 MB), libclang (60 MB, no module imports it), pip, numpy's tests.
for packages in "$environment"/lib/python3*/site-packages; do
  echo /opt/trainer >"$packages/trainer.pth"
  rm -rf "$packages"/tensorflow/include "$packages"/numpy/tests "$packages"/numpy/*/tests
done
"$environment/bin/pip" uninstall --yes --quiet libclang pip
