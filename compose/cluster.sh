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
  local name=${1:-cpu} arguments=() found base=python:3.12-slim-bookworm network=()
  [[ $name != test ]] || name=dev
  read -ra arguments <<<"${BUILD_ARGS:-}"
  for found in "${arguments[@]}"; do
    case $found in
      BASE_IMAGE=*) base=${found#BASE_IMAGE=} ;;
      host) network=(--network host) ;;
    esac
  done
  mkdir -p "$here/wheels/$name"
  docker run --rm "${network[@]}" --user "$(id -u):$(id -g)" --env HOME=/tmp --volume "$here:$here" --workdir "$here" \
    "$base" python3 -m pip download --quiet --require-hashes --dest "wheels/$name" -r "requirements/$name.txt"
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
  choose_directory "$@"
  choose_mounts
  local made=0 parent
  parent=$(dirname "$run")
  [[ -d $parent ]] || { mkdir -p "$parent" && chown "$caller" "$parent"; }
  [[ -d $run ]] || made=1
  mkdir -p "$run"
  run=$(cd "$run" && pwd)
  if [[ $(docker ps --quiet --filter "label=trainer.run=$run") ]]; then
    fail 73 "$run: containers of a run are still there, whose launcher may be gone; type python -m trainer mode=clean"
  fi
  if [[ -e $run/lock ]] && ! flock --nonblock "$run/lock" true; then fail 73 "$run is in use"; fi
  own "$caller"
  local code=0 # it reads as the caller does, and gives what it wrote to whom the tasks are
  docker run --rm --init --network none --read-only --tmpfs /tmp --cap-drop ALL --cap-add CHOWN \
    --security-opt no-new-privileges --user "$caller" "${mounts[@]}" --volume "$run:$run" \
    trainer:cpu mode=render "${overrides[@]}" "run='$run'" >/dev/null || code=$?
  own "$caller"
  if ((code)); then
    ((made)) && rmdir "$run" 2>/dev/null || true
    exit "$code"
  fi
  if grep -q 'image: trainer:gpu' "$run/compose.yaml"; then image gpu; fi
  sed -n '1s/^# //p' "$run/compose.yaml"
  echo "$run"
}

# Sets run, from run=PATH or to a new directory under runs/, and overrides to the others.
choose_directory() {
  run='' overrides=()
  local cluster=local override
  for override; do
    case $override in
      run=*) run=${override#run=} ;;
      cluster=*) cluster=${override#cluster=} overrides+=("$override") ;;
      *) overrides+=("$override") ;;
    esac
  done
  [[ $run ]] || run=runs/run-$cluster-$(date +%Y%m%d-%H%M%S)-$(od -An -N2 -tx1 /dev/urandom | tr -d ' ')
}

# Sets mounts to what rendering must see: the files that overrides name, below this directory, and what tasks read.
choose_mounts() {
  mounts=()
  case $PWD in
    / | /tmp | /opt | /usr* | /etc* | /trainer*) ;; # the image has its own
    *) mounts=(--volume "$PWD:$PWD:ro" --workdir "$PWD") ;;
  esac
  local override path listed=()
  for override in "${overrides[@]}"; do
    if [[ $override == container.mounts=* ]]; then
      [[ -z ${DATA:-} ]] || fail 2 "DATA and container.mounts both say what tasks read; give one of them"
      IFS=, read -ra listed <<<"$(tr -d '[]"'\' <<<"${override#*=}")"
    fi
  done
  if [[ ${DATA:-} ]]; then
    listed=("$(realpath --canonicalize-existing -- "$DATA")") || fail 66 "DATA=$DATA is not there"
    overrides+=("container.mounts=['${listed[0]}']")
  fi
  for path in "${listed[@]}"; do
    [[ ! -e $path ]] || mounts+=(--volume "$path:$path:ro")
  done
}

# Starts the containers of a run directory, shows what they say, waits for their ends and removes them.
attend() {
  run=$1
  exec 9>>"$run/lock"
  if ! flock --nonblock 9; then fail 73 "$run is in use"; fi
  own "$user"
  stops=0 stop_code=0 heard=-9 stopping='' failed='' code=0
  trap 'hear 130' INT
  trap 'hear 143' TERM
  trap 'exec >/dev/null 2>&1; hear 129' HUP # the terminal is gone
  trap clean EXIT
  project=$(sed -n 's/^name: //p' "$run/compose.yaml")
  compose down --timeout 0 >/dev/null 2>&1 # what is left of an earlier one
  # In sessions of their own, so that Ctrl-C does not reach them; without the lock, which is this process's.
  exec {ends}< <(exec 9>&- setsid docker events --since "$(date +%s)" \
    --filter "label=com.docker.compose.project=$project" --filter label=trainer.task --filter event=die \
    --format '{{.Actor.Attributes.exitCode}} {{index .Actor.Attributes "com.docker.compose.service"}}')
  events=$!
  compose up --detach --quiet-pull 2>"$run/compose.log" || failed=compose code=69
  if [[ $failed ]]; then
    ((stops)) && code=$stop_code
    ((stops)) || tail -n 3 "$run/compose.log" >&2
    exit "$code"
  fi
  setsid docker compose --project-directory "$run" logs --follow 2>&1 9>&- | readable 9>&- &
  logs=$!
  wait_for_ends
  wait "$logs" 2>/dev/null || true
  keep_logs
  report
  exit "$code"
}

# Names tasks as everywhere else, and leaves out what TensorFlow says at every start and end.
readable() {
  sed -u -e '/absl::InitializeLog/d; /oneDNN custom operations are on/d' \
    -e '/Cleanup partition error/d; /CleanupGraph:/d; /:UNKNOWN:Error received from peer/d' \
    -e 's/^\r\?\x1b\[[0-9;]*K//; s/^\([a-z]*\)-\([0-9]*\)-1 /\1:\2 /'
}

# Sets failed and code to the first service that failed; ends the others then, and stops them when asked to.
wait_for_ends() {
  local total ended=0 told service heard_of
  total=$(compose config --services | wc -l)
  while ((ended < total)); do
    obey
    heard_of=0
    read -r -t 0.5 -u "$ends" told service || heard_of=$?
    if ((heard_of > 128)); then continue; fi # nothing new
    if ((heard_of)); then fail 69 "the Docker engine does not answer any more"; fi
    ended=$((ended + 1))
    if ((told && told != 143)) && [[ ! $failed ]] && ! ((stops && told == 137)); then
      failed=$service code=$told
      end_all
    fi
    ((told != 143 || code)) || code=143
  done
  if ((stops)) && [[ ! $failed ]]; then code=$stop_code; fi
}

# Takes a signal that is passed on twice, by make and by the terminal, for one.
hear() {
  if ((SECONDS - heard > 1)); then stops=$((stops + 1)); fi
  if ((stops == 1)); then stop_code=$1; fi
  heard=$SECONDS
}

# The first Ctrl-C asks the tasks to save and leave, the second ends them.
obey() {
  if ((stops)) && [[ ! $stopping ]]; then
    stopping=gently
    echo "stops after this step and saves (once more: stops at once)"
    setsid docker compose --project-directory "$run" stop >/dev/null 2>&1 9>&- &
  elif ((stops > 1)) && [[ $stopping == gently ]]; then
    stopping=now
    end_all
  fi
}

end_all() { setsid --wait docker compose --project-directory "$run" kill >/dev/null 2>&1 9>&- || true; }

report() {
  if [[ $failed ]]; then
    local why="exit code $code"
    [[ $(docker inspect -f '{{.State.OOMKilled}}' "$project-$failed-1" 2>/dev/null) != true ]] || why+=", out of memory"
    echo "$failed failed first, $why; the end of $run/logs/$failed.log:"
    docker logs "$project-$failed-1" 2>&1 | readable | tail -n 20 | sed 's/^/    /' || true
  elif ((code)); then
    echo "stopped; to continue, type the same command with run=$run"
  else
    echo "done: $run"
  fi
}

keep_logs() {
  local service
  mkdir -p "$run/logs"
  for service in $(compose config --services); do
    docker logs "$project-$service-1" >>"$run/logs/$service.log" 2>&1 || true
  done
}

clean() {
  trap '' INT TERM HUP
  kill "$events" 2>/dev/null || true
  compose --profile '*' down --volumes --timeout 0 >/dev/null 2>&1 || echo "docker compose down failed for $run" >&2
  rm -f "$run/lock" "$run/compose.log"
  own "$caller"
}

ps() {
  docker ps --all --filter label=trainer.task \
    --format 'table {{.Label "com.docker.compose.project"}}\t{{.Label "trainer.task"}}\t{{.Status}}'
}

logs() {
  the_run
  docker compose --project-directory "$run" logs --follow | readable
}

down() {
  the_run
  docker compose --project-directory "$run" stop # saves; who attends to it removes it
  exec 9>>"$run/lock"
  if ! flock --timeout 30 9; then fail 73 "$run is in use, by a run that is no cluster of containers"; fi
  compose --profile '*' down --volumes
  rm -f "$run/lock"
}

tensorboard() {
  the_run
  image tensorboard
  docker compose --project-directory "$run" --profile tensorboard up --detach tensorboard
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
  export TRAINER_UID=${user%:*} TRAINER_GID=${user#*:}
}

compose() { TRAINER_UID=${user%:*} TRAINER_GID=${user#*:} docker compose --project-directory "$run" "$@"; }

# Root gives the run directory to the tasks' user, and takes it back with what they wrote.
own() { if [[ $EUID == 0 ]]; then chown -R "$1" "$run"; fi; }

fail() {
  echo "cluster: $2" >&2
  exit "$1"
}

main "$@"
