#!/usr/bin/env bash
# Set-up, lint, types, then the tests: first those without a server, then those that start the real one.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
FAST=0
SERVER="server and not long"
SETUP=()
PYTEST=()

usage() {
    cat <<'EOF'
usage: scripts/test.sh [--fast | --long] [--fresh] [pytest options]

Sets everything up (scripts/setup.sh), then runs ruff, mypy and the tests, on two cores in about 40 minutes. Stops at the
first part that fails.

  --fast      leave out the tests that start the SGLang server and those marked slow
  --long      run also what is marked long: outages of stores one by one, ranks that share a store, further
              combinations of flags under faults (25 minutes more)
  --fresh     set up from scratch
  -h, --help  this text

Everything else goes to pytest, for example: scripts/test.sh --fast tests/core -x
HICACHE_EXT_VENV and XDG_CACHE_HOME count as in scripts/setup.sh --help.
EOF
}

for argument in "$@"; do
    case "$argument" in
        --fast) FAST=1 ;;
        --long) SERVER=server ;;
        --fresh) SETUP+=(--fresh) ;;
        -h | --help) usage; exit 0 ;;
        *) PYTEST+=("$argument") ;;
    esac
done

bash "$ROOT/scripts/setup.sh" ${SETUP[@]+"${SETUP[@]}"}
# shellcheck source=/dev/null
source "$ROOT/.build/env.sh"
cd "$ROOT"

# part TITLE COMMAND...: run it and say how long it took.
part() {
    local title="$1" start=$SECONDS
    shift
    echo "== $title"
    "$@" || { echo "test: $title failed: $*" >&2; exit 1; }
    echo "== $title: ok ($((SECONDS - start)) s)"
}

# tests MARKERS: pytest's "no test collected" is no failure where the options chose tests of another part.
tests() {
    local code=0
    python -m pytest -q --durations=30 --durations-min=10 -m "$1" ${PYTEST[@]+"${PYTEST[@]}"} || code=$?
    [ "$code" -eq 0 ] || { [ "$code" -eq 5 ] && [ "${#PYTEST[@]}" -gt 0 ]; }
}

part "ruff" ruff check .
part "mypy" mypy
if [ "$FAST" = 1 ]; then
    part "tests without a server, fast ones" tests "not server and not slow"
else
    part "tests without a server" tests "not server"
    part "tests with the real server" tests "$SERVER"
fi
