#!/usr/bin/env bash
# A Mooncake master with its metadata service, in the foreground, for tests, the demo and single machines.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
HOST=127.0.0.1
PORT=50051
METADATA_PORT=8090
METRICS_PORT=9003
LOG=

usage() {
    cat <<EOF
usage: scripts/mooncake_up.sh [options] [-- MASTER OPTIONS]

Starts mooncake_master with an HTTP metadata service, waits until both answer, prints the store's address on standard
output and stays until it is interrupted. Servers that are given the address share one store.

  --host ADDRESS         address to listen on (default: $HOST, which other machines cannot reach)
  --port N               port of the master, 0 for a free one (default: $PORT)
  --metadata-port N      port of the metadata service, 0 for a free one (default: $METADATA_PORT)
  --metrics-port N       port of the master's metrics, 0 for a free one (default: $METRICS_PORT)
  --log FILE             where the master's log goes (default: standard error)
  -h, --help             this text

What follows -- goes to mooncake_master (see mooncake_master --help).
Exit code: 0 interrupted, 1 the master failed, 2 wrong use.
EOF
}

die() { echo "mooncake_up: $*" >&2; exit 1; }

while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --) shift; break ;;
        --host | --port | --metadata-port | --metrics-port | --log)
            [ $# -ge 2 ] || { echo "mooncake_up: $1 needs a value; see --help" >&2; exit 2; } ;;
        *) echo "mooncake_up: unknown option $1; see scripts/mooncake_up.sh --help" >&2; exit 2 ;;
    esac
    case "$1" in
        --host) HOST="$2" ;;
        --log) LOG="$2" ;;
        *)
            [[ "$2" =~ ^[0-9]+$ && "$2" -le 65535 ]] || { echo "mooncake_up: $1 takes a port number" >&2; exit 2; }
            case "$1" in
                --port) PORT="$2" ;;
                --metadata-port) METADATA_PORT="$2" ;;
                --metrics-port) METRICS_PORT="$2" ;;
            esac ;;
    esac
    shift 2
done

[ ! -d "$ROOT/.build/venv/bin" ] || PATH="$ROOT/.build/venv/bin:$PATH"
command -v mooncake_master >/dev/null ||
    die "mooncake_master is not installed: pip install 'hicache-ext[mooncake]', or run scripts/setup.sh"

answers() { (exec 3<>"/dev/tcp/$HOST/$1") 2>/dev/null; }

# The port that was asked for, or for 0 one where nothing listens.
choose() {
    local try
    if [ "$1" -ne 0 ]; then
        if answers "$1"; then die "port $1 on $HOST is in use: stop what listens there, or give another with $2"; fi
        echo "$1"
        return
    fi
    while try=$((20000 + RANDOM % 10000)); do
        answers "$try" || { echo "$try"; return; }
    done
}

PORT="$(choose "$PORT" --port)" || exit 1
METADATA_PORT="$(choose "$METADATA_PORT" --metadata-port)" || exit 1
METRICS_PORT="$(choose "$METRICS_PORT" --metrics-port)" || exit 1

[ -z "$LOG" ] || exec 2>>"$LOG"
mooncake_master --rpc_address="$HOST" --rpc_port="$PORT" \
    --enable_http_metadata_server=true --http_metadata_server_host="$HOST" \
    --http_metadata_server_port="$METADATA_PORT" --metrics_host="$HOST" --metrics_port="$METRICS_PORT" "$@" 1>&2 &
master=$!
trap 'kill "$master" 2>/dev/null || true' EXIT
trap 'exit 0' INT TERM

for _ in $(seq 150); do
    kill -0 "$master" 2>/dev/null || { code=0; wait "$master" || code=$?; die "the master ended with code $code"; }
    if answers "$PORT" && answers "$METADATA_PORT"; then
        echo "mooncake://$HOST:$PORT?metadata=http://$HOST:$METADATA_PORT/metadata"
        code=0
        wait "$master" || code=$?
        die "the master ended with code $code"
    fi
    sleep 0.1
done
die "the master does not answer on $HOST:$PORT after 15 s"
