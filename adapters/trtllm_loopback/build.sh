#!/bin/sh
# Builds OUT/libtensorrt_llm_nixl_wrapper.so: build.sh KVFERRY OUT [ORIGINAL]
#   KVFERRY   the folder with libkvferry.so.0 and include/kvferry.h
#   ORIGINAL  TensorRT-LLM's library of that name; its other functions are found through ours
# CXX, CXXFLAGS: the compiler and more flags. KVFERRY_TRTLLM_SRC: TensorRT-LLM's source, to compile with its
# headers in place of our restatement.
set -eu
name=libtensorrt_llm_nixl_wrapper.so
if [ $# -lt 2 ] || [ $# -gt 3 ]; then
    sed -n '2,6s/^# //p' "$0" >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
for file in "$1/libkvferry.so.0" "$1/include/kvferry.h" ${3:+"$3"}; do
    [ -f "$file" ] || { echo "build.sh: $file: no such file" >&2; exit 1; }
done
mkdir -p "$2"
kvferry=$(cd "$1" && pwd) out=$(cd "$2" && pwd) original=
if [ $# -eq 3 ]; then
    original=$(cd "$(dirname "$3")" && pwd)/$(basename "$3")
    if [ "$original" -ef "$out/$name" ]; then
        echo "build.sh: $original would be overwritten: rename it first" >&2
        exit 1
    fi
    if grep -q libkvferry.so.0 "$original"; then
        echo "build.sh: $original needs libkvferry.so.0: it is not TensorRT-LLM's library" >&2
        exit 1
    fi
fi
compiler=${CXX:-c++}
made=$(mktemp -d "$out/building.XXXXXX")
trap 'rm -rf "$made"' EXIT

headers=
if [ -n "${KVFERRY_TRTLLM_SRC:-}" ]; then
    headers="-DKVFERRY_TRTLLM_HEADERS -isystem $KVFERRY_TRTLLM_SRC/cpp/include"
fi
behind=
if [ -n "$original" ]; then
    # The original has the name that ours has, so a dependency of that name would be ours itself. A library
    # without code takes the original's path as its name: the linker copies it, and the loader opens that path.
    $compiler -shared -nostdlib -x c /dev/null -x none -Wl,-soname,"$original" -o "$made/behind.so"
    behind="-Wl,--no-as-needed $made/behind.so"
fi
# It stays loaded (nodelete): agents may live longer than the loader's handle.
# shellcheck disable=SC2086 # the flags are lists of words
$compiler -std=c++17 -O2 -Wall -Wextra -Werror -fPIC -fvisibility=hidden -pthread ${CXXFLAGS:-} $headers \
    -I "$kvferry/include" "$here/src/agent.cpp" "$here/src/request.cpp" -shared -o "$made/$name" \
    -Wl,-soname,$name -Wl,--version-script,"$here/src/exports.map" -Wl,-z,nodelete \
    -Wl,--enable-new-dtags -Wl,-rpath,'$ORIGIN' -Wl,-rpath,"$kvferry" "$kvferry/libkvferry.so.0" $behind
mv "$made/$name" "$out/$name"
