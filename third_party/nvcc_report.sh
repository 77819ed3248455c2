#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Runs a CUDA compilation given as arguments and keeps what ptxas says about each kernel (registers, spills) in
# <folder>/<object>.log, which the tests read: a kernel that spills must not ship. Everything else that the
# compiler prints passes through. First argument: the folder.
folder=$1
shift

# The object's path, made into a file name.
object=$(printf '%s\n' "$@" | sed -n '/^-o$/{n;p;q;}')
case $object in
  *.o) ;;
  *) exec "$@" ;; # not a compilation
esac
mkdir -p "$folder" || exit 1
log=$folder/$(printf '%s' "$object" | sed 's|CMakeFiles/||; s|[/ ]|_|g').log

"$@" 2>"$log.tmp"
status=$?
grep -avE '^ptxas info|^[[:space:]]+[0-9]+ bytes stack frame' "$log.tmp" >&2
if [ "$status" -eq 0 ]; then
  mv "$log.tmp" "$log"
else
  rm -f "$log.tmp"
fi
exit "$status"
