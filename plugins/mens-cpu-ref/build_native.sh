#!/bin/sh
# Builds libvox_cpu in place, into src/mens_cpu_ref, for work on the sources without installing:
#     plugins/mens-cpu-ref/build_native.sh [extra cmake arguments]
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
build=${VOX_BUILD_DIR:-"$here/build/native"}
cmake -S "$here/native" -B "$build" -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$here/src/mens_cpu_ref" "$@" >&2
cmake --build "$build" --parallel 2 >&2
