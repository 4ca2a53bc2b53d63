# Makes .venv with what running needs (and, with "dev", what testing needs). Quick when nothing changed.
# Sourced by scripts/demo and scripts/test; $1 is "" or "dev".
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$(command -v python3.12 || command -v python3.11 || command -v python3)}
[ -x .venv/bin/python ] || "$python" -m venv .venv
extras=${1:+[$1]}
case "$(cat .venv/asyncrl-installed 2>/dev/null)" in "[dev] "*) extras="[dev]" ;; esac # never take the test tools away
wanted="$extras $(cat pyproject.toml constraints.txt | cksum)"
if [ "$(cat .venv/asyncrl-installed 2>/dev/null)" != "$wanted" ]; then
  # torch first and pinned: left to itself pip would bring gigabytes of CUDA to a machine without a GPU.
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".$extras"
  echo "$wanted" > .venv/asyncrl-installed
fi
