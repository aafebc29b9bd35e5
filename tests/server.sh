# Sourced by what drives a real server of a release build: tests/clients/run, tests/ui/run, scripts/clients.
# Needs `cargo build --release --bin atom`, or ATOM_BIN. Sets $target, $atom and $scratch, which is gone at the end, and a temporary folder
# in it.
target=$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json,sys; print(json.load(sys.stdin)["target_directory"])')
atom=${ATOM_BIN:-$target/release/atom}
[ -x "$atom" ] || { echo "no $atom: cargo build --release --bin atom, or set ATOM_BIN"; exit 1; }

server=""
scratch=$(mktemp -d)
# What is run leaves files behind in the temporary folder; this one goes with the rest.
export TMPDIR=$scratch/t
mkdir "$TMPDIR"
stop() { if [ -n "$server" ]; then kill -TERM "$server" 2>/dev/null || true; wait "$server" || true; server=""; fi; }
trap 'stop; rm -rf "$scratch"' EXIT

# serve FLAGS..: starts a server on a free port, waits until it is ready and sets $url, without /v1.
serve() {
  mkfifo "$scratch/out"
  "$atom" serve --port 0 "$@" >"$scratch/out" 2>"$scratch/log" &
  server=$!
  exec 3<"$scratch/out"
  rm -f "$scratch/out"
  url=""
  # The pipe ends with the server, so this waits for a line or the end, and for nothing else.
  local line
  while IFS= read -r line <&3; do
    url=$(sed -n 's/.* on \(http[^ ]*\)\/v1 .*/\1/p' <<<"$line")
    if [ -n "$url" ]; then break; fi
  done
  [ -n "$url" ] || { cat "$scratch/log"; echo "the server ended before it was ready"; exit 1; }
  cat <&3 >/dev/null &
  exec 3<&-
}

# Ends the server as an operator does; one that fails at that has failed.
stop_cleanly() {
  kill -TERM "$server"
  wait "$server" || { cat "$scratch/log"; echo "the server did not stop cleanly"; exit 1; }
  server=""
}

# python_of NAME REQUIREMENTS: an environment below $target with these packages; sets $python.
python_of() {
  local venv=$target/$1-venv
  python=$venv/bin/python
  [ -x "$python" ] || python3 -m venv "$venv"
  if ! cmp -s "$2" "$venv/requirements.txt"; then
    "$python" -m pip install --quiet --disable-pip-version-check -r "$2"
    cp "$2" "$venv/requirements.txt"
  fi
}

# modules_of FOLDER: what the package-lock.json of a folder pins, installed below $target; sets $modules.
modules_of() {
  local tool file stale=""
  for tool in node npm; do
    command -v "$tool" >/dev/null || { echo "$0 needs $tool (Node 20 or later)"; exit 1; }
  done
  modules=$target/$(tr / - <<<"$1")-modules
  mkdir -p "$modules"
  for file in package.json package-lock.json .npmrc; do
    cmp -s "$1/$file" "$modules/$file" || stale=1
  done
  [ -n "$stale" ] || return 0
  rm -f "$modules/package.json"
  cp "$1/package-lock.json" "$1/.npmrc" "$modules/"
  cp "$1/package.json" "$modules/package.json.new"
  mv "$modules/package.json.new" "$modules/package.json"
  (cd "$modules" && npm ci --silent --no-progress) || { rm -f "$modules/package.json"; exit 1; }
}
