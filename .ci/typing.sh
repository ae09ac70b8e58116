#!/usr/bin/env bash
# Type-checks the sources. Top-level folders install as rlbridge.*, which no type checker knows, so the sources are first
# mirrored to build/typing/rlbridge with one symlink per file (per folder, checkers pass without checking). An error that
# is planted in the mirror must be found, or the check itself is broken.
set -euo pipefail
cd "$(dirname "$0")/.."

mirror=build/typing/rlbridge
planted=$mirror/sync/_planted.py
mypy=(.venv/bin/mypy --config-file pyproject.toml -p rlbridge)

rm -rf build/typing
find rlbridge trainer rollout sync transport conf recipes \( -name '*.py' -o -name py.typed \) -print0 |
    while IFS= read -r -d '' file; do
        link=$mirror/${file#rlbridge/}
        mkdir -p "$(dirname "$link")"
        ln -s "$PWD/$file" "$link"
    done

printf 'planted: int = "not a number"\n' > "$planted"
if found=$("${mypy[@]}"); then
    echo "typing: mypy did not find the error that was planted in $planted" >&2
    exit 1
fi
rm "$planted"
if ! grep -q '_planted.py:1: error: Incompatible types' <<< "$found"; then
    printf '%s\ntyping: mypy failed without finding the planted error\n' "$found" >&2
    exit 1
fi
"${mypy[@]}"
