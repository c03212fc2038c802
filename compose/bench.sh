#!/usr/bin/env bash
# Times the image and a cluster of containers: make bench-containers. Nothing else should run on the machine.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
cluster=${CLUSTER:-2ps4w} work=$(mktemp -d)
trap 'rm -rf "$work" "$here/trainer/bench.tmp"' EXIT

seconds() { # that a command takes; its output is shown only if it fails
  local from
  from=$(date +%s.%N)
  "$@" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
  awk -v from="$from" -v to="$(date +%s.%N)" 'BEGIN { printf "%.1f", to - from }'
}

build() {
  # shellcheck disable=SC2086 # several arguments
  docker build ${BUILD_ARGS:-} "$@" --target cpu --tag trainer:cpu "$here"
}

# Seconds from a command to the first step of its run, from the summary of that run.
first_step() {
  local from
  from=$(date +%s.%N)
  (cd "$work" && "$@") >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
  sed -n 's/^ "first_step_at": \([0-9.]*\),$/\1/p' "$work/run/summary.json" |
    awk -v from="$from" '{ printf "%.1f", $1 - from }'
}

# A line of the table: what is measured, and the command that measures it.
row() {
  local what=$1 result
  shift
  result=$("$@")
  printf '%-48s %s s\n' "$what" "$result"
}

row "image, built from nothing" seconds build --no-cache
row "image, nothing changed" seconds build
touch "$here/trainer/bench.tmp"
row "image, a source file changed" seconds build
rm "$here/trainer/bench.tmp"
seconds build >/dev/null
docker image inspect -f '{{.Size}}' trainer:cpu | awk '{ printf "%-48s %.2f GB\n", "image, size", $1 / 1e9 }'
for _ in 1 2 3; do
  row "make cluster-up CLUSTER=$cluster, to the first step" first_step "$here/compose/cluster.sh" up \
    "cluster=$cluster" train.steps=20 run=run
  rm -rf "$work/run"
done
row "docker run trainer:cpu selftest" seconds docker run --rm trainer:cpu selftest
