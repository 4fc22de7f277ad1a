#!/bin/sh
# Stands for a compiler on the PATH of a run, under its name: counts what it compiles, or refuses.
name=${0##*/}
here=${0%/*}
rest=
IFS=:
for folder in $PATH; do
  [ "$folder" = "$here" ] || rest=$rest${rest:+:}$folder
done
unset IFS
real=$(PATH=$rest command -v "$name") || { echo "$name: not found" >&2; exit 127; }
[ -d "$JITKERN_RUN" ] || exec "$real" "$@" # its caller, as jitkern, passes no environment on
for word in "$@"; do
  case $word in
    --version | -v | -V | --help | -dumpversion | -dumpmachine | -dumpfullversion | -print*) exec "$real" "$@" ;;
    *.cu | *.cpp | *.cc | *.c | *.cxx | *.ptx | *.ll) source=$word ;;
  esac
done
[ $# -eq 0 ] && exec "$real"
[ -e "$JITKERN_RUN/pids/$PPID" ] && exec "$real" "$@" # the Python process has counted it
what=$(printf %s "${source:-$*}" | cut -c 1-300 | tr '"\\' '  ')
asked=$(tr '\0' ' ' < "/proc/$PPID/cmdline" 2> /dev/null | cut -c 1-300 | tr '"\\' '  ')
if [ -n "$JITKERN_RUN_MODE" ]; then
  echo "jitkern run --$JITKERN_RUN_MODE: $name compiles $what, asked for by $asked, and the cache has nothing for it. Prepare it where compilers may run, with \`$JITKERN_RUN_COMMAND\`, and carry it here with --push, \`jitkern cache pack\` or \`jitkern remote push\`" >&2
  if [ "$JITKERN_RUN_MODE" = frozen ]; then
    echo "{\"tool\": \"$name\", \"what\": \"$what\", \"where\": \"$asked\", \"refused\": true}" >> "$JITKERN_RUN/events.jsonl"
    exit 1
  fi
fi
started=$(date +%s%N)
"$real" "$@"
code=$?
ms=$((($(date +%s%N) - started) / 1000000))
seconds=$((ms / 1000)).$(printf %03d $((ms % 1000)))
echo "{\"tool\": \"$name\", \"what\": \"$what\", \"where\": \"$asked\", \"seconds\": $seconds}" >> "$JITKERN_RUN/events.jsonl"
exit $code
