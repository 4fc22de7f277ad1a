#!/bin/sh
# Does what REAL does; what it made of recorder.cpp is kept, by the text and the options, and copied.
case "$*" in
*" -c "*/jitkern/op/recorder.cpp*) ;;
*) exec REAL "$@" ;;
esac
for argument; do
  case "$argument" in
  */recorder.cpp) text=$argument ;;
  -ffile-prefix-map=*) continue ;;  # the folder of this build
  esac
  options="$options $argument"
done
mkdir -p STORE
made=STORE/$( (echo "$options" && cat "$text") | sha256sum | cut -c 1-32)
exec 9>"$made.lock"
flock 9  # until this process ends
if ! [ -d "$made" ]; then
  REAL "$@" || exit
  rm -rf "$made.new"  # of one that was killed
  mkdir "$made.new" && cp 0.* "$made.new" && mv "$made.new" "$made"
fi
cp "$made"/* .
