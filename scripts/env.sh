# Makes .venv with what running needs (and, with "dev", what testing needs). Quick when nothing changed.
# Sourced by scripts/demo and scripts/test; $1 is "" or "dev". PYTHON names another interpreter.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # each of a run's dozen processes would compile the program anew, a third of its start
if [ ! -x .venv/bin/python ]; then
  for python in ${PYTHON:-python3.11 python3.12 python3}; do
    if "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then break; fi
    python=""
  done
  [ -n "$python" ] || { echo "asyncrl needs Python 3.11 or 3.12; there is none as ${PYTHON:-python3.11, python3.12 or python3} (set PYTHON to name one)" >&2; exit 1; }
  "$python" -m venv .venv
fi
# An interrupted start, or a Python without ensurepip (Debian's without python3-venv), leaves one without pip.
if ! .venv/bin/python -c 'import pip' 2> /dev/null && ! .venv/bin/python -m ensurepip > /dev/null 2>&1; then
  echo "$PWD/.venv has no pip, and its Python cannot make it: install its venv package (Debian and Ubuntu: apt install" \
    "python3-venv), remove .venv and start again" >&2
  exit 1
fi
installed=$(cat .venv/asyncrl-installed 2>/dev/null || true)
extras=${1:+[$1]}
case "$installed" in "[dev] "*) extras="[dev]" ;; esac # never take the test tools away
wanted="$extras $(cat pyproject.toml constraints.txt | cksum)"
if [ "$installed" != "$wanted" ]; then
  # What is imported compiles when it is first imported: the rest of torch and transformers takes a minute of compiling.
  pip=".venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt"
  # torch first and pinned: a build for the CPU, where pip's settings name an index or folder that has one, stays.
  $pip torch
  $pip -e ".$extras"
  echo "$wanted" > .venv/asyncrl-installed
fi
