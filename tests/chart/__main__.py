"""`PYTHONPATH=tests python -m chart`: writes what is made from the chart. `make manifests` calls it."""

from __future__ import annotations

from chart import generated
from chart.helm import PROJECT

for path in generated.write():
    print(f"wrote {path.relative_to(PROJECT)}")
