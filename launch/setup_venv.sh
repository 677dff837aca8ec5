# Sourced by examples/run.sh and tests/run.sh: a virtual environment in .venv with the package, the extras named by the
# first argument, and what pip is to install besides by the others. Sets `root`, `bin` and `gpus`. TORCH chooses another
# PyTorch, VENV another place.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${VENV:-$root/.venv}"
bin="$venv/bin"
gpus="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)"

if [ "$gpus" -eq 0 ]; then
    torch="${TORCH:-torch==2.13.0}" # pip prefers a CPU build of this release wherever it is offered one
else
    torch="${TORCH:-torch}"
fi

[ -x "$bin/python" ] || python3 -m venv "$venv"
echo "Installing $torch and cce_tp[$1] into $venv" >&2
# --no-compile: Python compiles what is imported when it is; all of PyTorch at once takes a minute.
"$bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "$torch" --editable "$root[$1]" "${@:2}"
