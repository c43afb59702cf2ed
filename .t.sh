export PYTHONPATH=plugin-api/src:host/src:plugins/mens-core/src:plugins/mens-cpu-ref/src:plugins/mens-torch-cuda/src:plugins/mens-torch-mps/src
/work/venv/bin/ruff format -q . ; /work/venv/bin/ruff check . ; /work/venv/bin/mypy 2>&1 | tail -3; /work/venv/bin/lint-imports --no-cache 2>&1 | tail -2
