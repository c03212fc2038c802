#!/usr/bin/env bash
# Clusters as containers, on a host that has Docker with Compose and nothing else: what make's cluster-* targets call.
#
#   cluster.sh image [TARGET]         build the image trainer:TARGET (cpu), with BUILD_ARGS
#   cluster.sh up OVERRIDES...        run a cluster in the foreground; returns 0, or the code of what failed first
#   cluster.sh start OVERRIDES...     the same in the background
#   cluster.sh ps | logs | down | tensorboard     of RUN, a run directory, or of the only cluster there is
#
# DATA: a file or directory that the run reads, seen by all tasks under the same path.
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
caller=$(id -u):$(id -g)
if [[ $EUID == 0 ]]; then caller=${SUDO_UID:-0}:${SUDO_GID:-0}; fi
user=$caller
[[ $user != 0:* ]] || user=10001:10001 # tasks are never root
export TRAINER_UID=${user%:*} TRAINER_GID=${user#*:}

main() {
  case ${1:-} in
    image | wheels | up | start | attend | ps | logs | down | tensorboard) "$@" ;;
    *)
      sed -n '2,9s/^# \?//p' "$0"
      exit 2
      ;;
  esac
}

image() {
  local target=${1:-cpu} quiet=() alone=()
  if command -v flock >/dev/null; then alone=(flock "$here/Dockerfile"); fi # builds side by side confuse BuildKit
  if docker image inspect "trainer:$target" >/dev/null 2>&1; then quiet=(--quiet); fi # most of it is there already
  # shellcheck disable=SC2086 # several arguments
  if "${alone[@]}" docker build "${quiet[@]}" ${BUILD_ARGS:-} --target "$target" --tag "trainer:$target" "$here" \
    >/dev/null; then
    return
  fi
  ((${#quiet[@]})) || fail 69 "trainer:$target cannot be built: another base image, or --network host? Give BUILD_ARGS"
  echo "cluster: trainer:$target cannot be built anew (above), so the one that is there is used, as it is" >&2
}

# Fetches what the image of a target installs into wheels/, for the Python of the base image.
wheels() {
  local name=${1:-cpu} network=bridge base
  [[ $name != test ]] || name=dev
  [[ ${BUILD_ARGS:-} != *"--network host"* ]] || network=host
  # shellcheck disable=SC2086 # several arguments
  base=$(docker build --quiet ${BUILD_ARGS:-} --target build "$here")
  mkdir -p "$here/wheels/$name"
  docker run --rm --network "$network" --user "$(id -u):$(id -g)" --env HOME=/tmp \
    --volume "$here/wheels/$name:/wheels" "$base" \
    python3 -m pip download --quiet --require-hashes --dest /wheels -r "/build/$name.txt"
}

up() {
  prepare "$@"
  attend "$run"
}

start() {
  prepare "$@"
  setsid "$here/compose/cluster.sh" attend "$run" >"$run/cluster.log" 2>&1 </dev/null &
  echo "$run: runs in the background; make cluster-logs RUN=$run shows how it goes"
}

# Makes the image and the run directory, with all that the tasks need in it.
prepare() {
  local tool
  for tool in docker flock setsid; do
    command -v "$tool" >/dev/null || fail 69 "the command $tool is missing; flock and setsid are util-linux's"
  done
  docker compose version >/dev/null || fail 69 "Docker Compose is missing: install the package docker-compose-plugin"
  docker info >/dev/null || fail 69 "no Docker engine answers: sudo systemctl start docker, or is it open to you?"
  image cpu
  parse "$@"
  local is_new=0 code=0 parent
  parent=$(dirname "$run")
  [[ -d $parent ]] || { mkdir -p "$parent" && chown "$caller" "$parent"; }
  if [[ ! -d $run ]]; then mkdir "$run" && is_new=1; fi
  run=$(cd "$run" && pwd)
  if [[ $(docker ps --quiet --filter "label=trainer.run=$run") ]]; then
    fail 73 "$run: containers of a run are still there, whose launcher may be gone; type python -m trainer clean"
  fi
  if [[ -e $run/lock ]] && ! flock --nonblock "$run/lock" true; then fail 73 "$run is in use"; fi
  own "$caller" # it reads what the caller may read
  docker run --rm --init --network none --read-only --tmpfs /tmp --cap-drop ALL --cap-add CHOWN \
    --security-opt no-new-privileges --user "$caller" "${mounts[@]}" --volume "$run:$run" \
    trainer:cpu render "${overrides[@]}" "run='$run'" >/dev/null || code=$?
  own "$caller"
  if ((code)); then
    ((!is_new)) || rmdir "$run" 2>/dev/null || true
    exit "$code"
  fi
  if grep -q 'image: trainer:gpu' "$run/compose.yaml"; then image gpu; fi
  sed -n '1s/^# //p' "$run/compose.yaml"
  echo "$run"
}

# Sets run from run=PATH or to a new directory, overrides to the others, and mounts to what rendering must see: this
# directory, where the files that overrides name are, and what tasks read.
parse() {
  local override cluster=local path listed=()
  run='' overrides=() mounts=()
  for override; do
    case $override in
      run=*) run=${override#run=} && continue ;;
      cluster=*) cluster=${override#cluster=} ;;
      container.mounts=*)
        [[ -z ${DATA:-} ]] || fail 2 "DATA and container.mounts both say what tasks read; give one of them"
        IFS=, read -ra listed <<<"$(tr -d '[]"'\' <<<"${override#*=}")"
        ;;
    esac
    overrides+=("$override")
  done
  [[ $run ]] || run=runs/run-$cluster-$(date +%Y%m%d-%H%M%S)-$(od -An -N2 -tx1 /dev/urandom | tr -d ' ')
  if [[ ${DATA:-} ]]; then
    listed=("$(realpath --canonicalize-existing -- "$DATA")") || fail 66 "DATA=$DATA is not there"
    overrides+=("container.mounts=['${listed[0]}']")
  fi
  case $PWD in
    / | /tmp | /opt | /usr* | /etc* | /trainer*) ;; # the image has its own
    *) mounts=(--volume "$PWD:$PWD:ro" --workdir "$PWD") ;;
  esac
  for path in "${listed[@]}"; do
    [[ ! -e $path ]] || mounts+=(--volume "$path:$path:ro")
  done
}

# Runs the containers of a run directory to their end, and removes them. Compose ends all when one fails, and stops
# them gently at Ctrl-C; here, a cluster that has failed is not waited for, and the first failure is named.
attend() {
  run=$1 up='' stops=0 stop_code=0 heard=-9 code=0
  exec 9>>"$run/lock"
  if ! flock --nonblock 9; then fail 73 "$run is in use"; fi
  own "$user"
  trap 'stop 130' INT
  trap 'stop 143' TERM
  trap 'exec >/dev/null 2>&1; stop 129' HUP # the terminal has closed
  trap clean EXIT
  compose down --timeout 0 >/dev/null 2>&1 # what is left of an earlier run
  exec {output}> >(
    exec 9>&-
    trap '' HUP INT TERM PIPE # Compose must be able to write, even when the terminal has closed
    sed -u 's/\r//g; s/\x1b\[[0-9;]*[A-Za-z]//g' | watch | readable
  )
  local readable=$!
  # In a session of its own, so that Ctrl-C does not reach it too; without the lock, which is this process's.
  setsid docker compose --project-directory "$run" up --abort-on-container-failure --quiet-pull \
    >&"$output" 2>&1 9>&- {output}>&- &
  up=$!
  ((stops == 0)) || kill -TERM "$up"
  while kill -0 "$up" 2>/dev/null; do
    code=0
    wait "$up" || code=$?
  done
  exec {output}>&-
  wait "$readable" || true
  report
  exit "$code"
}

# Passes Compose's output on. Once Compose ends a cluster because a task has failed, kills the others, which would
# wait for that task; 143: somebody has stopped it, and the others save.
watch() {
  local line ended=0
  while IFS= read -r line; do
    case $line in
      *" exited with code "*) ended=${line##* } ;;
      "Aborting on container exit"*) [[ $ended == 143 ]] || compose kill >/dev/null 2>&1 & ;;
    esac
    printf '%s\n' "$line" 2>/dev/null || true
  done
}

# Names tasks as everywhere else, and leaves out what Compose and TensorFlow print at every start and end.
readable() {
  sed -u -e '/absl::InitializeLog/d; /oneDNN custom operations are on/d; /Cleanup partition error/d; /CleanupGraph:/d' \
    -e '/:UNKNOWN:Error received from peer/d; /^ \(Container\|Network\) /d; /^Attaching to /d; /^\(Aborting\|Gracefully\)/d' \
    -e '/^[a-z]*-[0-9]*-1 exited with code/d; /^$/d; s/^\([a-z]*\)-\([0-9]*\)-1 /\1:\2 /'
}

# The first signal asks the tasks to save and leave, the second kills them; one that make passes on again counts once.
stop() {
  if ((SECONDS - heard <= 1)); then return; fi
  heard=$SECONDS stops=$((stops + 1))
  if ((stops == 1)); then
    stop_code=$1
    echo "Stopping: finishing this step and saving a checkpoint. Press Ctrl-C again to stop now."
    [[ ! $up ]] || kill -TERM "$up" 2>/dev/null || true
  else
    compose kill >/dev/null 2>&1 || true
  fi
}

# Writes the logs, names the first failure, and sets code to its exit code.
report() {
  local service first='' failed oom why
  mkdir -p "$run/logs"
  for service in $(compose config --services); do
    compose logs --no-log-prefix --no-color "$service" >>"$run/logs/$service.log" 2>/dev/null || true
  done
  first=$(compose ps --all --quiet | xargs -r docker inspect --format '{{.State.FinishedAt}} {{.State.ExitCode}} {{
    index .Config.Labels "com.docker.compose.service"}} {{.State.OOMKilled}}' | sort |
    awk -v stops="$stops" '
      $1 ~ /^0001/ || $2 == 0 || $2 == 143 || (stops && $2 == 137) { next } # 0001: a container that could not start
      { late = $2 == 69 || $2 == 75; if (!(late in first)) first[late] = $2 " " $3 " " $4 } # a peer was lost: an effect
      END { print (0 in first) ? first[0] : first[1] }') || first='' # the engine does not answer
  if [[ $first ]]; then
    read -r code failed oom <<<"$first"
    why="exit code $code"
    [[ $oom != true ]] || why+=", out of memory"
    echo "$failed failed first, $why; the end of $run/logs/$failed.log:"
    tail -n 20 "$run/logs/$failed.log" | readable | sed 's/^/    /'
  elif ((stops || code == 143)); then
    ((stops == 0)) || code=$stop_code
    echo "Stopped$(sed -n 's/^ "steps": \([0-9]*\),$/ at step \1, checkpoint saved/p' "$run/summary.json" 2>/dev/null)." \
      "To continue: the same command with run=$run"
  elif ((code)); then
    fail 69 "docker compose up failed for $run (above)"
  else
    echo "done: $run"
  fi
}

clean() {
  trap '' INT TERM HUP
  compose --profile '*' down --volumes --timeout 0 >/dev/null 2>&1 || echo "docker compose down failed for $run" >&2
  rm -f "$run/lock"
  own "$caller"
}

ps() {
  docker ps --all --filter label=trainer.task \
    --format 'table {{.Label "com.docker.compose.project"}}\t{{.Label "trainer.task"}}\t{{.Status}}'
}

logs() {
  the_run
  compose logs --follow | readable
}

down() {
  the_run
  compose stop # saves; who attends to it removes it
  exec 9>>"$run/lock"
  if ! flock --timeout 30 9; then fail 73 "$run is in use, by a run that is no cluster of containers"; fi
  compose --profile '*' down --volumes
  rm -f "$run/lock"
}

tensorboard() {
  the_run
  image tensorboard
  compose --profile tensorboard up --detach tensorboard
  echo "http://127.0.0.1:${TENSORBOARD_PORT:-6006}"
}

# Sets run to RUN, or to the only cluster that is up.
the_run() {
  local runs
  runs=$(docker ps --all --filter label=trainer.task --format '{{.Label "com.docker.compose.project.working_dir"}}' |
    sed '/^$/d' | sort -u)
  run=${RUN:-$runs}
  [[ $run ]] || fail 2 "no cluster is up"
  [[ $run != *$'\n'* ]] || fail 2 "several clusters are up; name one with RUN="$'\n'"$runs"
  run=$(cd "$run" && pwd) || exit 2
}

compose() { docker compose --project-directory "$run" "$@"; }

# Root gives the run directory to the tasks' user, and takes it back with what they wrote.
own() { if [[ $EUID == 0 ]]; then chown -R "$1" "$run"; fi; }

fail() {
  echo "cluster: $2" >&2
  exit "$1"
}

main "$@"
