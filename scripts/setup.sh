#!/usr/bin/env bash
# Everything that the demo and the tests need on a fresh Debian 12: Debian packages, Python packages, this checkout's
# environment with a patched SGLang, and the chat model. Safe to run again: what is there is kept.
set -euo pipefail

usage() {
    cat <<'EOF'
usage: scripts/setup.sh [--sglang RELEASE] [--fresh] [--no-model]

Sets up everything that the demo and the tests need: about 4 minutes and 11 GB the first time, seconds after that.
Afterwards `source .build/env.sh` puts this checkout's python and hicache-ext on the PATH.

  --sglang RELEASE  the SGLang release, one of those with patches in patches/ (default: 0.5.23). Another one than the
                    default gets .build/venv-RELEASE and .build/env-RELEASE.sh, beside those of the default.
  --fresh           build the shared Python environment and this checkout's own again
  --no-model        leave out the chat model
  -h, --help        this text

Environment:
  HICACHE_EXT_VENV  a virtual environment to use in place of the shared one; it is never removed, and packages that
                    it lacks are installed into it. A wrong SGLang release there is refused.
  PYTHON            the interpreter, 3.11 or 3.12 (default: python3.11, python3.12 or python3, the first that fits)
  XDG_CACHE_HOME    where the shared environment and the model are kept (default: ~/.cache)
EOF
}

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/hicache-ext"
NEEDED_GB=15
FRESH=0
MODEL=1
SGLANG=0.5.23
die() { echo "setup: $*" >&2; exit 1; }
while [ "$#" -gt 0 ]; do
    case "$1" in
        --sglang) SGLANG="${2:-}"; [ "$#" -gt 1 ] && shift ;;
        --sglang=*) SGLANG="${1#*=}" ;;
        --fresh) FRESH=1 ;;
        --no-model) MODEL=0 ;;
        -h | --help) usage; exit 0 ;;
        *) echo "setup: unknown option $1; see scripts/setup.sh --help" >&2; exit 2 ;;
    esac
    shift
done
if [ -z "$SGLANG" ] || [ ! -d "$ROOT/patches/sglang-$SGLANG" ]; then
    echo "setup: no patches for SGLang '$SGLANG'; there are: $(cd "$ROOT/patches" && echo sglang-* | sed 's/sglang-//g')" >&2
    exit 2
fi
if [ "$SGLANG" = 0.5.23 ]; then OWN=venv; else OWN="venv-$SGLANG"; fi

LOGS="$ROOT/.build/logs"
mkdir -p "$LOGS"

child=
trap '[ -z "$child" ] || kill -- "-$child" 2>/dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# step NUMBER TEXT LOG COMMAND...: run the command with its output in LOG, show the elapsed time, stop if it fails.
step() {
    local title="[$1/5] $2" log="$LOGS/$3.log" start=$SECONDS shown=0 code=0
    shift 3
    if [ -t 1 ]; then printf '%s ...' "$title"; fi
    # A process group of its own, so that an interrupt ends pip or apt too, not only the function that calls it.
    set -m
    "$@" >"$log" 2>&1 </dev/null &
    child=$!
    set +m
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.2
        if [ $((SECONDS - start)) -gt "$shown" ] && [ -t 1 ]; then
            shown=$((SECONDS - start))
            printf '\r%s ... %s s' "$title" "$shown"
        elif [ $((SECONDS - start)) -ge $((shown + 30)) ]; then
            shown=$((SECONDS - start))
            printf '%s ... %s s\n' "$title" "$shown"
        fi
    done
    wait "$child" || code=$?
    child=
    if [ "$code" -ne 0 ]; then
        printf '\n%s: failed after %s s. The end of %s:\n' "$title" $((SECONDS - start)) "$log" >&2
        tail -n 15 "$log" | sed 's/^/    /' >&2
        exit 1
    fi
    if [ -t 1 ]; then printf '\r\033[K'; fi
    printf '%s: done (%s s)\n' "$title" $((SECONDS - start))
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
            # The real file: a version manager's shim depends on the folder it is called from.
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
        if [ "$candidate" = "${PYTHON:-}" ]; then die "PYTHON=$PYTHON is not Python 3.11 or 3.12"; fi
    done
    return 1
}

# Debian packages that are missing, seen by what they provide, so that other sources of them count too.
missing_debian() {
    local python="$1"
    if [ -z "$python" ]; then
        echo python3 python3-venv
    elif [ -z "${HICACHE_EXT_VENV:-}" ] && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        echo python3-venv
    fi
    # SGLang's kernel package loads it at import.
    ldconfig -p | grep -q 'libnuma\.so\.1' || echo libnuma1
    # Mooncake loads them at import, whether or not there is an RDMA device.
    ldconfig -p | grep -q 'libibverbs\.so\.1' || echo libibverbs1
    ldconfig -p | grep -q 'librdmacm\.so\.1' || echo librdmacm1
    # Triton compiles its launchers at run time; on the CPU nothing is compiled.
    [ "$CUDA" = 0 ] || command -v g++ >/dev/null || echo g++
    if [ "$CUDA" = 1 ] && [ -n "$python" ]; then
        "$python" -c 'import os, sysconfig, sys
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || echo python3-dev
    fi
}

install_debian() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update && apt-get install -y --no-install-recommends "$@"
}

build_base() {
    rm -rf "$BASE"
    "$PY" -m venv "$BASE"
    "$PY" "$ROOT/scripts/environment.py" requirements --sglang "$SGLANG" --extras "$EXTRAS" >"$BASE/requirements.txt"
    "$BASE/bin/python" -m pip install --disable-pip-version-check -r "$BASE/requirements.txt"
    # The editable install of a checkout builds with it, without a network.
    "$BASE/bin/python" -m pip install --disable-pip-version-check 'setuptools>=77'
    date >"$BASE/.complete"
}

install_missing() {
    "$BASE/bin/python" -m pip install --disable-pip-version-check "${lacking[@]}" 'setuptools>=77'
}

overlay() {
    "$BASE/bin/python" "$ROOT/scripts/environment.py" overlay --sglang "$SGLANG" --base "$BASE"
}

patch_sglang() {
    "$ROOT/.build/$OWN/bin/python" "$ROOT/scripts/apply_patches.py" apply
}

# lock FD FILE: one set-up at a time.
lock() {
    eval "exec $1>\"\$2\""
    flock -n "$1" || { echo "waiting for another set-up that holds $2"; flock "$1"; }
}

if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then CUDA=1; else CUDA=0; fi
if [ "$CUDA" = 1 ]; then EXTRAS=cuda13,mooncake-cuda13,model,bench,dev; else EXTRAS=cpu,mooncake,model,bench,dev; fi

# 1. Debian packages
PY="$(find_python || true)"
mapfile -t debian < <(missing_debian "$PY" | tr ' ' '\n')
if [ "${#debian[@]}" -gt 0 ]; then
    command -v apt-get >/dev/null || die "these Debian packages or their like are missing: ${debian[*]}; install them"
    if [ "$(id -u)" -ne 0 ]; then
        die "Debian packages are missing; run: sudo apt-get update && sudo apt-get install -y ${debian[*]}"
    fi
    step 1 "Debian packages (${debian[*]})" apt install_debian "${debian[@]}"
    PY="$(find_python || true)"
    [ -n "$PY" ] || die "no Python 3.11 or 3.12 found; install one and name it with PYTHON=/path/to/python3.11"
else
    echo "[1/5] Debian packages: nothing missing"
fi

# 2. the shared Python packages
mkdir -p "$CACHE"
BASE="${HICACHE_EXT_VENV:-$CACHE/venv-$("$PY" "$ROOT/scripts/environment.py" hash --sglang "$SGLANG" --extras "$EXTRAS")}"
lock 8 "$CACHE/.$(basename "$BASE").lock"
if [ -n "${HICACHE_EXT_VENV:-}" ] && [ -x "$BASE/bin/python" ]; then
    missing="$("$BASE/bin/python" "$ROOT/scripts/environment.py" missing --sglang "$SGLANG" --extras "$EXTRAS")"
    if [ -n "$missing" ]; then
        mapfile -t lacking <<<"$missing"
        step 2 "Python packages that $BASE lacks (${#lacking[@]})" pip install_missing
    else
        echo "[2/5] Python packages: $BASE has them"
    fi
elif [ -f "$BASE/.complete" ] && { [ "$FRESH" = 0 ] || [ -n "${HICACHE_EXT_VENV:-}" ]; }; then
    echo "[2/5] Python packages: $BASE has them"
else
    if [ -e "$BASE" ] && [ -n "${HICACHE_EXT_VENV:-}" ]; then
        die "HICACHE_EXT_VENV=$BASE exists and is no virtual environment; name another folder"
    fi
    rm -rf "$BASE"
    free=$(($(df -Pk "$(dirname "$BASE")" | awk 'NR == 2 { print $4 }') / 1000000))
    [ "$free" -ge "$NEEDED_GB" ] || die "$(dirname "$BASE") has $free GB free, $NEEDED_GB GB are needed: free some," \
        "or set XDG_CACHE_HOME to a folder on a larger disk"
    step 2 "Python packages into $BASE (SGLang and torch, 11 GB, about 4 minutes)" pip build_base
fi
exec 8>&-

# 3. this checkout's environment
lock 9 "$ROOT/.build/.lock"
if [ "$FRESH" = 1 ]; then rm -rf "$ROOT/.build/$OWN"; fi
step 3 "this checkout's environment in .build/$OWN" overlay overlay

# 4. patches
if [ -f "$ROOT/scripts/apply_patches.py" ]; then
    step 4 "patches to this checkout's SGLang" patch patch_sglang
else
    echo "[4/5] patches to this checkout's SGLang: none in this checkout"
fi
exec 9>&-

# 5. the chat model
if [ "$MODEL" = 1 ]; then
    step 5 "chat model SmolLM2-135M-Instruct" model "$ROOT/.build/$OWN/bin/python" "$ROOT/scripts/prepare_model.py" --quiet
else
    echo "[5/5] chat model: left out"
fi
echo "set-up of SGLang $SGLANG done in $SECONDS s; to use it: source .build/${OWN#v}.sh"
