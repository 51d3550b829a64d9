#!/usr/bin/env bash
# The same multi-turn chats on two servers: plain SGLang, and SGLang with the extension.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
RESULTS="$ROOT/demo-results"
POOL=4096
SESSIONS=16
ROUNDS=4
CONCURRENCY=2
HOST_GB=2
ONLY=
REMOTE=
SETUP=()

usage() {
    cat <<EOF
usage: scripts/demo.sh [options]

Sets everything up (scripts/setup.sh), then serves a real chat model twice on this machine with a device pool that is
too small for the load: once with plain SGLang, once with the extension. Both answer the same chats, whose histories
together are about four times the pool. Prints the two side by side and writes JSON and a plot.
On two cores about 5 minutes, with --remote about 9, and as long as that again for the first set-up.

  --results DIR      where results and server logs go (default: demo-results)
  --pool N           device pool of each server, tokens (default: $POOL)
  --sessions N       number of chats (default: $SESSIONS)
  --rounds N         questions in each chat (default: $ROUNDS)
  --concurrency N    chats that wait for an answer at a time (default: $CONCURRENCY)
  --host-gb N        host memory of the extension, GB (default: $HOST_GB)
  --remote           also show chats that move between two servers which share a store (Mooncake, started for it)
  --only NAME        run one part only: vanilla, hicache-ext or remote; results of the others are kept
  --fresh            set up from scratch
  -h, --help         this text

HICACHE_EXT_VENV and XDG_CACHE_HOME count as in scripts/setup.sh --help.
EOF
}

die() { echo "demo: $*" >&2; exit 1; }

while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --fresh) SETUP+=(--fresh); shift; continue ;;
        --remote) REMOTE=yes; shift; continue ;;
        --results | --pool | --sessions | --rounds | --concurrency | --host-gb | --only)
            [ $# -ge 2 ] || die "$1 needs a value; see scripts/demo.sh --help" ;;
        *) echo "demo: unknown option $1; see scripts/demo.sh --help" >&2; exit 2 ;;
    esac
    case "$1" in
        --results) RESULTS="$2" ;;
        --only) case "$2" in
            vanilla | hicache-ext) ONLY="$2" ;;
            remote) ONLY="$2"; REMOTE=yes ;;
            *) die "--only takes vanilla, hicache-ext or remote" ;;
        esac ;;
        --host-gb) [[ "$2" =~ ^[0-9]+(\.[0-9]+)?$ ]] || die "--host-gb takes a number"; HOST_GB="$2" ;;
        *)
            [[ "$2" =~ ^[1-9][0-9]*$ ]] || die "$1 takes a whole number above 0"
            case "$1" in
                --pool) POOL="$2" ;;
                --sessions) SESSIONS="$2" ;;
                --rounds) ROUNDS="$2" ;;
                --concurrency) CONCURRENCY="$2" ;;
            esac ;;
    esac
    shift 2
done

server=
# End the server that this script started, all of its processes and no other.
stop_server() {
    [ -n "$server" ] || return 0
    local group=$server tries=0
    server=
    kill -TERM "$group" 2>/dev/null || true
    while kill -0 -- "-$group" 2>/dev/null && [ $tries -lt 50 ]; do
        sleep 0.2
        tries=$((tries + 1))
    done
    kill -KILL -- "-$group" 2>/dev/null || true
    wait "$group" 2>/dev/null || true
}
trap stop_server EXIT
trap 'echo; echo "demo: interrupted, stopping" >&2; exit 130' INT
trap 'exit 143' TERM

bash "$ROOT/scripts/setup.sh" ${SETUP[@]+"${SETUP[@]}"}
# shellcheck source=/dev/null
source "$ROOT/.build/env.sh"
MODEL="$(python "$ROOT/scripts/prepare_model.py" --quiet)"
mkdir -p "$RESULTS"
RESULTS="$(cd "$RESULTS" && pwd)"
# The server must not start in the checkout, whose folders could stand in for installed packages.
cd "$RESULTS"

DEVICE=()
if ! { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }; then
    export SGLANG_PLATFORM=hicache_ext_cpu
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}"
    # Threads that spin while they wait would starve the load generator on a small machine.
    export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
    DEVICE=(--device cpu --attention-backend torch_native --disable-cuda-graph --mem-fraction-static 0.3)
fi

# start_server NAME FLAG...: start it on a free port and wait until it answers.
start_server() {
    local name="$1" log="$RESULTS/$1-server.log" start=$SECONDS
    shift
    PORT="$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
    setsid python -m sglang.launch_server --model-path "$MODEL" --host 127.0.0.1 --port "$PORT" \
        ${DEVICE[@]+"${DEVICE[@]}"} --max-total-tokens "$POOL" --enable-cache-report --enable-metrics \
        --random-seed 0 "$@" >"$log" 2>&1 </dev/null &
    server=$!
    echo "$name: starting the server (log: $log)"
    until python - "$PORT" <<'EOF'
import sys, urllib.request
try:
    sys.exit(urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=20).status != 200)
except OSError:
    sys.exit(1)
EOF
    do
        if ! kill -0 "$server" 2>/dev/null || [ $((SECONDS - start)) -ge 300 ]; then
            tail -n 25 "$log" | sed 's/^/    /' >&2
            die "the $name server did not start; its log is $log"
        fi
        sleep 0.5
    done
    echo "$name: ready after $((SECONDS - start)) s"
}

# run NAME FLAG...: serve, run the chats, stop.
run() {
    local name="$1" start=$SECONDS
    start_server "$@"
    python -m benchmarks.multiturn --base-url "http://127.0.0.1:$PORT" --label "$name" \
        --sessions "$SESSIONS" --rounds "$ROUNDS" --concurrency "$CONCURRENCY" \
        --first-tokens 500 --turn-tokens 100 --output-tokens 16 --bound exact --output "$RESULTS/$name.json.part" \
        || die "the chats on the $name server failed; its log is $RESULTS/$name-server.log"
    # Only a whole run is a result.
    mv "$RESULTS/$name.json.part" "$RESULTS/$name.json"
    stop_server
    echo "$name: done after $((SECONDS - start)) s"
}

# Chats between two servers, without and with a store.
run_remote() {
    setsid python -m benchmarks.moving --model "$MODEL" --logs "$RESULTS" --output "$RESULTS/moving.json.part" &
    server=$!
    wait "$server" || die "the chats between two servers failed; logs are in $RESULTS"
    server=
    mv "$RESULTS/moving.json.part" "$RESULTS/moving.json"
}

if [ "$ONLY" != remote ]; then
    echo "$SESSIONS chats of $ROUNDS questions, $CONCURRENCY at a time, on a device pool of $POOL tokens"
    [ "$ONLY" = hicache-ext ] || run vanilla
    [ "$ONLY" = vanilla ] || run hicache-ext --enable-hicache-ext --hicache-ext-host-gb "$HOST_GB"
fi
[ -z "$REMOTE" ] || run_remote

echo
if [ "$ONLY" != remote ] && [ -f "$RESULTS/vanilla.json" ] && [ -f "$RESULTS/hicache-ext.json" ]; then
    python -m benchmarks.multiturn --compare "$RESULTS/vanilla.json" "$RESULTS/hicache-ext.json" \
        --plot "$RESULTS/comparison.png"
    echo "plot: $RESULTS/comparison.png"
fi
for name in vanilla hicache-ext moving; do
    [ ! -f "$RESULTS/$name.json" ] || echo "results: $RESULTS/$name.json"
done
echo "demo done in $SECONDS s"
